"""State dict → tree, entries and the memory that they come from. No I/O, no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aiockpt._gc import collector_paused
from aiockpt._groups import Backing, Group, Member, group_members
from aiockpt._leaves import DTYPE_NAMES, extension
from aiockpt.errors import AiockptError, StateDictError
from aiockpt.wire.layout import Storage, dense_stride, plan_segment
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import TensorSpec
from aiockpt.wire.paths import Node, Path, format_path
from aiockpt.wire.references import renumber
from aiockpt.wire.registry import REGISTRY, register_leaf
from aiockpt.wire.tree import encode_tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Description", "describe", "register_leaf"]

_DENSE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Description:
    """A state dict as data: what the manifest says, and where the bytes are.

    ``storages`` and ``backings`` run in the order of the data segment; ``tensors``
    are the state dict's own, by tensor number.
    """

    tree: Node
    storages: Sequence[Storage]
    offsets: Sequence[int]
    segment_bytes: int
    backings: Sequence[Backing]
    views: Sequence[TensorSpec]
    tensors: Mapping[int, torch.Tensor]

    def spec(self, number: int) -> TensorSpec:
        """Return what the manifest would say about a tensor."""
        if number >= len(self.storages):
            return self.views[number - len(self.storages)]
        tensor = self.tensors[number]
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(number, name, shape, dense_stride(shape), 0, 0)


class _Collector:
    """Numbers tensors as the tree codec meets them; one object, one number."""

    def __init__(self, limits: Limits, *, allow_pickle: bool) -> None:
        self.members: list[Member] = []
        self._numbers: dict[int, int] = {}
        self._names: set[str] = {"__metadata__"}
        self._limits = limits
        self._allow_pickle = allow_pickle

    def leaf(self, value: object, path: Path) -> Node:
        """Say how a leaf travels; None where it cannot."""
        if _is_dense_tensor(value):
            return ["tensor", self._number(value, path)]
        if type(value) is bytes:
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return ["blob", self._number(blob, path)]
        odd = extension(value, path, allow_pickle=self._allow_pickle)
        return None if odd is None else ["ext", odd.tag, self._inner(odd.payload, path)]

    def _inner(self, payload: object, path: Path) -> Node:
        return encode_tree(
            payload,
            registry=REGISTRY,
            leaf=lambda value, below: self.leaf(value, (*path, *below)),
            limits=self._limits,
        )

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.members)
            self.members.append(Member(tensor, self._name(path), number))
        return number

    def _name(self, path: Path) -> str:
        name = format_path(path) or "tensor"
        unique, again = name, 1
        while unique in self._names:
            again += 1
            unique = f"{name}#{again}"
        self._names.add(unique)
        return unique


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _DENSE_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def _number_tensors(
    groups: Sequence[Group], count: int
) -> tuple[list[TensorSpec], list[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    views: list[TensorSpec] = []
    numbers = [0] * count
    for entry, group in enumerate(groups):
        for member in group.members:
            spec = group.spec(member, entry)
            if spec is None:
                numbers[member.number] = entry
            else:
                numbers[member.number] = len(groups) + len(views)
                views.append(spec)
    return views, numbers


def describe(
    state_dict: object, *, limits: Limits, allow_pickle: bool = False
) -> Description:
    """Describe a state dict without copying a byte of it.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
        StateDictError: a tensor or a registered type failed when it was looked at.
    """
    try:
        with collector_paused():
            return _describe(state_dict, limits, allow_pickle=allow_pickle)
    except AiockptError:
        raise
    except Exception as error:
        raise StateDictError(f"cannot describe the state dict: {error}") from error


def _describe(state_dict: object, limits: Limits, *, allow_pickle: bool) -> Description:
    collector = _Collector(limits, allow_pickle=allow_pickle)
    tree = encode_tree(
        state_dict, registry=REGISTRY, leaf=collector.leaf, limits=limits
    )
    groups = group_members(collector.members)
    order, offsets, segment_bytes = plan_segment([group.storage for group in groups])
    groups = [groups[index] for index in order]
    views, numbers = _number_tensors(groups, len(collector.members))
    renumber(tree, numbers)
    return Description(
        tree=tree,
        storages=[group.storage for group in groups],
        offsets=offsets,
        segment_bytes=segment_bytes,
        backings=[group.backing() for group in groups],
        views=views,
        tensors={numbers[m.number]: m.tensor for m in collector.members},
    )
