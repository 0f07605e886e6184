"""The payload of a distributed tensor's leaf → its layout, checked by itself.

What a peer sends becomes a layout before anything is looked up or made for it.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

from aiockpt.state.layouts import (
    DTENSOR,
    DTensorLayout,
    Mesh,
    Placement,
    Ranks,
    Shard,
    ShardedLayout,
)

__all__ = ["parse_layout"]

T = TypeVar("T")

_MAX: Final = 2**63 - 1
_DIMS: Final = 64
_REDUCTIONS: Final = frozenset(
    {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"}
)


def parse_layout(tag: str, payload: object) -> DTensorLayout | ShardedLayout:
    """Return the layout in the payload of an ``ext`` node; its tensors are ignored.

    Raises:
        ValueError, TypeError: it is none, or contradicts itself.
    """
    return _dtensor(payload) if tag == DTENSOR else _sharded(payload)


def _dtensor(payload: object) -> DTensorLayout:
    _, mesh, coordinate, placements, order, shape, stride, flags = _tuple(payload, 8)
    found = DTensorLayout(
        _mesh(mesh),
        None if coordinate is None else _ints(coordinate),
        tuple(map(_placement, _tuple(placements))),
        None if order is None else tuple(map(_cut, _tuple(order))),
        _ints(shape),
        _ints(stride),
        _flags(flags),
    )
    _check_dtensor(found)
    return found


def _check_dtensor(found: DTensorLayout) -> None:
    sizes, at, dims = found.mesh.grid.sizes, found.coordinate, len(found.shape)
    _demand(len(found.placements) == len(sizes), "placements for the mesh")
    if at is not None:
        _demand(len(at) == len(sizes), "a coordinate in the mesh")
        _demand(all(map(int.__lt__, at, sizes)), "a coordinate in the mesh")
    for placement in found.placements:
        _check_cut(placement, found)
    _check_order(found)
    _demand(len(found.stride) == dims, "a stride")
    reach = sum(
        s * max(n - 1, 0) for n, s in zip(found.shape, found.stride, strict=True)
    )
    _demand(max(reach, math.prod(found.shape)) < 2**56, "a size that tensors have")


def _check_cut(placement: Placement, layout: DTensorLayout) -> None:
    match placement:
        case ("shard" | "strided", int(dim), *split):
            _demand(dim < len(layout.shape), "a dimension that is cut")
            # As many pieces as there are ranks, or rows where a tensor was flattened.
            most = max(layout.mesh.grid.count, layout.shape[dim])
            _demand(all(int(pieces) <= most for pieces in split), "a placement")


def _check_order(found: DTensorLayout) -> None:
    """Check that an order names each cut once, at the dimension that it cuts."""
    if found.order is None:
        return
    order = sorted((mesh_dim, dim) for dim, by in found.order for mesh_dim in by)
    cuts = [
        (mesh_dim, placement[1])
        for mesh_dim, placement in enumerate(found.placements)
        if placement[0] in {"shard", "strided"}
    ]
    _demand(order == cuts, "an order of cuts")


def _sharded(payload: object) -> ShardedLayout:
    _, held, shards, size, dtype, group, rank, flags = _tuple(payload, 8)
    found = ShardedLayout(
        _ints(held, dims=None),
        tuple(map(_shard, _tuple(shards))),
        _ints(size),
        _text(dtype),
        _ranks(group),
        _int(rank),
        _flags(flags),
    )
    dims = len(found.size)
    _demand(bool(found.shards), "shards")
    _demand(len(set(found.held)) == len(found.held), "shards that are held")
    _demand(
        all(index < len(found.shards) for index in found.held), "shards that are held"
    )
    _demand(len(found.group.sizes) == 1, "a group of ranks")
    for shard in found.shards:
        _demand(len(shard.offsets) == len(shard.sizes) == dims, "a shard of the tensor")
    _demand(math.prod(found.size) < 2**56, "a size that tensors have")
    return found


def _shard(payload: object) -> Shard:
    offsets, sizes, rank, device = _tuple(payload, 4)
    return Shard(_ints(offsets), _ints(sizes), _int(rank), _text(device))


def _mesh(payload: object, *, whole: bool = False) -> Mesh:
    device_type, names, grid, root = _tuple(payload, 4)
    found = Mesh(
        _text(device_type),
        None if names is None else tuple(map(_text, _tuple(names))),
        _ranks(grid),
        None if root is None else _mesh(root, whole=True),
    )
    _demand(not whole or root is None, "a mesh that is whole")
    named = found.names is None or len(set(found.names)) == len(found.grid.sizes)
    _demand(named and found.names != (), "one name for each dimension of the mesh")
    return found


def _ranks(payload: object) -> Ranks:
    sizes, strides, ranks = _tuple(payload, 3)
    steps = None if strides is None else _ints(strides, low=-_MAX)
    found = Ranks(_ints(sizes, low=1), steps, _ints(ranks, dims=None))
    count = found.count if steps is None else 1
    _demand(len(found.ranks) == count, "the ranks of a mesh")
    _demand(steps is None or len(steps) == len(found.sizes), "the ranks of a mesh")
    return found


def _placement(payload: object) -> Placement:
    match _tuple(payload):
        case ("replicate",):
            return ("replicate",)
        case ("shard", dim):
            return "shard", _int(dim)
        case ("strided", dim, split):
            return "strided", _int(dim), _int(split, low=1)
        case ("partial", str(operation)) if operation in _REDUCTIONS:
            return "partial", operation
    raise ValueError(f"{payload!r:.60} is no placement")


def _cut(payload: object) -> tuple[int, tuple[int, ...]]:
    dim, by = _tuple(payload, 2)
    return _int(dim), _ints(by)


def _flags(value: object) -> int:
    _demand(_int(value) < 4, "flags")
    return _int(value)


def _demand(fine: bool, what: str) -> None:  # noqa: FBT001 - reads like an assert
    if not fine:
        raise ValueError(f"not {what}")


def _is(expected: type[T], value: object) -> T:
    if type(value) is not expected:
        raise TypeError(f"a {type(value).__name__} instead of a {expected.__name__}")
    return value


def _text(value: object) -> str:
    return _is(str, value)


def _int(value: object, low: int = 0) -> int:
    _demand(low <= _is(int, value) <= _MAX, f"a number from {low}")
    return _is(int, value)


def _tuple(value: object, count: int | None = None) -> tuple[object, ...]:
    items: tuple[object, ...] = _is(tuple, value)
    _demand(count is None or len(items) == count, f"{count} items")
    return items


def _ints(value: object, *, low: int = 0, dims: int | None = _DIMS) -> tuple[int, ...]:
    items = _tuple(value)
    _demand(dims is None or len(items) <= dims, "so many dimensions")
    return tuple(_int(item, low) for item in items)
