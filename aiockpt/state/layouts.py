"""How a distributed tensor is laid out, as data that two ends compare.

The sizes in here may be whatever a peer claims; who expands the ranks of a grid
bounds their number first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Final, TypeAlias

__all__ = [
    "DTENSOR",
    "SHARDED",
    "DTensorLayout",
    "Mesh",
    "Placement",
    "Ranks",
    "Shard",
    "ShardedLayout",
]

DTENSOR: Final = "torch.DTensor"
SHARDED: Final = "torch.ShardedTensor"

Placement: TypeAlias = tuple[str | int, ...]
"""``("replicate",)``, ``("shard", dim)``, ``("strided", dim, split)``, or
``("partial", operation)``."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A grid of ranks: the first one, and what a step along each dimension adds.

    A grid that is not regular has no ``strides``, and all of its ``ranks``.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    ranks: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many ranks there are, if the grid is what it claims to be."""
        return math.prod(self.sizes)

    def flat(self) -> list[int]:
        """Return all ranks in row-major order; bound `count` before."""
        if self.strides is None:
            return list(self.ranks)
        flat = list(self.ranks)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            flat = [rank + step * stride for rank in flat for step in range(size)]
        return flat

    def along(self, dim: int, rank: int) -> list[int] | None:
        """Return the ranks that differ from ``rank`` in one coordinate only."""
        at = self.coordinate(rank)
        if at is None:
            return None
        width = math.prod(self.sizes[dim + 1 :])
        start = self.flat().index(rank) - at[dim] * width
        return self.flat()[start : start + self.sizes[dim] * width : width]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return where a rank is in the grid; bound `count` before."""
        places: Iterator[tuple[int, ...]] = product(*map(range, self.sizes))
        found = (
            at for at, each in zip(places, self.flat(), strict=True) if each == rank
        )
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh; ``root`` is the one that it was cut out of."""

    device_type: str
    names: tuple[str, ...] | None
    grid: Ranks
    root: Mesh | None = field(default=None, compare=False)

    def __str__(self) -> str:
        names = f" {', '.join(self.names)[:100]}" if self.names else ""
        sizes = " x ".join(map(str, self.grid.sizes[:8]))
        return f"a mesh{names} of {sizes} {self.device_type[:20]} ranks"


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """A DTensor but for its local tensor.

    ``coordinate`` is where its sender was in the mesh; ``order`` says which mesh
    dimensions cut a dimension first, where the placements do not; ``flags`` are those
    of the wire format's tensors.
    """

    mesh: Mesh
    coordinate: tuple[int, ...] | None
    placements: tuple[Placement, ...]
    order: tuple[tuple[int, tuple[int, ...]], ...] | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: int

    def comparable(self) -> tuple[object, ...]:
        """Return what must be equal for a shard to take another one's place."""
        facts = (self.mesh, self.placements, self.order, self.shape, self.stride)
        return (*facts, self.held(self.coordinate))

    def held(self, coordinate: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return what of a coordinate tells one local tensor from another."""
        if coordinate is None:
            return None
        pairs = zip(coordinate, self.placements, strict=True)
        return tuple(at for at, placement in pairs if placement[0] != "replicate")

    def __str__(self) -> str:
        how = ", ".join(" ".join(map(str, each)) for each in self.placements)
        what = f"a DTensor {list(self.shape)} ({how[:200]}) on {self.mesh}"
        held = self.held(self.coordinate)
        return f"{what}, the part at {self.coordinate}" if held else what


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a ShardedTensor, and who holds it, on which device."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    device: str


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """A ShardedTensor but for its local tensors, which are the shards ``held``."""

    held: tuple[int, ...]
    shards: tuple[Shard, ...]
    size: tuple[int, ...]
    dtype: str
    group: Ranks
    rank: int
    flags: int

    def comparable(self) -> tuple[object, ...]:
        """Return what must be equal for shards to take other ones' places."""
        places = tuple((shard.offsets, shard.sizes) for shard in self.shards)
        return self.held, places, self.size, self.dtype

    def __str__(self) -> str:
        what = f"a ShardedTensor {self.dtype[:20]} {list(self.size)}"
        return f"{what} of {len(self.shards)} shards, here {list(self.held)[:20]}"
