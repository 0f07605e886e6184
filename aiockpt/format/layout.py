"""The order and offsets of the data segment, and the bytes of a header.

A file is 8 bytes (little endian: the header's length), the header (JSON, padded with
spaces so that the segment starts at a multiple of 64), and the data segment. The
header starts with a fixed prefix, and the 32 digits after it are the snapshot id: the
digest of the whole padded header in which these digits are zeros. So a flipped bit
anywhere in the header is noticed, and equal checkpoints have equal ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mod, neg
from typing import Final

import msgspec

from aiockpt.errors import LocalProtocolError
from aiockpt.format.chunks import digest
from aiockpt.format.document import ManifestDocument, dense_stride
from aiockpt.format.entries import Entries, Entry
from aiockpt.format.pieces import encode_entries
from aiockpt.format.storages import Storage, Storages

__all__ = [
    "ALIGNMENT",
    "ID_SLICE",
    "LENGTH_BYTES",
    "PREFIX",
    "Entry",
    "Storage",
    "Storages",
    "dense_stride",
    "encode_header",
    "encode_metadata",
    "make_entries",
    "metadata_lead",
    "plan_segment",
    "snapshot_id_of",
]

ALIGNMENT: Final = 64
LENGTH_BYTES: Final = 8
PREFIX: Final = b'{"__metadata__":{"aiockpt.snapshot":"'
ID_SLICE: Final = slice(len(PREFIX), len(PREFIX) + 32)


def plan_segment(
    storages: Storages,
) -> tuple[Sequence[int], Sequence[int], int]:
    """Place storages without holes so that each is aligned: widest elements first.

    Returns:
        ``(order, offsets, segment_bytes)``: ``order[k]`` is the index of the storage
        that comes k-th, and ``offsets[k]`` is where *that one* starts.
    """
    sizes, aligns = storages.sizes, storages.aligns
    if any(map(mod, sizes, aligns)):
        odd = storages[next(i for i, s in enumerate(sizes) if s % aligns[i])]
        raise LocalProtocolError(
            f"storage {odd.name!r}: {odd.nbytes} bytes are no multiple of "
            f"its alignment of {odd.align}"
        )
    order: Sequence[int] = range(len(storages))
    if len(set(aligns)) > 1:
        order = sorted(order, key=[*map(neg, aligns)].__getitem__)
    bounds = array("q", accumulate(map(sizes.__getitem__, order), initial=0))
    return order, bounds[:-1], bounds[-1]


def make_entries(storages: Storages) -> Entries:
    """Return the entries of storages that are in segment order.

    Raises:
        LocalProtocolError: two have the same name.
    """
    entries = Entries()
    entries.names = [*storages.names]
    entries.dtypes = [*storages.codes]
    entries.shapes = [*storages.shapes]
    bounds = array("q", accumulate(storages.sizes, initial=0))
    entries.starts, entries.stops = bounds[:-1], bounds[1:]
    if len(set(entries.names)) != len(entries):
        raise LocalProtocolError("two storages have the same name")
    return entries


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
