"""What must hold in every header, as functions that return what is wrong, or None.

A peer's header and our own go through the same checks; only the blame differs. The
loops over entries run inside C functions, column by column: a header of 100,000
entries is checked in tens of milliseconds.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import mod, mul, sub
from typing import Final

from aiockpt.format.chunks import (
    CHUNK_ALIGNMENT,
    MIN_CHUNK_BYTES,
    ChunkGrid,
    digits_of,
)
from aiockpt.format.dtypes import CODE_BITS, COMPLEX, DIFFERENTIABLE, DTYPES
from aiockpt.format.entries import INT64_MAX, Entries
from aiockpt.format.manifest import (
    CONJ,
    REQUIRES_GRAD,
    ManifestDocument,
    TensorSpec,
)

_ALL_FLAGS: Final = 31
_WRITTEN_BYTES: Final = {
    code: size for size, code in DTYPES.values() if code is not None
}


def fault_of(
    document: ManifestDocument,
    views: Sequence[TensorSpec],
    entries: Entries,
    algorithms: Sequence[str],
) -> str | None:
    """Return the first inconsistency within one of our headers.

    ``algorithms`` are those of the digests that are accepted.
    """
    if not 0 <= document.step <= INT64_MAX:
        return f"step {document.step} is not between 0 and 2**63 - 1"
    if document.entries != len(entries):
        return f"{len(entries)} entries instead of {document.entries}"
    names = {*entries.names}
    if len(names) != len(entries):
        return "two entries have the same name"
    if "__metadata__" in names:
        return "'__metadata__' cannot name a tensor"
    return (
        _tiling_fault(entries, _WRITTEN_BYTES, 1)
        or _alignment_fault(entries)
        or _grid_fault(document, entries.nbytes, algorithms)
        or views_fault(views, entries)
    )


def foreign_fault(entries: Entries) -> str | None:
    """Return the first inconsistency within another tool's header."""
    return _tiling_fault(entries, CODE_BITS, 8)


def _tiling_fault(entries: Entries, sizes: Mapping[str, int], unit: int) -> str | None:
    """Entries follow each other without gap or overlap and fill their bytes exactly.

    ``sizes`` are those of the codes' elements, in ``unit``-ths of a byte.
    """
    starts, stops = entries.starts, entries.stops
    items = [sizes.get(code, 0) for code in entries.dtypes]
    if 0 in items:
        bad = items.index(0)
        return _at(entries, bad, f"unknown dtype {entries.dtypes[bad][:40]!r}")
    follow = array("q", [0]) + stops[:-1]
    if starts and (gap := _first_difference(starts, follow)) is not None:
        return _at(entries, gap, "starts where the entry before it does not end")
    needed = [*map(mul, map(prod, entries.shapes), items)]
    lengths = [*map(sub, stops, starts)]
    if unit != 1:
        lengths = [unit * length for length in lengths]
    if (odd := _first_difference(lengths, needed)) is not None:
        return _at(entries, odd, "its shape does not fill its bytes")
    return None


def _alignment_fault(entries: Entries) -> str | None:
    """Each entry is aligned, and the strides of empty ones fit into an int64."""
    sizes = [_WRITTEN_BYTES[code] for code in entries.dtypes]
    if any(rests := [*map(mod, entries.starts, sizes)]):
        return _at(entries, rests.index(max(rests)), "is not aligned")
    # The strides of all other tensors are bounded by their bytes.
    if 0 in map(sub, entries.stops, entries.starts):
        for index, shape in enumerate(entries.shapes):
            if 0 in shape and _overflows(shape):
                return _at(entries, index, "its strides overflow")
    return None


def _grid_fault(
    document: ManifestDocument, segment_bytes: int, algorithms: Sequence[str]
) -> str | None:
    """The chunks have a size that is allowed, and one digest each."""
    if document.algorithm not in algorithms:
        known = ", ".join(map(repr, algorithms))
        return f"digest algorithm {document.algorithm[:40]!r}; known: {known}"
    chunk_bytes = document.chunk_bytes
    if chunk_bytes <= 0 or chunk_bytes % CHUNK_ALIGNMENT:
        return f"chunks of {chunk_bytes} bytes, no multiple of {CHUNK_ALIGNMENT}"
    if chunk_bytes < min(MIN_CHUNK_BYTES, segment_bytes):
        return f"chunks of {chunk_bytes} bytes, less than {MIN_CHUNK_BYTES}"
    count = len(ChunkGrid(segment_bytes, chunk_bytes))
    digits = count * digits_of(document.algorithm)
    if len(document.digests) != digits:
        return f"{len(document.digests)} digits of digests instead of {digits}"
    if re.fullmatch("[0-9a-f]*", document.digests) is None:
        return "a digest that is not hexadecimal"
    return None


def views_fault(views: Sequence[TensorSpec], entries: Entries) -> str | None:
    """Each view lies inside its storage and could exist in torch."""
    starts, stops = entries.starts, entries.stops
    extents: dict[object, _Extent] = {}  # few views differ in more than their offset
    for index, view in enumerate(views):
        entry = view.storage
        if entry >= len(starts):
            return f"view {index}: storage {entry} of {len(starts)}"
        kind = (view.dtype, view.shape, view.stride, view.flags)
        if (extent := extents.get(kind)) is None:
            extent = extents[kind] = _extent_of(view)
        start, stop = starts[entry], stops[entry]
        if extent.fault is not None:
            return f"view {index}: {extent.fault}"
        if start % extent.itemsize:
            return f"view {index}: is not aligned"
        if start + view.offset * extent.itemsize + extent.nbytes > stop:
            return f"view {index}: reaches beyond its storage"
    return None


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many bytes a view spans from its first element on, and what is wrong."""

    itemsize: int
    nbytes: int
    fault: str | None


def _extent_of(view: TensorSpec) -> _Extent:
    itemsize, _ = DTYPES.get(view.dtype, (0, None))
    numel = prod(view.shape)
    # The index of the last element is sum((size - 1) * stride).
    last = sum(map(mul, view.shape, view.stride)) - sum(view.stride)
    fault = None
    if not itemsize:
        fault = f"unknown dtype {view.dtype[:40]!r}"
    elif len(view.shape) != len(view.stride):
        fault = "shape and stride differ in length"
    elif numel * itemsize > INT64_MAX or (not numel and _overflows(view.shape)):
        fault = "its size overflows"
    elif view.flags > _ALL_FLAGS:
        fault = f"unknown flags {view.flags}"
    elif view.flags & CONJ and view.dtype not in COMPLEX:
        fault = f"a conjugate {view.dtype}"
    elif view.flags & REQUIRES_GRAD and view.dtype not in DIFFERENTIABLE:
        fault = f"a {view.dtype} that requires grad"
    return _Extent(itemsize, (last + 1) * itemsize if numel else 0, fault)


def _overflows(shape: tuple[int, ...]) -> bool:
    # torch computes the strides of empty tensors too; 16 is the widest element.
    return 16 * prod(size or 1 for size in shape) > INT64_MAX


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    if found == expected:
        return None
    pairs = zip(found, expected, strict=False)
    return next(index for index, (one, other) in enumerate(pairs) if one != other)


def _at(entries: Entries, index: int, what: str) -> str:
    return f"entry {entries.names[index][:100]!r}: {what}"
