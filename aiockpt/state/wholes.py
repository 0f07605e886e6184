"""Distributed tensors from what arrived: each on a mesh of this process.

A template's own tensors are taken as they are. Others are made over process groups
that exist here; there is a typed error where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from aiockpt.errors import DeviceMeshError, LimitExceededError, RemoteProtocolError
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import PARAMETER, REQUIRES_GRAD
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import registered
from aiockpt.format.registry import Registry
from aiockpt.format.tree import decode_tree
from aiockpt.state.distributed import TAGS, is_plain
from aiockpt.state.layout_parser import parse_layout
from aiockpt.state.layouts import DTENSOR, SHARDED, DTensorLayout, ShardedLayout
from aiockpt.state.leaves import DTYPES
from aiockpt.state.meshes import Meshes, check_ranks, find_group, this_rank

__all__ = ["Layout", "check_places", "decoders", "layouts"]

Layout: TypeAlias = DTensorLayout | ShardedLayout

# Comparing shards with each other takes time that grows with their square.
_SHARDS, _SHARDS_PER_RANK = 1024, 16


def layouts(tree: Node, *, count: int, limits: Limits) -> dict[Path, Layout]:
    """Return the layouts of all distributed tensors in a tree, by path.

    Raises:
        RemoteProtocolError, LimitExceededError: one is malformed, or too large.
    """
    return {
        path: _layout(path, tag, node, range(count), limits)
        for path, tag, node in registered(tree)
        if tag in TAGS
    }


def _layout(path: Path, tag: str, node: Node, numbers: range, limits: Limits) -> Layout:
    nothing = Registry()  # there is no other leaf in a layout
    try:
        payload = decode_tree(node, registry=nothing, tensors=numbers, limits=limits)
        return parse_layout(tag, payload)
    except (TypeError, ValueError, RemoteProtocolError) as error:
        where = format_path(path)[:200] or "the root"
        raise RemoteProtocolError(f"malformed {tag} at {where}: {error}") from error


def check_places(found: Mapping[Path, Layout]) -> None:
    """Check that this process has a place for each of them, before a byte moves.

    Raises:
        DeviceMeshError: there is no process group to rebuild one on; names its path.
        LimitExceededError: one has too many shards.
    """
    meshes = Meshes()
    for path, layout in found.items():
        try:
            if isinstance(layout, DTensorLayout):
                meshes.find(layout)
            else:
                _placed(layout)
        except DeviceMeshError as error:
            error.path = format_path(path)
            raise


def decoders(
    wholes: Mapping[int, torch.Tensor],
) -> dict[str, Callable[[Any], object]]:
    """Return the decoders of one tree, by tag.

    ``wholes`` are the template's own distributed tensors, by the `id` of a local
    tensor; they are taken as they are.
    """
    builder = _Builder(wholes)
    return {DTENSOR: builder.dtensor, SHARDED: builder.sharded}


class _Builder:
    """Rebuilds the distributed tensors of one tree."""

    def __init__(self, wholes: Mapping[int, torch.Tensor]) -> None:
        self._wholes = wholes
        self._meshes = Meshes()
        # A tensor that the state dict holds twice is one tensor again.
        self._built: dict[tuple[object, Layout], torch.Tensor] = {}

    def dtensor(self, payload: Any) -> torch.Tensor:
        layout = parse_layout(DTENSOR, payload)
        assert isinstance(layout, DTensorLayout)  # what the tag says
        local: torch.Tensor = payload[0]
        if (whole := self._wholes.get(id(local))) is not None:
            return whole
        key = id(local), layout
        if key not in self._built:
            _check_local(local, layout)
            self._built[key] = _as_parameter(self._dtensor(local, layout), layout.flags)
        return self._built[key]

    def _dtensor(self, local: torch.Tensor, layout: DTensorLayout) -> torch.Tensor:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        mesh = self._meshes.find(layout)
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, local.dtype)
        placements = tuple(map(_placement, layout.placements))
        more = {} if layout.order is None else _ordered(layout.order)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta, **more)
        requires_grad = bool(layout.flags & REQUIRES_GRAD)
        return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]

    def sharded(self, payload: Any) -> torch.Tensor:
        layout = parse_layout(SHARDED, payload)
        assert isinstance(layout, ShardedLayout)  # what the tag says
        tensors: tuple[torch.Tensor, ...] = payload[0]
        if tensors and (whole := self._wholes.get(id(tensors[0]))) is not None:
            return whole
        key = tuple(map(id, tensors)), layout
        if key not in self._built:
            self._built[key] = _as_parameter(_sharded(tensors, layout), layout.flags)
        return self._built[key]


def _check_local(local: torch.Tensor, layout: DTensorLayout) -> None:
    if not is_plain(local) or local.requires_grad:
        raise TypeError("the local tensor is no plain tensor")
    fits = local.dim() == len(layout.shape) and all(
        part <= whole for part, whole in zip(local.shape, layout.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{list(local.shape)} is no part of {list(layout.shape)}")


def _placement(placement: Any) -> Any:
    from torch.distributed.tensor import placement_types as kinds

    match placement:
        case ("shard", dim):
            return kinds.Shard(dim)
        case ("strided", dim, split):
            return kinds._StridedShard(dim, split_factor=split)  # noqa: SLF001
        case ("partial", operation):
            return kinds.Partial(operation)
    return kinds.Replicate()


def _ordered(order: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[str, Any]:
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    entries = tuple(ShardOrderEntry(dim, by) for dim, by in order)
    return {"shard_order": entries, "use_strided_shard_as_shard_order": False}


def _as_parameter(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))
    return tensor


def _placed(layout: ShardedLayout) -> tuple[list[int], Any]:
    """Return who holds each shard here, and the process group.

    The sender's rank and this one change places, so what it holds is held here.

    Raises:
        DeviceMeshError: the ranks are not those of a process group of this process.
        LimitExceededError: there are more shards than such a group has.
    """
    what = str(layout)
    ranks = check_ranks(layout.group, what)
    limit = max(_SHARDS, _SHARDS_PER_RANK * len(ranks))
    if len(layout.shards) > limit:
        actual = len(layout.shards)
        raise LimitExceededError("the number of shards", limit=limit, actual=actual)
    here = this_rank(what)
    swap = {layout.rank: here, here: layout.rank}
    holders = [swap.get(shard.rank, shard.rank) for shard in layout.shards]
    group = find_group(ranks, None, "")
    if group is None or not {here, *holders} <= set(ranks):
        detail = f"there is no process group of ranks {ranks[:20]} with all its shards"
        raise DeviceMeshError(what, detail)
    return holders, group


def _sharded(tensors: tuple[torch.Tensor, ...], layout: ShardedLayout) -> torch.Tensor:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import api
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard

    if len(tensors) != len(layout.held) or not all(map(is_plain, tensors)):
        raise TypeError("the local tensors are not plain, or not those of its shards")
    holders, group = _placed(layout)
    devices = [torch.device(shard.device) for shard in layout.shards]
    for index, tensor in zip(layout.held, tensors, strict=True):
        devices[index] = tensor.device
    places = [
        ShardMetadata(list(shard.offsets), list(shard.sizes), f"rank:{rank}/{device}")
        for shard, rank, device in zip(layout.shards, holders, devices, strict=True)
    ]
    requires_grad = bool(layout.flags & REQUIRES_GRAD)
    properties = TensorProperties(
        dtype=DTYPES[layout.dtype],
        requires_grad=requires_grad,
        pin_memory=any(tensor.is_pinned() for tensor in tensors),
    )
    return api.ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        [
            Shard(tensor.requires_grad_(requires_grad), places[index])
            for index, tensor in zip(layout.held, tensors, strict=True)
        ],
        ShardedTensorMetadata(places, torch.Size(layout.size), properties),
        process_group=group,
    )
