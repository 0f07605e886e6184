"""The bytes of a header: build a manifest with its header, or decode and check one.

A file is 8 bytes (little endian: the header's length), the header (JSON, padded with
spaces so that the data segment starts at a multiple of 64), and the data segment. The
header starts with a fixed prefix. The 32 digits after it are the check digits: the
xxh3-128 digest of the whole padded header in which these digits are zeros. So a flipped
bit anywhere in the header is noticed.

The snapshot id is the digest of the same bytes, by the algorithm of the manifest. With
xxh3-128 it is the check digits. With a cryptographic algorithm, nobody can make another
header with the same id. Equal checkpoints have equal ids.

Long JSON is encoded and decoded in pieces. One call for a header of 100,000 entries
would hold the interpreter lock for a tenth of a second, and stop every event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from typing import Final

import msgspec

from aiockpt.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from aiockpt.format.chunks import ALGORITHM, ALGORITHMS, digest, digits_of
from aiockpt.format.entries import (
    Bytes,
    Entries,
    Entry,
    decode_entries,
    encode_entries,
    not_canonical,
)
from aiockpt.format.limits import Limits, enforce, enforce_values, raise_if_cancelled
from aiockpt.format.manifest import (
    VERSION,
    ForeignHeader,
    Manifest,
    ManifestDocument,
    TensorSpec,
)
from aiockpt.format.paths import Node
from aiockpt.format.validate import fault_of, foreign_fault

ALIGNMENT: Final = 64
LENGTH_BYTES: Final = 8
PREFIX: Final = b'{"__metadata__":{"aiockpt.snapshot":"'
_CHECK_DIGITS: Final = digits_of(ALGORITHM)
CHECK_SLICE: Final = slice(len(PREFIX), len(PREFIX) + _CHECK_DIGITS)

_AFTER_ID: Final = b'","format":"pt","aiockpt":"'
_END_OF_METADATA: Final = b'}"}'
_BEFORE_DIGESTS: Final = rb"\"digests\":\""

# No header is a terabyte, but the first bytes of a text, read as a number, are more.
_IMPLAUSIBLE_BYTES: Final = 1 << 40
VALUES_PER_TENSOR: Final = 24
_PIECE_BYTES: Final = 256 << 10
_PIECE_ITEMS: Final = 2_000
_SPLIT_LEVELS: Final = 16  # each level looks at all of the text again


def build_manifest(
    *,
    step: int,
    chunk_bytes: int,
    entries: Entries,
    views: Sequence[TensorSpec] = (),
    tree: Node,
    digests: Sequence[str],
    algorithm: str = ALGORITHM,
) -> Manifest:
    """Return the manifest of a staged checkpoint, its header encoded.

    ``entries`` are in the order of the data segment (`lay_out`), and ``digests`` are
    the chunks' hex digests.

    Raises:
        LocalProtocolError: a receiver would refuse it.
    """
    encode = msgspec.json.encode
    document = ManifestDocument(
        version=VERSION,
        step=step,
        chunk_bytes=chunk_bytes,
        algorithm=algorithm,
        digests="".join(digests),
        entries=len(entries),
        views=msgspec.Raw(encode(views)) if views else msgspec.UNSET,
        tree=msgspec.Raw(encode(tree)),
    )
    if fault := fault_of(document, views, entries, [algorithm]):
        raise LocalProtocolError(f"cannot describe step {step}: {fault}")
    # The text of the manifest is a JSON string; the order of the keys is normative.
    text = encode(encode(document).decode())
    file = bytearray(LENGTH_BYTES)
    file += PREFIX + b"0" * _CHECK_DIGITS + _AFTER_ID + text[1:] + b"}"
    try:
        for piece in encode_entries(entries):
            file += piece
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a name is no valid Unicode: {error}") from None
    file += b"}"
    file += b" " * (-len(file) % ALIGNMENT)
    file[:LENGTH_BYTES] = (len(file) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    header = memoryview(file)[LENGTH_BYTES:]
    header[CHECK_SLICE] = snapshot_id_of(header).encode()
    return _manifest(document, views, entries, tree, bytes(file))


def with_step(manifest: Manifest, step: int) -> Manifest:
    """Return the manifest of the same memory under another step."""
    return build_manifest(
        step=step,
        chunk_bytes=manifest.chunk_bytes,
        entries=manifest.entries,
        views=manifest.views,
        tree=manifest.tree,
        digests=manifest.digests,
        algorithm=manifest.algorithm,
    )


def with_digests(manifest: Manifest, digests: Sequence[str]) -> Manifest:
    """Return the manifest with the chunks' digests filled in.

    A snapshot that is staged in a hurry gets its digests later, perhaps in another
    process. Until then its manifest has zeros in their place (`ChunkGrid.unsealed`), so
    the header is as long as it will be, and differs only in the digests and the id.
    """
    header = bytearray(manifest.header)
    # What stands before the digests, in canonical form, is numbers and an algorithm.
    start = header.find(_BEFORE_DIGESTS)
    assert start >= 0, "a manifest without its header"
    start += len(_BEFORE_DIGESTS)
    stop = start + digits_of(manifest.algorithm) * len(manifest.digests)
    header[start:stop] = "".join(digests).encode()
    text = memoryview(header)[LENGTH_BYTES:]
    text[CHECK_SLICE] = snapshot_id_of(text).encode()
    return replace(
        manifest,
        snapshot_id=_snapshot_id(text, manifest.algorithm),
        digests=tuple(digests),
        header=bytes(header),
    )


def snapshot_id_of(header: bytes | memoryview, algorithm: str = ALGORITHM) -> str:
    """Return the snapshot id that belongs to a header (without its 8 length bytes).

    That of the default algorithm is the check digits of every header.

    Raises:
        MissingExtraError: the algorithm's library is not installed.
    """
    view, zeros = memoryview(header), b"0" * _CHECK_DIGITS
    parts = (view[: CHECK_SLICE.start], zeros, view[CHECK_SLICE.stop :])
    return digest(parts, algorithm)


def header_length(first8: bytes | memoryview, *, limits: Limits) -> int:
    """Return how many bytes the header has, these 8 included.

    Raises:
        RemoteProtocolError: this cannot be the start of a safetensors file.
        LimitExceededError: longer than ``limits.max_header_bytes``.
    """
    length = int.from_bytes(first8, "little")
    if len(first8) != LENGTH_BYTES or not 2 <= length < _IMPLAUSIBLE_BYTES:
        raise RemoteProtocolError("this is no safetensors header")
    enforce("the header's length", length, limits.max_header_bytes, "max_header_bytes")
    return LENGTH_BYTES + length


def decode_header(
    data: bytes | bytearray | memoryview | mmap,
    *,
    limits: Limits,
    algorithms: Sequence[str] = ALGORITHMS,
    ours: bool = False,
) -> Manifest | ForeignHeader:
    """Decode and validate a complete header (its 8 length bytes included).

    Everything but the tree is validated: a Manifest that this returns can be
    allocated, fetched and viewed without further checks. `decode_tree` validates
    the tree.

    Args:
        data: The header. A map is not copied, so nobody may write to it any more.
        limits: What this side accepts.
        algorithms: The algorithms of digests that are accepted.
        ours: Refuse another tool's header before it is decoded.

    Raises:
        IntegrityError: the check digits are not the header's digest.
        RemoteProtocolError: malformed, inconsistent, or of another version.
        MissingExtraError: the library of the manifest's algorithm is not installed.
        LimitExceededError: larger than ``limits`` allow.
    """
    raw: Bytes = data if isinstance(data, mmap) else bytes(data)
    total = header_length(raw[:LENGTH_BYTES], limits=limits)
    if len(raw) != total:
        raise RemoteProtocolError(f"a header of {len(raw)} instead of {total} bytes")
    enforce_values(
        "the number of values in the header",
        raw,
        limits.max_nodes + VALUES_PER_TENSOR * limits.max_tensors,
    )
    header = memoryview(raw)[LENGTH_BYTES:]
    if bytes(header[: len(PREFIX)]) == PREFIX:
        return _decode_own(raw, header, limits, algorithms)
    if ours:
        raise RemoteProtocolError("it has no manifest of aiockpt")
    return _decode_foreign(raw, header, limits)


def _manifest(
    document: ManifestDocument,
    views: Sequence[TensorSpec],
    entries: Entries,
    tree: Node,
    header: Bytes,
) -> Manifest:
    digits, length = document.digests, digits_of(document.algorithm)
    starts = range(0, len(digits), length)
    return Manifest(
        step=document.step,
        snapshot_id=_snapshot_id(memoryview(header)[LENGTH_BYTES:], document.algorithm),
        chunk_bytes=document.chunk_bytes,
        algorithm=document.algorithm,
        digests=tuple(digits[start : start + length] for start in starts),
        entries=entries,
        views=tuple(views),
        tree=tree,
        header=header,
        header_bytes=len(header),
    )


def _snapshot_id(header: memoryview, algorithm: str) -> str:
    """Return the snapshot id of a header whose check digits are right."""
    if digits_of(algorithm) == _CHECK_DIGITS:  # xxh3-128: it is known already
        return bytes(header[CHECK_SLICE]).decode()
    return snapshot_id_of(header, algorithm)


# ------------------------------------------------------------------------- decode


class _Versioned(msgspec.Struct):
    version: int


_VERSIONED: Final = msgspec.json.Decoder(_Versioned)
_DOCUMENT: Final = msgspec.json.Decoder(ManifestDocument)
_VIEWS: Final = msgspec.json.Decoder(list[TensorSpec])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(Entry)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRINGS: Final = msgspec.json.Decoder(dict[str, str])


def _decode_own(
    raw: Bytes, header: memoryview, limits: Limits, algorithms: Sequence[str]
) -> Manifest:
    claimed = bytes(header[CHECK_SLICE]).decode("ascii", "replace")
    if (actual := snapshot_id_of(header)) != claimed:
        raise IntegrityError(expected=claimed, actual=actual)
    # In a string a quote is escaped, so nothing before the end looks like the end.
    start = LENGTH_BYTES + CHECK_SLICE.stop + len(_AFTER_ID)
    stop = raw.find(_END_OF_METADATA, LENGTH_BYTES)
    padded = len(raw) % ALIGNMENT == 0 and raw[-ALIGNMENT:] != b" " * ALIGNMENT
    if not padded or stop < start or raw[start - len(_AFTER_ID) : start] != _AFTER_ID:
        raise not_canonical()
    with _reading("header"):
        text = _decode_text(raw, start, stop + 1, limits.max_text_bytes)
    with _reading("manifest"):
        document, views = _decode_manifest(text, limits)
    with _reading("entries"):
        entries = decode_entries(raw, stop + len(_END_OF_METADATA))
    tensors = len(entries) + len(views)
    enforce("the number of tensors", tensors, limits.max_tensors, "max_tensors")
    if fault := fault_of(document, views, entries, algorithms):
        raise RemoteProtocolError(f"the header is inconsistent: {fault}")
    nodes = bytes(document.tree)
    enforce_values(
        "the number of nodes in the tree", nodes, limits.max_nodes, "max_nodes"
    )
    with _reading("tree"):
        tree = _decode_node(nodes, limits.max_text_bytes)
    manifest = _manifest(document, views, entries, tree, raw)
    enforce("the data segment", manifest.segment_bytes, limits.max_bytes, "max_bytes")
    return manifest


def _decode_text(raw: Bytes, start: int, stop: int, longest: int) -> bytes:
    """Return the text of the JSON string between the quotes at ``start - 1, stop``.

    A string of more than ``longest`` bytes without a comma is refused.
    """
    found = bytearray()
    while start < stop:
        raise_if_cancelled()
        # Behind a comma: no escape has one, and no character of several bytes.
        end = raw.find(b",", start + _PIECE_BYTES, stop) + 1 or stop
        _enforce_text(end - start - _PIECE_BYTES, longest)
        piece = b'"%b"' % raw[start:end]
        text = msgspec.json.decode(piece, type=str)
        if msgspec.json.encode(text) != piece:
            raise not_canonical()
        found += text.encode()
        start = end
    return bytes(found)


def _decode_manifest(
    text: bytes, limits: Limits
) -> tuple[ManifestDocument, list[TensorSpec]]:
    # First the version alone: another one may have other members.
    if (version := _VERSIONED.decode(text).version) != VERSION:
        raise RemoteProtocolError(
            f"the header has format version {version}; "
            f"this side knows version {VERSION}"
        )
    document = _DOCUMENT.decode(text)
    if msgspec.json.encode(document) != text:
        raise not_canonical()
    views: list[TensorSpec] = []
    if document.views is not msgspec.UNSET:
        given = bytes(document.views)
        items = _ITEMS.decode(given)
        enforce("the number of tensors", len(items), limits.max_tensors, "max_tensors")
        if not items or _array(items) != given:
            raise not_canonical()
        for first in range(0, len(items), _PIECE_ITEMS):
            raise_if_cancelled()
            piece = _array(items[first : first + _PIECE_ITEMS])
            some = _VIEWS.decode(piece)
            if msgspec.json.encode(some) != piece:
                raise not_canonical()
            views += some
    return document, views


def _enforce_text(nbytes: int, longest: int) -> None:
    enforce("the length of a string in the header", nbytes, longest, "max_text_bytes")


def _decode_node(text: bytes | memoryview, longest: int, *, level: int = 0) -> Node:
    """Return the value of JSON, reading long arrays item by item.

    A string of more than ``longest`` bytes is refused.
    """
    if text[:1] == b'"':
        _enforce_text(len(text), longest)
    if len(text) < _PIECE_BYTES or level == _SPLIT_LEVELS or text[:1] != b"[":
        return msgspec.json.decode(text)  # type: ignore[no-any-return]
    items = _ITEMS.decode(text)
    found: list[Node] = []
    for first in range(0, len(items), _PIECE_ITEMS):
        raise_if_cancelled()
        some = items[first : first + _PIECE_ITEMS]
        if sum(map(len, some)) < _PIECE_BYTES:
            found += msgspec.json.decode(_array(some))
        else:  # not copied: a hostile tree may have one long item on every level
            deeper = level + 1
            found += (
                _decode_node(memoryview(each), longest, level=deeper) for each in some
            )
    return found


def _array(items: Sequence[msgspec.Raw]) -> bytes:
    return b"[%b]" % b",".join(items)


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
    enforce("the number of tensors", len(unsorted), limits.max_tensors, "max_tensors")
    in_order = sorted(unsorted.items(), key=lambda item: item[1].data_offsets)
    entries = Entries.of(dict(in_order))
    if fault := foreign_fault(entries):
        raise RemoteProtocolError(f"the header is inconsistent: {fault}")
    found = ForeignHeader(entries, metadata, raw)
    enforce("the data segment", found.segment_bytes, limits.max_bytes, "max_bytes")
    return found


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from error
