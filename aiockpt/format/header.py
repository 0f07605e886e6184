"""The order and offsets of the data segment, and the bytes of a header.

A file is 8 bytes (little endian: the header's length), the header (JSON, padded with
spaces so that the segment starts at a multiple of 64), and the data segment. The
header starts with a fixed prefix, and the 32 digits after it are the snapshot id: the
digest of the whole padded header in which these digits are zeros. So a flipped bit
anywhere in the header is noticed, and equal checkpoints have equal ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from typing import Final, TypeVar

import msgspec

from aiockpt.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from aiockpt.format.chunks import ALGORITHM, DIGEST_DIGITS, digest
from aiockpt.format.entries import (
    Bytes,
    Count,
    Entries,
    Entry,
    Storage,
    Storages,
    decode_entries,
    encode_entries,
    make_entries,
)
from aiockpt.format.limits import Limits, enforce, enforce_values, look
from aiockpt.format.manifest import (
    VERSION,
    ForeignHeader,
    Manifest,
    ManifestDocument,
    TensorSpec,
)
from aiockpt.format.paths import Node
from aiockpt.format.validate import fault_of, foreign_fault

__all__ = [
    "ALIGNMENT",
    "ID_SLICE",
    "LENGTH_BYTES",
    "PREFIX",
    "build_manifest",
    "decode_header",
    "header_length",
    "snapshot_id_of",
    "with_digests",
    "with_step",
]

ALIGNMENT: Final = 64
LENGTH_BYTES: Final = 8
PREFIX: Final = b'{"__metadata__":{"aiockpt.snapshot":"'
ID_SLICE: Final = slice(len(PREFIX), len(PREFIX) + 32)


def encode_header(entries: Entries, manifest: ManifestDocument) -> bytes:
    """Return the length, the JSON and the padding, with the snapshot id filled in.

    Raises:
        LocalProtocolError: a name that JSON or safetensors cannot hold.
    """
    if "__metadata__" in entries.names:
        raise LocalProtocolError("'__metadata__' cannot name a tensor")
    file = bytearray(LENGTH_BYTES)
    file += encode_metadata(manifest, "0" * 32)
    try:
        for piece in encode_entries(entries):
            file += piece
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a name is no valid Unicode: {error}") from None
    file += b"}"
    file += b" " * (-len(file) % ALIGNMENT)
    file[:LENGTH_BYTES] = (len(file) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    header = memoryview(file)[LENGTH_BYTES:]
    header[ID_SLICE] = snapshot_id_of(header).encode()
    return bytes(file)


def metadata_lead(snapshot_id: str) -> bytes:
    """Return what `encode_metadata` puts before the text of the manifest."""
    return PREFIX + snapshot_id.encode() + b'","format":"pt","aiockpt":"'


def encode_metadata(manifest: ManifestDocument, snapshot_id: str) -> bytes:
    """Return the start of the JSON, up to the comma before the first entry."""
    # The order of the keys is normative: a header starts with PREFIX.
    members = {
        "aiockpt.snapshot": snapshot_id,
        "format": "pt",
        "aiockpt": msgspec.json.encode(manifest).decode(),
    }
    return msgspec.json.encode({"__metadata__": members})[:-1]


def snapshot_id_of(header: bytes | memoryview) -> str:
    """Return the snapshot id that belongs to a header (without its 8 length bytes)."""
    view = memoryview(header)
    return digest((view[: ID_SLICE.start], b"0" * 32, view[ID_SLICE.stop :]))


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


_BEFORE_DIGESTS: Final = rb"\"digests\":\""


def with_step(manifest: Manifest, step: int) -> Manifest:
    """Return the manifest of the same memory under another step."""
    return build_manifest(
        step=step,
        chunk_bytes=manifest.chunk_bytes,
        storages=[
            Storage(name, entry.dtype, entry.shape, _length(entry), align=1)
            for name, entry in zip(manifest.names, manifest.entries, strict=True)
        ],
        views=manifest.views,
        tree=manifest.tree,
        digests=manifest.digests,
    )


def with_digests(manifest: Manifest, digests: Sequence[str]) -> Manifest:
    """Return the manifest with the chunks' digests; its header is as long."""
    header = bytearray(manifest.header)
    header[digests_at(manifest)] = "".join(digests).encode()
    text = memoryview(header)[LENGTH_BYTES:]
    snapshot_id = snapshot_id_of(text)
    text[ID_SLICE] = snapshot_id.encode()
    return replace(
        manifest,
        snapshot_id=snapshot_id,
        digests=tuple(digests),
        header=bytes(header),
    )


def digests_at(manifest: Manifest) -> slice:
    """Return where in the header the digests stand, one after the other."""
    # What stands before them, in canonical form, is numbers and a known algorithm.
    start = manifest.header.find(_BEFORE_DIGESTS)
    assert start >= 0, "a manifest without its header"
    start += len(_BEFORE_DIGESTS)
    return slice(start, start + DIGEST_DIGITS * len(manifest.digests))


def _length(entry: Entry) -> int:
    start, stop = entry.data_offsets
    return stop - start


T = TypeVar("T")

_PIECE_BYTES: Final = 256 << 10
_PIECE_ENTRIES: Final = 2_000

_ESCAPE_BYTES: Final = 6
_LEVELS: Final = 16

_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()


def decode_text(header: Bytes, start: int, stop: int) -> bytes:
    """Return the text that a string of the header holds, its quotes left out.

    Raises:
        msgspec.MsgspecError: malformed.
        RemoteProtocolError: this is not how we write it.
    """
    found = bytearray()
    while start < stop:
        look()
        end = _end_of_piece(header, start, min(start + _PIECE_BYTES, stop))
        piece = b'"%b"' % header[start : min(end, stop)]
        text = msgspec.json.decode(piece, type=str)
        if _ENCODER.encode(text) != piece:
            raise RemoteProtocolError("the header is not in canonical form")
        found += text.encode()
        start = end
    return bytes(found)


def _end_of_piece(header: Bytes, start: int, stop: int) -> int:
    """Return ``stop``, or the end of the escape or character that is cut there."""
    while header[stop : stop + 1] and 0x80 <= header[stop] < 0xC0:
        stop += 1
    piece = header[start:stop]
    at = piece.rfind(b"\\", -_ESCAPE_BYTES)
    if at < 0 or (at + 1 - len(piece[: at + 1].rstrip(b"\\"))) % 2 == 0:
        return stop
    size = _ESCAPE_BYTES if header[start + at + 1 : start + at + 2] == b"u" else 2
    return max(stop, start + at + size)


def decode_items(text: bytes | memoryview, kind: type[T], *, most: int) -> list[T]:
    """Return the items of a JSON array.

    Raises:
        msgspec.MsgspecError: malformed, or an item of another type.
        LimitExceededError: more than ``most``.
    """
    items = _RAWS.decode(text)
    enforce("the number of tensors", len(items), most)
    decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
    found: list[T] = []
    for first in range(0, len(items), _PIECE_ENTRIES):
        look()
        some = items[first : first + _PIECE_ENTRIES]
        found += decoder.decode(b"[%b]" % b",".join(some))
    return found


def decode_node(text: bytes | memoryview, *, depth: int = 0) -> Node:
    """Return the value of JSON: of long arrays item by item.

    Raises:
        msgspec.MsgspecError: malformed.
    """
    # Each level looks at all of the text again, so there are few.
    if len(text) < _PIECE_BYTES or depth == _LEVELS or text[:1] != b"[":
        return msgspec.json.decode(text)  # type: ignore[no-any-return]
    items = _RAWS.decode(text)
    found: list[Node] = []
    for first in range(0, len(items), _PIECE_ENTRIES):
        look()
        some = items[first : first + _PIECE_ENTRIES]
        if sum(map(len, some)) < _PIECE_BYTES:
            found += msgspec.json.decode(b"[%b]" % b",".join(some))
        else:
            found += (decode_node(memoryview(each), depth=depth + 1) for each in some)
    return found
