"""The layout of a distributed tensor, as data that two ends compare.

A leaf of the tree carries a DTensor or a ShardedTensor: its local tensors and a layout.
`parse_layout` turns what a peer sent into typed structs, and checks them, before
anything is looked up or made. The numbers in a layout may still be whatever the peer
claims. Bound `Ranks.count` before you expand the ranks of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct, convert, to_builtins

from aiockpt.format.references import Mention, Reference

_MAX: Final = 2**63 - 1
_MAX_ELEMENTS: Final = 2**56

_Natural: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX)]
_Positive: TypeAlias = Annotated[int, Meta(ge=1, le=_MAX)]
_Signed: TypeAlias = Annotated[int, Meta(ge=-_MAX, le=_MAX)]
_Flags: TypeAlias = Annotated[int, Meta(ge=0, le=3)]
_Operation: TypeAlias = Literal[
    "sum", "avg", "min", "max", "product", "band", "bor", "bxor"
]
OPERATIONS: Final = get_args(_Operation)
# One number for each dimension; torch's tensors have at most 64.
_Dims: TypeAlias = Annotated[tuple[_Natural, ...], Meta(max_length=64)]


class _LayoutData(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a layout: in the tree, an array of its fields."""


class Ranks(_LayoutData, frozen=True):
    """A grid of ranks: the first rank, and what a step along each dimension adds.

    Attributes:
        sizes: The size of each dimension.
        strides: What a step along each dimension adds to the rank; it may be negative,
            and is 0 where the size is one. None if the grid is not regular.
        ranks: The first rank only; without ``strides``, all ranks in row-major order.
    """

    sizes: Annotated[tuple[_Positive, ...], Meta(max_length=64)]
    strides: Annotated[tuple[_Signed, ...], Meta(max_length=64)] | None
    ranks: tuple[_Natural, ...]

    def __post_init__(self) -> None:
        """Check that the grid has as many strides and ranks as it needs."""
        if self.strides is None:
            _demand(len(self.ranks) == self.count, "the grid lists other ranks")
        else:
            _demand(len(self.ranks) == 1, "a regular grid has one first rank")
            _demand(len(self.strides) == len(self.sizes), "the strides do not fit")

    @property
    def count(self) -> int:
        """The number of ranks that the grid claims to have."""
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
        """Return the ranks that differ from ``rank`` in coordinate ``dim`` only."""
        at = self.coordinate(rank)
        if at is None:
            return None
        width = math.prod(self.sizes[dim + 1 :])
        start = self.flat().index(rank) - at[dim] * width
        return self.flat()[start : start + self.sizes[dim] * width : width]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank in the grid; bound `count` before."""
        every: Iterator[tuple[int, ...]] = product(*map(range, self.sizes))
        found = (
            at for at, each in zip(every, self.flat(), strict=True) if each == rank
        )
        return next(found, None)


class Mesh(_LayoutData, frozen=True, eq=False):
    """A device mesh.

    Two meshes are equal if all of their fields but ``root`` are equal.

    Attributes:
        device_type: Such as ``cpu``.
        names: None, or unique names, one for each dimension.
        grid: Its `Ranks`.
        root: None, or the mesh that it is a slice of, which has no root itself.
    """

    device_type: str
    names: Annotated[tuple[str, ...], Meta(min_length=1)] | None
    grid: Ranks
    root: Mesh | None

    def __post_init__(self) -> None:
        """Check the names, and that a root has no root itself."""
        dims = len(self.grid.sizes)
        named = self.names is None or len(set(self.names)) == dims
        _demand(named, "the mesh has not one name for each dimension")
        _demand(self.root is None or self.root.root is None, "the root has a root")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.device_type, self.names, self.grid

    def __str__(self) -> str:
        names = f" {', '.join(self.names)[:100]}" if self.names else ""
        sizes = " x ".join(map(str, self.grid.sizes[:8]))
        return f"a mesh{names} of {sizes} {self.device_type[:20]} ranks"


class Replicate(_LayoutData, frozen=True, tag="replicate"):
    """Every rank of the mesh dimension has the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


class Split(_LayoutData, frozen=True, tag="shard"):
    """The ranks of the mesh dimension split dimension ``dim`` of the tensor."""

    dim: _Natural

    def __str__(self) -> str:
        return f"shard {self.dim}"


class StridedSplit(_LayoutData, frozen=True, tag="strided"):
    """As `Split`, after another mesh dimension has split it.

    Attributes:
        dim: The dimension of the tensor.
        pieces: Into how many pieces mesh dimensions to the right have split it: at most
            the number of ranks or the size of ``dim``, whichever is larger.
    """

    dim: _Natural
    pieces: _Positive

    def __str__(self) -> str:
        return f"strided {self.dim} {self.pieces}"


class Partial(_LayoutData, frozen=True, tag="partial"):
    """Every rank of the mesh dimension has a term of an operation.

    Attributes:
        operation: ``sum``, ``avg``, ``min``, ``max``, ``product``, ``band``, ``bor`` or
            ``bxor``.
    """

    operation: _Operation

    def __str__(self) -> str:
        return f"partial {self.operation}"


Placement: TypeAlias = Replicate | Split | StridedSplit | Partial


class DTensorLayout(_LayoutData, frozen=True):
    """A DTensor without its local tensor.

    Attributes:
        mesh: The `Mesh` of its sender.
        coordinate: The coordinate of the sender in the mesh; None if it has none.
        placements: One for each dimension of the mesh.
        order: None if the placements say in which order mesh dimensions split the
            tensor. Otherwise pairs: a dimension of the tensor, and the list of the mesh
            dimensions that split it, first to last. Each split occurs once.
        shape: The shape of the whole tensor.
        stride: The stride of the whole tensor.
        flags: The flags 1 and 2 of the wire format's tensors.
    """

    tag: ClassVar[str] = "torch.DTensor"

    mesh: Mesh
    coordinate: _Dims | None
    placements: tuple[Placement, ...]
    order: tuple[tuple[_Natural, _Dims], ...] | None
    shape: _Dims
    stride: _Dims
    flags: _Flags

    def __post_init__(self) -> None:
        """Check that the attributes fit each other."""
        sizes, dims = self.mesh.grid.sizes, len(self.shape)
        _demand(len(self.placements) == len(sizes), "the placements do not fit")
        if (at := self.coordinate) is not None:
            fits = len(at) == len(sizes) and all(map(int.__lt__, at, sizes))
            _demand(fits, "the coordinate is not in the mesh")
        for placement in self.placements:
            if isinstance(placement, Split | StridedSplit):
                _demand(placement.dim < dims, "a split has no such dimension")
            if isinstance(placement, StridedSplit):
                # As many pieces as ranks, or as rows where a tensor was flattened.
                most = max(self.mesh.grid.count, self.shape[placement.dim])
                _demand(placement.pieces <= most, "a split has too many pieces")
        if self.order is not None:
            order = sorted((mesh_dim, dim) for dim, by in self.order for mesh_dim in by)
            _demand(order == self._splits(), "the order names other splits")
        _demand(len(self.stride) == dims, "the stride does not fit")
        reach = sum(
            stride * max(size - 1, 0)
            for size, stride in zip(self.shape, self.stride, strict=True)
        )
        most = max(reach, math.prod(self.shape))
        _demand(most < _MAX_ELEMENTS, "no tensor has that size")

    def comparable(self) -> tuple[object, ...]:
        """Return the fields that must be equal for a shard to replace another one."""
        facts = (self.mesh, self.placements, self.order, self.shape, self.stride)
        return (*facts, self.held(self.coordinate))

    def held(self, coordinate: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the part of a coordinate that selects a local tensor."""
        if coordinate is None:
            return None
        pairs = zip(coordinate, self.placements, strict=True)
        return tuple(at for at, each in pairs if not isinstance(each, Replicate))

    def _splits(self) -> list[tuple[int, int]]:
        return [
            (mesh_dim, placement.dim)
            for mesh_dim, placement in enumerate(self.placements)
            if isinstance(placement, Split | StridedSplit)
        ]

    def __str__(self) -> str:
        how = ", ".join(map(str, self.placements))
        what = f"a DTensor {list(self.shape)} ({how[:200]}) on {self.mesh}"
        held = self.held(self.coordinate)
        return f"{what}, the part at {self.coordinate}" if held else what


class Shard(_LayoutData, frozen=True):
    """One shard of a ShardedTensor.

    Attributes:
        offsets: Where it begins in the whole tensor.
        sizes: Its shape.
        rank: The rank that holds it.
        device: The device that holds it.
    """

    offsets: _Dims
    sizes: _Dims
    rank: _Natural
    device: str


class ShardedLayout(_LayoutData, frozen=True):
    """A ShardedTensor without its local tensors.

    Attributes:
        held: Which of the shards each local tensor is.
        shards: Every `Shard`.
        size: The shape of the whole tensor.
        dtype: The name of its dtype in torch.
        group: The `Ranks` of its process group, of one dimension.
        rank: The rank of the sender.
        flags: The flags 1 and 2 of the wire format's tensors.
    """

    tag: ClassVar[str] = "torch.ShardedTensor"

    held: tuple[_Natural, ...]
    shards: Annotated[tuple[Shard, ...], Meta(min_length=1)]
    size: _Dims
    dtype: str
    group: Ranks
    rank: _Natural
    flags: _Flags

    def __post_init__(self) -> None:
        """Check that the attributes fit each other."""
        held, dims = self.held, len(self.size)
        _demand(len(set(held)) == len(held), "a shard is held twice")
        _demand(all(each < len(self.shards) for each in held), "no such shard is held")
        _demand(len(self.group.sizes) == 1, "a group has one dimension")
        for shard in self.shards:
            fits = len(shard.offsets) == len(shard.sizes) == dims
            _demand(fits, "a shard has other dimensions")
        _demand(math.prod(self.size) < _MAX_ELEMENTS, "no tensor has that size")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.size

    def comparable(self) -> tuple[object, ...]:
        """Return the fields that must be equal for shards to replace other ones."""
        blocks = tuple((shard.offsets, shard.sizes) for shard in self.shards)
        return self.held, blocks, self.size, self.dtype

    def __str__(self) -> str:
        what = f"a ShardedTensor {self.dtype[:20]} {list(self.size)}"
        return f"{what} of {len(self.shards)} shards, here {list(self.held)[:20]}"


Layout: TypeAlias = DTensorLayout | ShardedLayout

LAYOUTS: Final[dict[str, type[Layout]]] = {
    kind.tag: kind for kind in (DTensorLayout, ShardedLayout)
}
"""The layout types by the tags of their leaves."""


def encode_layout(layout: Layout) -> tuple[object, ...]:
    """Return a layout as it follows the tensors in the payload of an ``ext`` node.

    `parse_layout` is the inverse.
    """
    return tuple(map(_plain, to_builtins(layout)))


def _plain(value: object) -> object:
    # msgspec makes lists of structs; a payload has tuples only.
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def parse_layout(kind: type[Layout], payload: object) -> Layout:
    """Return the layout in the payload of an ``ext`` node.

    The first item of the payload, the local tensors, is ignored.

    Raises:
        TypeError, ValueError: the payload contains no valid layout.
    """
    if type(payload) is not tuple or not _is_plain(payload[1:]):
        raise TypeError("a layout consists of tuples, integers and strings")
    return convert(payload[1:], kind)


def _is_plain(value: object) -> bool:
    # msgspec would take a list or a set for a tuple.
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in {int, str}


def _demand(fine: bool, problem: str) -> None:  # noqa: FBT001 - reads like an assert
    if not fine:
        raise ValueError(problem)


def is_filled(mention: Mention | Reference) -> bool:
    """Say whether a mention names tensors of the state dict that can be filled.

    The local parts of a distributed tensor count. The tensors that a registered leaf
    or another value is made of do not.
    """
    own = mention.leaf is None or mention.leaf[1] in LAYOUTS
    return mention.kind == "tensor" and own
