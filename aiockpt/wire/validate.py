"""What must hold in every header, as functions that return what is wrong, or None.

A peer's header and our own go through the same checks; only the blame differs. The
loops over entries run inside C functions, column by column: a header of 100,000
entries is checked in tens of milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from math import prod
from operator import mod, mul, ne, sub
from typing import Final

from aiockpt.wire.chunks import (
    ALGORITHM,
    CHUNK_ALIGNMENT,
    DIGEST_DIGITS,
    MIN_CHUNK_BYTES,
    ChunkGrid,
)
from aiockpt.wire.document import (
    CONJ,
    INT64_MAX,
    REQUIRES_GRAD,
    VERSION,
    Entry,
    ManifestDocument,
    TensorSpec,
)
from aiockpt.wire.dtypes import CODE_BITS, COMPLEX, DIFFERENTIABLE, DTYPES

__all__ = ["entries_fault", "fault_of", "grid_fault", "tiling_fault", "views_fault"]

_ALL_FLAGS: Final = 31
_HEX: Final = re.compile(r"[0-9a-f]*")
_WRITTEN: Final = {code: size for size, code in DTYPES.values() if code is not None}


def fault_of(document: ManifestDocument, entries: dict[str, Entry]) -> str | None:
    """Return the first contradiction within a header."""
    columns = list(entries.values())
    segment_bytes = columns[-1].data_offsets[1] if columns else 0
    if document.version != VERSION:
        return f"format version {document.version}; this side knows {VERSION}"
    if document.entries != len(entries):
        return f"{len(entries)} entries instead of {document.entries}"
    return (
        tiling_fault(list(entries), columns)
        or entries_fault(list(entries), columns)
        or grid_fault(document, segment_bytes)
        or views_fault(document.views, columns)
    )


def tiling_fault(names: Sequence[str], entries: Sequence[Entry]) -> str | None:
    """Entries follow each other without gap or overlap, and are as long as they say.

    Holds for any safetensors file, also for codes that are smaller than a byte.
    """
    bits = [CODE_BITS.get(entry.dtype) for entry in entries]
    if None in bits:
        unknown = bits.index(None)
        return _at(names, unknown, f"unknown dtype {entries[unknown].dtype[:40]!r}")
    starts = [entry.data_offsets[0] for entry in entries]
    stops = [entry.data_offsets[1] for entry in entries]
    if (bad := _first(map(ne, starts, chain((0,), stops)))) is not None:
        return _at(names, bad, "starts where the entry before it does not end")
    sizes = [8 * size for size in map(sub, stops, starts)]
    needed = map(mul, map(prod, [entry.shape for entry in entries]), bits)
    if (bad := _first(map(ne, sizes, needed))) is not None:
        return _at(names, bad, "its shape does not fill its bytes")
    return None


def entries_fault(names: Sequence[str], entries: Sequence[Entry]) -> str | None:
    """Each entry has a dtype that we write, is aligned, and fits into an int64."""
    sizes = [_WRITTEN.get(entry.dtype, 0) for entry in entries]
    if 0 in sizes:
        return _at(names, sizes.index(0), "a dtype that aiockpt does not write")
    starts = [entry.data_offsets[0] for entry in entries]
    if (bad := _first(map(mod, starts, sizes))) is not None:
        return _at(names, bad, "is not aligned")
    for index, entry in enumerate(entries):
        if 0 in entry.shape and _overflows(entry.shape):
            return _at(names, index, "its strides overflow")
    return None


def _first(wrong: map[object]) -> int | None:
    return next((index for index, bad in enumerate(wrong) if bad), None)


def _at(names: Sequence[str], index: int, what: str) -> str:
    return f"entry {names[index][:100]!r}: {what}"


def _overflows(shape: tuple[int, ...]) -> bool:
    # torch computes the strides of empty tensors too; 16 is the widest element.
    return 16 * prod(size or 1 for size in shape) > INT64_MAX


def grid_fault(document: ManifestDocument, segment_bytes: int) -> str | None:
    """The chunk grid is sane, and has one digest for each chunk."""
    if document.algorithm != ALGORITHM:
        return f"digest algorithm {document.algorithm[:40]!r}; known: {ALGORITHM!r}"
    chunk_bytes = document.chunk_bytes
    if chunk_bytes <= 0 or chunk_bytes % CHUNK_ALIGNMENT:
        return f"chunks of {chunk_bytes} bytes, no multiple of {CHUNK_ALIGNMENT}"
    if chunk_bytes < min(MIN_CHUNK_BYTES, segment_bytes):
        return f"chunks of {chunk_bytes} bytes, less than {MIN_CHUNK_BYTES}"
    digits = len(ChunkGrid(segment_bytes, chunk_bytes)) * DIGEST_DIGITS
    if len(document.digests) != digits:
        return f"{len(document.digests)} digits of digests instead of {digits}"
    if _HEX.fullmatch(document.digests) is None:
        return "a digest that is not hexadecimal"
    return None


def views_fault(views: Sequence[TensorSpec], entries: Sequence[Entry]) -> str | None:
    """Each view lies inside its storage and could exist in torch."""
    for index, view in enumerate(views):
        if view.storage >= len(entries):
            return f"view {index}: storage {view.storage} of {len(entries)}"
        start, stop = entries[view.storage].data_offsets
        if fault := _view_fault(view, start, stop - start):
            return f"view {index}: {fault}"
    return None


def _view_fault(view: TensorSpec, start: int, nbytes: int) -> str | None:
    itemsize, _ = DTYPES.get(view.dtype, (0, None))
    if not itemsize:
        return f"unknown dtype {view.dtype[:40]!r}"
    if len(view.shape) != len(view.stride):
        return "shape and stride differ in length"
    if start % itemsize:
        return "is not aligned"
    numel = prod(view.shape)
    if numel * itemsize > INT64_MAX or (not numel and _overflows(view.shape)):
        return "its size overflows"
    # The index of the last element: sum((size - 1) * stride).
    span = sum(map(mul, view.shape, view.stride)) - sum(view.stride) if numel else -1
    if (view.offset + span + 1) * itemsize > nbytes:
        return "reaches beyond its storage"
    return _flags_fault(view) if view.flags else None


def _flags_fault(view: TensorSpec) -> str | None:
    if view.flags > _ALL_FLAGS:
        return f"unknown flags {view.flags}"
    if view.flags & CONJ and view.dtype not in COMPLEX:
        return f"a conjugate {view.dtype}"
    if view.flags & REQUIRES_GRAD and view.dtype not in DIFFERENTIABLE:
        return f"a {view.dtype} that requires grad"
    return None
