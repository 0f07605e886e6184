"""Which elements of a tensor a rank holds, and which of them two ranks have in common.

What a rank holds of a tensor is a *shard*: for each dimension, the half-open *runs* of
global indices that its local tensor has. A contiguous block has one run in each
dimension. FSDP over tensor parallelism has more.

Elements that two shards have in common form *boxes*. A box is contiguous in the global
tensor and rectangular in both local tensors. `byte_runs` says where a box lies in
memory.

This module computes. It knows neither torch nor files, and moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, NamedTuple, TypeAlias

from aiockpt.state.sharding import DTensorLayout, Partial, Replicate, StridedSplit

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open runs of indices along one dimension, ascending, without overlap.

This is their order in the local tensor, too: each split of a mesh keeps it.
"""

ShardRuns: TypeAlias = tuple[Runs, ...]
"""What a rank holds of a tensor: the runs along each dimension."""

_MAX_BOXES: Final = 1 << 14  # of two shards; each takes memory and time
_MAX_PAIRS: Final = 1 << 20  # of shards that are compared, which takes time
_MAX_RUNS: Final = 1 << 16  # along one dimension; a peer claims the number of pieces


# -------------------------------------------------------------------------- shards


def whole(shape: Sequence[int]) -> ShardRuns:
    """Return the shard of a rank that holds the full tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def block(offsets: Sequence[int], sizes: Sequence[int]) -> ShardRuns:
    """Return the shard that is one contiguous block."""
    pairs = zip(offsets, sizes, strict=True)
    return tuple(((first, first + size),) if size else () for first, size in pairs)


def shape_of(shard: ShardRuns) -> tuple[int, ...]:
    """Return the shape of the local tensor."""
    return tuple(map(_length, shard))


def shard_of(layout: DTensorLayout) -> ShardRuns | None:
    """Return what the sender of a layout holds; None if its rank is not in the mesh.

    The mesh dimensions split the tensor in the layout's order, or from left to right.
    A partial placement changes the values, not the indices.

    Raises:
        ValueError: a dimension is split into more runs than any real mesh makes.
    """
    if layout.coordinate is None:
        return None
    shard = [*whole(layout.shape)]
    order: Iterable[int] = range(len(layout.placements))
    if layout.order is not None:
        order = (mesh_dim for _, by in layout.order for mesh_dim in by)
    for mesh_dim in order:
        placement = layout.placements[mesh_dim]
        if isinstance(placement, Replicate | Partial):
            continue
        count, index = layout.mesh.grid.sizes[mesh_dim], layout.coordinate[mesh_dim]
        runs = shard[placement.dim]
        pieces = placement.pieces if isinstance(placement, StridedSplit) else 1
        shard[placement.dim] = _split(runs, pieces, count, index)
    return (*shard,)


def _split(runs: Runs, pieces: int, count: int, index: int) -> Runs:
    """Cut runs into pieces, each piece into ``count`` parts; return the part of each.

    As with ``torch.chunk``, the last of them may be shorter than the others, or empty.
    """
    size = _length(runs)
    piece = max(-(-size // pieces), 1)
    firsts = range(0, size, piece)
    if index * -(-piece // count) >= piece:
        firsts = firsts[-1:]  # of a shorter last piece there may be a part
    if len(firsts) * len(runs) > _MAX_RUNS:
        raise ValueError(f"a split into {pieces} pieces")
    found: list[tuple[int, int]] = []
    for first in firsts:
        length = min(piece, size - first)
        part = -(-length // count)
        last = first + min((index + 1) * part, length)
        found += _cut(runs, first + index * part, last)
    return _joined(found)


def _cut(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the local positions ``[start, stop)`` as runs of global indices."""
    at = 0
    for lower, upper in runs:
        first, last = max(start - at, 0), min(stop - at, upper - lower)
        if first < last:
            yield lower + first, lower + last
        at += upper - lower


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return (*found,)


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


# --------------------------------------------------------------------------- boxes


@dataclass(frozen=True, slots=True)
class Box:
    """Elements that two shards have in common.

    Attributes:
        mine: The first index in the local tensor of one shard.
        theirs: The first index in the local tensor of the other.
        sizes: How many elements there are along each dimension.
    """

    mine: tuple[int, ...]
    theirs: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


def boxes(mine: ShardRuns, theirs: ShardRuns) -> Iterator[Box]:
    """Yield the elements that two shards have in common.

    Raises:
        ValueError: there are more boxes than between any real meshes.
    """
    pairs = zip(mine, theirs, strict=True)
    common = [_common(one, other) for one, other in pairs]
    if (count := math.prod(map(len, common))) > _MAX_BOXES:
        raise ValueError(f"two shards have {count} boxes in common")
    for row in product(*common):
        yield Box(*zip(*row, strict=True)) if row else Box((), (), ())


def _common(mine: Runs, theirs: Runs) -> list[tuple[int, int, int]]:
    """Return where each common run starts in either local tensor, and its length."""
    found = []
    n = m = here = there = 0
    while n < len(mine) and m < len(theirs):
        (first, last), (lower, upper) = mine[n], theirs[m]
        start, stop = max(first, lower), min(last, upper)
        if start < stop:
            at = here + start - first, there + start - lower
            found.append((*at, stop - start))
        if last <= upper:
            n, here = n + 1, here + last - first
        else:
            m, there = m + 1, there + upper - lower
    return found


class Cover(NamedTuple):
    """The shards that bring the elements of another one.

    Attributes:
        parts: The index of each chosen shard, and the boxes that it brings.
        missing: How many elements no shard has.
    """

    parts: list[tuple[int, list[Box]]]
    missing: int


def cover(mine: ShardRuns, shards: Sequence[ShardRuns], prefer: int = 0) -> Cover:
    """Choose the shards that bring each element of ``mine`` once.

    Equal shards are replicas, of which one is chosen. Other shards must be `apart`.

    Args:
        mine: The wanted shard.
        shards: What the sources hold.
        prefer: A number of the receiver's own, so that receivers of equal shards
            spread over the replicas. It is the same for all tensors of a receiver.
    """
    replicas: dict[ShardRuns, list[int]] = {}
    for index, shard in enumerate(shards):
        replicas.setdefault(shard, []).append(index)
    parts, missing = [], math.prod(shape_of(mine))
    for shard, holders in replicas.items():
        if missing and (found := [*boxes(mine, shard)]):
            parts.append((holders[prefer % len(holders)], found))
            missing -= sum(box.count for box in found)
    return Cover(parts, missing)


def apart(shards: Iterable[ShardRuns]) -> bool:
    """Say whether any two different shards have no element in common.

    Raises:
        ValueError: there are more of them than any real layout has.
    """
    distinct = [*dict.fromkeys(shards)]
    if all(map(_disjoint, map(set, zip(*distinct, strict=True)))):
        return True  # a grid, as of any mesh
    some = [shard for shard in distinct if all(shard)]
    # Sorted along the dimension with the most cuts, few shards may meet at once.
    axes = [len({*runs}) for runs in zip(*some, strict=True)]
    dim = axes.index(max(axes)) if axes else 0
    some.sort(key=lambda shard: shard[dim][0])
    near: list[ShardRuns] = []
    compared = 0
    for shard in some:
        start = shard[dim][0][0]
        near = [other for other in near if other[dim][-1][1] > start]
        compared += len(near)
        if compared > _MAX_PAIRS:
            raise ValueError(f"{len(some)} shards that form no grid")
        if any(next(boxes(shard, other), None) for other in near):
            return False
        near.append(shard)
    return True


def _disjoint(axis: Iterable[Runs]) -> bool:
    ascending = sorted(run for runs in axis for run in runs)
    return all(stop <= start for (_, stop), (start, _) in pairwise(ascending))


# --------------------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Runs of ``length`` bytes: the first at ``start``, each next ``step`` further."""

    start: int
    length: int
    step: int
    count: int


def byte_runs(
    first: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    stride: Sequence[int],
    itemsize: int,
) -> Iterator[ByteRuns]:
    """Yield where a part of a strided tensor lies in memory.

    Args:
        first: The first index of the part: one end of a `Box`.
        sizes: The sizes of the part.
        shape: The shape of the tensor.
        stride: Its strides, in elements.
        itemsize: The bytes of an element.
    """
    inner, dims = 1, len(shape)
    # Inner dimensions that the part fills are one run. The next one may be cut.
    while dims and (stride[dims - 1] == inner or sizes[dims - 1] == 1):
        dims -= 1
        inner *= sizes[dims]
        if sizes[dims] != shape[dims]:
            break
    start = itemsize * sum(map(int.__mul__, first, stride))
    length = inner * itemsize
    if not dims:
        yield ByteRuns(start, length, length, 1)
        return
    step, count = stride[dims - 1] * itemsize, sizes[dims - 1]
    for outer in product(*map(range, sizes[: dims - 1])):
        at = itemsize * sum(map(int.__mul__, outer, stride))
        yield ByteRuns(start + at, length, step, count)


def touched(found: Iterable[ByteRuns], gap: int) -> list[tuple[int, int]]:
    """Return the ranges that contain the bytes of some runs.

    Args:
        found: The runs.
        gap: A gap of at most so many bytes between two runs is part of a range.
    """
    return merged(_ranges(found, gap), gap)


def merged(ranges: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Return ranges in order; those that overlap or meet are one.

    Args:
        ranges: The ranges; empty ones are dropped.
        gap: A gap of at most so much between two ranges is part of one.
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def _ranges(found: Iterable[ByteRuns], gap: int) -> Iterator[tuple[int, int]]:
    for each in found:
        if each.step - each.length <= gap or each.count > _MAX_RUNS:
            yield each.start, each.start + each.step * (each.count - 1) + each.length
        else:
            for n in range(each.count):
                first = each.start + n * each.step
                yield first, first + each.length
