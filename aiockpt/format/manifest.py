"""Build a checkpoint's manifest; decode and validate the header that holds one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import Final

import msgspec

from aiockpt.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from aiockpt.format.chunks import ALGORITHM, DIGEST_DIGITS
from aiockpt.format.document import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    VERSION,
    Count,
    ForeignHeader,
    Manifest,
    ManifestDocument,
    Outline,
    TensorSpec,
)
from aiockpt.format.entries import Bytes, Entries
from aiockpt.format.layout import (
    ALIGNMENT,
    ID_SLICE,
    LENGTH_BYTES,
    PREFIX,
    Entry,
    Storage,
    Storages,
    encode_header,
    make_entries,
    metadata_lead,
    snapshot_id_of,
)
from aiockpt.format.limits import Limits, enforce, enforce_values
from aiockpt.format.paths import Node
from aiockpt.format.pieces import decode_entries, decode_items, decode_node, decode_text
from aiockpt.format.validate import fault_of, foreign_fault

__all__ = [
    "COMPACTED",
    "CONJ",
    "NEG",
    "PARAMETER",
    "REQUIRES_GRAD",
    "VERSION",
    "ForeignHeader",
    "Manifest",
    "ManifestDocument",
    "Outline",
    "TensorSpec",
    "build_manifest",
    "decode_header",
    "header_length",
]

# No header is a terabyte, but the first bytes of a text, read as a number, are more.
_ABSURD: Final = 1 << 40
_VALUES_PER_TENSOR: Final = 24
_END_OF_METADATA: Final = b'}"}'


def build_manifest(
    *,
    step: int,
    chunk_bytes: int,
    storages: Storages | Sequence[Storage],
    views: Sequence[TensorSpec] = (),
    tree: Node,
    digests: Sequence[str],
    algorithm: str = ALGORITHM,
) -> Manifest:
    """Return the manifest of a staged checkpoint, its header encoded.

    ``storages`` are in segment order (`layout.plan_segment`); ``digests`` are the
    chunks' hex digests.

    Raises:
        LocalProtocolError: a receiver would refuse it.
    """
    if not isinstance(storages, Storages):
        storages = Storages.of(storages)
    entries = make_entries(storages)
    document = ManifestDocument(
        version=VERSION,
        step=step,
        chunk_bytes=chunk_bytes,
        algorithm=algorithm,
        digests="".join(digests),
        entries=len(entries),
        views=tuple(views),
        tree=msgspec.Raw(msgspec.json.encode(tree)),
    )
    if fault := fault_of(document, entries, algorithm):
        raise LocalProtocolError(f"cannot describe step {step}: {fault}")
    return _manifest(document, entries, tree, encode_header(entries, document))


def _manifest(
    document: ManifestDocument, entries: Entries, tree: Node, header: Bytes
) -> Manifest:
    digits = document.digests
    starts = range(0, len(digits), DIGEST_DIGITS)
    return Manifest(
        step=document.step,
        snapshot_id=bytes(memoryview(header)[LENGTH_BYTES:][ID_SLICE]).decode(),
        chunk_bytes=document.chunk_bytes,
        algorithm=document.algorithm,
        digests=tuple(digits[start : start + DIGEST_DIGITS] for start in starts),
        entries=entries,
        views=document.views,
        tree=tree,
        header=header,
        header_bytes=len(header),
    )


def header_length(first8: bytes | memoryview, *, limits: Limits) -> int:
    """Return how many bytes the header has, these 8 included.

    Raises:
        RemoteProtocolError: this cannot be the start of a safetensors file.
        LimitExceededError: longer than ``limits.max_header_bytes``.
    """
    length = int.from_bytes(first8, "little")
    if len(first8) != LENGTH_BYTES or not 2 <= length < _ABSURD:
        raise RemoteProtocolError("this is no safetensors header")
    enforce("the header's length", length, limits.max_header_bytes)
    return LENGTH_BYTES + length


def decode_header(
    data: bytes | bytearray | memoryview | mmap,
    *,
    limits: Limits,
    algorithm: str = ALGORITHM,
    ours: bool = False,
) -> Manifest | ForeignHeader:
    """Return what a complete header (its 8 length bytes included) says.

    A map is not copied: nobody may write to it any more. ``algorithm`` is that of the
    digests that the reader can compute.

    With ``ours`` another tool's header is refused before it is decoded.

    Everything but the tree is validated: a Manifest that this returns can be
    allocated, fetched and viewed without further checks. `decode_tree` validates
    the tree.

    Raises:
        IntegrityError: the snapshot id is not the header's digest.
        RemoteProtocolError: malformed, contradictory, or of another version.
        LimitExceededError: larger than ``limits`` allow.
    """
    raw: Bytes = data if isinstance(data, mmap) else bytes(data)
    total = header_length(raw[:LENGTH_BYTES], limits=limits)
    if len(raw) != total:
        raise RemoteProtocolError(f"a header of {len(raw)} instead of {total} bytes")
    enforce_values(
        "the number of values in the header",
        raw,
        limits.max_nodes + _VALUES_PER_TENSOR * limits.max_tensors,
    )
    header = memoryview(raw)[LENGTH_BYTES:]
    if bytes(header[: len(PREFIX)]) == PREFIX:
        return _decode_own(raw, header, limits, algorithm)
    if ours:
        raise RemoteProtocolError("it has no manifest of aiockpt")
    return _decode_foreign(raw, header, limits)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from error


class _Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A `ManifestDocument` whose views are undecoded."""

    version: int
    step: Count
    chunk_bytes: Count
    algorithm: str
    digests: str
    entries: Count
    views: msgspec.Raw = msgspec.Raw(b"[]")
    tree: msgspec.Raw


class _Versioned(msgspec.Struct):
    version: int


_VERSIONED: Final = msgspec.json.Decoder(_Versioned)
_DOCUMENT: Final = msgspec.json.Decoder(_Document)
_ENTRY: Final = msgspec.json.Decoder(Entry)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRINGS: Final = msgspec.json.Decoder(dict[str, str])


def _decode_own(
    raw: Bytes, header: memoryview, limits: Limits, algorithm: str
) -> Manifest:
    claimed = bytes(header[ID_SLICE]).decode("ascii", "replace")
    if (actual := snapshot_id_of(header)) != claimed:
        raise IntegrityError(expected=claimed, actual=actual)
    document, start = _decode_metadata(raw, claimed, limits)
    with _reading("entries"):
        entries = decode_entries(raw, start)
    tensors = len(entries) + len(document.views)
    enforce("the number of tensors", tensors, limits.max_tensors)
    if fault := fault_of(document, entries, algorithm):
        raise RemoteProtocolError(f"the header contradicts itself: {fault}")
    text = bytes(document.tree)
    enforce_values("the number of nodes in the tree", text, limits.max_nodes)
    with _reading("tree"):
        tree = decode_node(text)
    manifest = _manifest(document, entries, tree, raw)
    enforce("the data segment", manifest.segment_bytes, limits.max_bytes)
    return manifest


def _decode_metadata(
    raw: Bytes, snapshot_id: str, limits: Limits
) -> tuple[ManifestDocument, int]:
    """Return the document, and where the metadata ends."""
    lead, start = metadata_lead(snapshot_id), LENGTH_BYTES
    # In a string a quote is escaped, so nothing before the end looks like the end.
    stop = raw.find(_END_OF_METADATA, start)
    if raw[start : start + len(lead)] != lead or stop < start + len(lead):
        raise RemoteProtocolError("the header is not in canonical form")
    with _reading("header"):
        text = decode_text(raw, start + len(lead), stop + 1)
    document = _decode_document(text, limits)
    padded = len(raw) % ALIGNMENT == 0 and raw[-ALIGNMENT:] != b" " * ALIGNMENT
    if not padded or msgspec.json.encode(document) != text:
        raise RemoteProtocolError("the header is not in canonical form")
    return document, stop + len(_END_OF_METADATA)


def _decode_document(text: bytes, limits: Limits) -> ManifestDocument:
    with _reading("manifest"):
        # First alone: another version may have other members.
        version = _VERSIONED.decode(text).version
        if version == VERSION:
            return _document(_DOCUMENT.decode(text), limits)
    raise RemoteProtocolError(
        f"the header has format version {version}; this side knows version {VERSION}"
    )


def _document(found: _Document, limits: Limits) -> ManifestDocument:
    views = decode_items(bytes(found.views), TensorSpec, most=limits.max_tensors)
    return ManifestDocument(
        version=found.version,
        step=found.step,
        chunk_bytes=found.chunk_bytes,
        algorithm=found.algorithm,
        digests=found.digests,
        entries=found.entries,
        views=tuple(views),
        tree=found.tree,
    )


def _decode_foreign(raw: Bytes, header: memoryview, limits: Limits) -> ForeignHeader:
    with _reading("header"):
        members = _MEMBERS.decode(header)
        metadata = _STRINGS.decode(members.pop("__metadata__", b"{}"))
        unsorted = {name: _ENTRY.decode(member) for name, member in members.items()}
    if not metadata.keys().isdisjoint(("aiockpt", "aiockpt.snapshot")):
        raise RemoteProtocolError(
            "the header is damaged, or another tool rewrote an aiockpt file and kept "
            "its metadata; without __metadata__ it is a plain safetensors file"
        )
    enforce("the number of tensors", len(unsorted), limits.max_tensors)
    in_order = sorted(unsorted.items(), key=lambda item: item[1].data_offsets)
    entries = Entries.of(dict(in_order))
    if fault := foreign_fault(entries):
        raise RemoteProtocolError(f"the header contradicts itself: {fault}")
    found = ForeignHeader(entries, metadata, raw)
    enforce("the data segment", found.segment_bytes, limits.max_bytes)
    return found
