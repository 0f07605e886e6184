"""Tensors that are one part of a whole, DTensor and ShardedTensor, as data.

Each travels as ``["ext", tag, payload]``: the local tensors, which lie in the data
segment like any tensor, and a layout (see `aiockpt.state.layouts`). Nothing of
``torch.distributed.tensor`` is imported before a state dict, or a peer, has such a
leaf.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.manifest import PARAMETER, REQUIRES_GRAD
from aiockpt.format.paths import Path, format_path
from aiockpt.state.layouts import DTENSOR, SHARDED
from aiockpt.state.leaves import DTYPE_NAMES
from aiockpt.state.meshes import encode_mesh, encode_ranks, this_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TAGS", "Parts", "has_version", "is_plain", "take_apart"]

TAGS: Final = frozenset({DTENSOR, SHARDED})

_MESHES: WeakKeyDictionary[DeviceMesh, tuple[object, ...]] = WeakKeyDictionary()


class Parts(NamedTuple):
    """A distributed tensor as a payload, and the local tensors in it."""

    tag: str
    payload: tuple[object, ...]
    tensors: tuple[torch.Tensor, ...]
    whole: torch.Tensor


def take_apart(value: object, path: Path) -> Parts | None:
    """Return what a distributed tensor travels as; None for any other value.

    Raises:
        UnsupportedLeafError: it is one, but cannot be said as data.
    """
    if isinstance(value, torch.Tensor):
        if has_version(value):
            return _Sender(value, path).dtensor()
        module = "torch.distributed._shard.sharded_tensor"
        if type(value) is _loaded(module, "ShardedTensor"):
            return _Sender(value, path).sharded()
    return None


def has_version(whole: torch.Tensor) -> bool:
    """Say whether a distributed tensor is one that autograd knows: a DTensor."""
    return type(whole) is _loaded("torch.distributed.tensor", "DTensor")


def _loaded(module: str, name: str) -> object:
    # Nobody has a tensor of a type whose module has not been imported.
    return getattr(sys.modules.get(module), name, None)


class _Sender:
    """Takes one distributed tensor apart."""

    def __init__(self, value: Any, path: Path) -> None:
        self._value = value
        self._path = path

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
            self._flags(requires_grad=self._value.requires_grad),
        )
        return Parts(DTENSOR, payload, (local,), self._value)

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
            self._flags(requires_grad=metadata.tensor_properties.requires_grad),
        )
        return Parts(SHARDED, payload, tensors, value)

    def _shard(self, metadata: Any) -> tuple[object, ...]:
        placement = metadata.placement
        if placement is None or placement.rank() is None:
            raise self._refused("a shard of it is not placed on a rank")
        offsets, sizes = tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)
        return offsets, sizes, placement.rank(), str(placement.device())

    def _flags(self, *, requires_grad: bool) -> int:
        flags = REQUIRES_GRAD if requires_grad else 0
        return flags | (PARAMETER if getattr(self._value, "_is_param", False) else 0)

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            tensor = tensor.wait()  # type: ignore[attr-defined]
        if not is_plain(tensor):
            kind = f"{type(tensor).__name__} with layout {tensor.layout}"
            raise self._refused(f"its local tensor is a {kind}")
        return tensor.detach() if tensor.requires_grad else tensor

    def _refused(self, why: str) -> UnsupportedLeafError:
        name = type(self._value).__name__
        return UnsupportedLeafError(format_path(self._path), name, why)


def is_plain(tensor: object) -> bool:
    """Say whether a tensor is one that the data segment holds as it is."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NAMES
        and not tensor.is_nested
    )


def _order(spec: Any) -> tuple[object, ...] | None:
    """Return the order of cuts, unless the placements say it by themselves."""
    plain = type(spec)(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)
    order = getattr(spec, "shard_order", None)
    if order is None or order == plain.shard_order:
        return None
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order)
