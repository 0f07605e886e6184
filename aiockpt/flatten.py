"""State dict → tree, entries and the memory that they come from. No I/O, no copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from aiockpt._distributed import take_apart
from aiockpt._drafts import Drafts, draft
from aiockpt._gc import collector_paused
from aiockpt._groups import Backing
from aiockpt._leaves import DTYPE_NAMES, extension
from aiockpt.errors import AiockptError, StateDictError, UnsupportedLeafError
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
    are the state dict's own, by tensor number. ``wholes`` are its distributed
    tensors, by the `id` of each of their local tensors.
    """

    tree: Node
    storages: Sequence[Storage]
    offsets: Sequence[int]
    segment_bytes: int
    backings: Sequence[Backing]
    views: Sequence[TensorSpec]
    tensors: Mapping[int, torch.Tensor]
    wholes: Mapping[int, torch.Tensor]

    def spec(self, number: int) -> TensorSpec:
        """Return what the manifest would say about a tensor."""
        if number >= len(self.storages):
            return self.views[number - len(self.storages)]
        tensor = self.tensors[number]
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(number, name, shape, dense_stride(shape), 0, 0)


class _Collector:
    """Numbers tensors as the tree codec meets them; one object, one number."""

    def __init__(self, limits: Limits, *, allow_pickle: bool, writing: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: dict[str, None] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self.writing = writing
        self._numbers: dict[int, int] = {}
        self._limits = limits
        self._allow_pickle = allow_pickle

    def encode(self, value: object, path: Path = ()) -> Node:
        """Return the tree of a value that is at ``path``."""
        return encode_tree(
            value,
            registry=REGISTRY,
            leaf=partial(self._leaf_below, path) if path else self._leaf,
            limits=self._limits,
        )

    def _leaf_below(self, above: Path, value: object, path: Path) -> Node:
        return self._leaf(value, (*above, *path))

    def _leaf(self, value: object, path: Path) -> Node:
        """Say how a leaf travels; None where it cannot."""
        if _is_dense_tensor(value):
            return ["tensor", self._number(value, path)]
        if (parts := take_apart(value, path)) is not None:
            for tensor in parts.tensors:
                self._number(tensor, path)  # the entry has the name of the whole
                self.wholes[id(tensor)] = parts.whole
            self.wholes.setdefault(id(parts.whole), parts.whole)
            return ["ext", parts.tag, self.encode(parts.payload, path)]
        if self.writing and isinstance(value, torch.Tensor) and value.is_quantized:
            remedy = "it cannot be received into; receive without a template"
            raise UnsupportedLeafError(format_path(path), "quantized tensor", remedy)
        if type(value) is bytes:
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return ["blob", self._number(blob, path)]
        odd = extension(value, path, allow_pickle=self._allow_pickle)
        return None if odd is None else ["ext", odd.tag, self.encode(odd.payload, path)]

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        identity = id(tensor)
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self.tensors)
            self.tensors.append(tensor)
            name = format_path(path) or "tensor"
            if name in self.names or name == "__metadata__":
                name = self._another(name)
            self.names[name] = None
        return number

    def _another(self, name: str) -> str:
        again = 2
        while (unique := f"{name}#{again}") in self.names:
            again += 1
        return unique


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _DENSE_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def _number_tensors(
    drafts: Drafts, order: Sequence[int], count: int
) -> tuple[list[TensorSpec], list[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    views: list[TensorSpec] = []
    numbers = [0] * count
    for entry, index in enumerate(order):
        owner = drafts.owners[index]
        if isinstance(owner, int):
            numbers[owner] = entry
            continue
        for member in owner.members:
            spec = owner.spec(member, entry)
            if spec is None:
                numbers[member.number] = entry
            else:
                numbers[member.number] = len(order) + len(views)
                views.append(spec)
    return views, numbers


def describe(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool = False,
    writing: bool = False,
) -> Description:
    """Describe a state dict without copying a byte of it.

    ``writing`` says that its memory is going to be written: bytes that are not of a
    tensor are left out then, and what has no memory to write to is refused.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
        StateDictError: a tensor or a registered type failed when it was looked at.
    """
    try:
        with collector_paused():
            collector = _Collector(limits, allow_pickle=allow_pickle, writing=writing)
            return _describe(state_dict, collector)
    except AiockptError:
        raise
    except Exception as error:
        raise StateDictError(f"cannot describe the state dict: {error}") from error


def _describe(state_dict: object, collector: _Collector) -> Description:
    tree = collector.encode(state_dict)
    tensors = collector.tensors
    drafts = draft(tensors, list(collector.names), writing=collector.writing)
    order, offsets, segment_bytes = plan_segment(drafts.storages)
    views, numbers = _number_tensors(drafts, order, len(tensors))
    renumber(tree, numbers)
    return Description(
        tree=tree,
        storages=[drafts.storages[index] for index in order],
        offsets=offsets,
        segment_bytes=segment_bytes,
        backings=[drafts.backings[index] for index in order],
        views=views,
        tensors=dict(zip(numbers, tensors, strict=True)),
        wholes=collector.wholes,
    )
