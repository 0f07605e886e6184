"""Tensors that are one part of a whole: DTensor and ShardedTensor, to data and back.

Each travels as ``["ext", tag, payload]``: the local tensors, which lie in the data
segment like any tensor, and a layout (see `aiockpt._layouts`). Nothing of
``torch.distributed.tensor`` is imported before a state dict, or a peer, has such a
leaf.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from aiockpt._layout_parser import parse_layout
from aiockpt._layouts import DTENSOR, SHARDED, DTensorLayout, ShardedLayout
from aiockpt._leaves import DTYPE_NAMES, DTYPES
from aiockpt._meshes import (
    Meshes,
    check_ranks,
    encode_mesh,
    encode_ranks,
    find_group,
    this_rank,
)
from aiockpt.errors import DeviceMeshError, LimitExceededError, UnsupportedLeafError
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import PARAMETER, REQUIRES_GRAD
from aiockpt.wire.paths import Node, Path, format_path
from aiockpt.wire.references import registered
from aiockpt.wire.registry import Registry
from aiockpt.wire.untree import decode_tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TAGS", "Layout", "Parts", "check_places", "decoders", "layouts", "take_apart"]

Layout = DTensorLayout | ShardedLayout

TAGS: Final = frozenset({DTENSOR, SHARDED})

# Comparing shards with each other takes time that grows with their square.
_SHARDS, _SHARDS_PER_RANK = 1024, 16

_MESHES: WeakKeyDictionary[DeviceMesh, tuple[object, ...]] = WeakKeyDictionary()


class Parts(NamedTuple):
    """A distributed tensor as a payload, and the local tensors in it."""

    tag: str
    payload: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...]


def take_apart(value: object, path: Path) -> Parts | None:
    """Return what a distributed tensor travels as; None for any other value.

    Raises:
        UnsupportedLeafError: it is one, but cannot be said as data.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is _loaded("torch.distributed.tensor", "DTensor"):
            return _Sender(value, path).dtensor()
        module = "torch.distributed._shard.sharded_tensor"
        if type(value) is _loaded(module, "ShardedTensor"):
            return _Sender(value, path).sharded()
    return None


def _loaded(module: str, name: str) -> object:
    # Nobody has a tensor of a type whose module has not been imported.
    return getattr(sys.modules.get(module), name, None)


class _Sender:
    """Takes one distributed tensor apart."""

    def __init__(self, value: Any, path: Path) -> None:
        self._value = value
        self._path = path
        flags = REQUIRES_GRAD if value.requires_grad else 0
        self._flags = flags | (PARAMETER if getattr(value, "_is_param", False) else 0)

    def dtensor(self) -> Parts:
        spec, local = self._value._spec, self._local(self._value._local_tensor)  # noqa: SLF001
        meta = spec.tensor_meta
        if meta is None or meta.dtype != local.dtype:
            raise self._refused("it does not say what the whole tensor is")
        if spec.mesh not in _MESHES:
            _MESHES[spec.mesh] = encode_mesh(spec.mesh)
        at = spec.mesh.get_coordinate()
        payload = (
            local,
            _MESHES[spec.mesh],
            None if at is None else tuple(at),
            tuple(map(self._placement, spec.placements)),
            _order(spec),
            tuple(meta.shape),
            tuple(meta.stride),
            self._flags,
        )
        return Parts(DTENSOR, payload, (local,))

    def _placement(self, placement: Any) -> tuple[object, ...]:
        from torch.distributed.tensor import placement_types as kinds

        if type(placement) is kinds.Replicate:
            return ("replicate",)
        if type(placement) is kinds.Shard:
            return ("shard", placement.dim)
        if type(placement) is kinds._StridedShard:  # noqa: SLF001 - FSDP over tensor parallel
            return ("strided", placement.dim, int(placement.split_factor))
        if type(placement) is kinds.Partial:
            return ("partial", placement.reduce_op)
        name = type(placement).__name__
        raise self._refused(f"its placement {name} cannot travel; redistribute it")

    def sharded(self) -> Parts:
        value = self._value
        metadata = value.metadata()
        shards = tuple(map(self._shard, metadata.shards_metadata))
        mine = [self._shard(shard.metadata) for shard in value.local_shards()]
        if any(shard not in shards for shard in mine):
            raise self._refused("a local shard of it is not in its metadata")
        tensors = tuple(self._local(shard.tensor) for shard in value.local_shards())
        ranks = torch.distributed.get_process_group_ranks(value._process_group)  # noqa: SLF001
        payload = (
            tensors,
            tuple(map(shards.index, mine)),
            shards,
            tuple(metadata.size),
            DTYPE_NAMES[metadata.tensor_properties.dtype],
            encode_ranks(torch.tensor(ranks)),
            this_rank("a ShardedTensor"),
            self._flags,
        )
        return Parts(SHARDED, payload, tensors)

    def _shard(self, metadata: Any) -> tuple[object, ...]:
        placement = metadata.placement
        if placement is None or placement.rank() is None:
            raise self._refused("a shard of it is not placed on a rank")
        offsets, sizes = tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)
        return offsets, sizes, placement.rank(), str(placement.device())

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            tensor = tensor.wait()  # type: ignore[attr-defined]
        if not _is_plain(tensor):
            kind = f"{type(tensor).__name__} with layout {tensor.layout}"
            raise self._refused(f"its local tensor is a {kind}")
        return tensor.detach() if tensor.requires_grad else tensor

    def _refused(self, why: str) -> UnsupportedLeafError:
        name = type(self._value).__name__
        return UnsupportedLeafError(format_path(self._path), name, why)


def _is_plain(tensor: object) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _order(spec: Any) -> tuple[object, ...] | None:
    """Return the order of cuts, where it is not what the placements say by themselves."""
    plain = type(spec)(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)
    order = getattr(spec, "shard_order", None)
    if order is None or order == plain.shard_order:
        return None
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order)


def layouts(tree: Node, *, count: int, limits: Limits) -> dict[Path, Layout]:
    """Return the layouts of all distributed tensors in a tree, by path.

    Raises:
        RemoteProtocolError, LimitExceededError: one is malformed, or too large.
    """
    return {
        path: _decoded(tag, node, range(count), limits)
        for path, tag, node in registered(tree)
        if tag in TAGS
    }


def _decoded(tag: str, node: Node, numbers: range, limits: Limits) -> Layout:
    registry = Registry()
    registry.register(tag, _Whole, _Whole, lambda payload: parse_layout(tag, payload))
    ext: Node = ["ext", tag, node]
    found = decode_tree(ext, registry=registry, tensors=numbers, limits=limits)
    assert isinstance(found, DTensorLayout | ShardedLayout)  # what the decoder returns
    return found


class _Whole:
    """Stands for the type of a tag, where its values are not made."""


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
        self._built: dict[tuple[int, Layout], torch.Tensor] = {}

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
        return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg, arg-type]

    def sharded(self, payload: Any) -> torch.Tensor:
        layout = parse_layout(SHARDED, payload)
        assert isinstance(layout, ShardedLayout)  # what the tag says
        tensors: tuple[torch.Tensor, ...] = payload[0]
        if tensors and (whole := self._wholes.get(id(tensors[0]))) is not None:
            return whole
        return _as_parameter(_sharded(tensors, layout), layout.flags)


def _check_local(local: torch.Tensor, layout: DTensorLayout) -> None:
    if not _is_plain(local) or local.requires_grad:
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
    from torch.distributed._shard import sharded_tensor as st
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    if len(tensors) != len(layout.held) or not all(map(_is_plain, tensors)):
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
    return st.ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        [
            st.Shard(tensor.requires_grad_(requires_grad), places[index])
            for index, tensor in zip(layout.held, tensors, strict=True)
        ],
        st.ShardedTensorMetadata(places, torch.Size(layout.size), properties),
        process_group=group,
    )
