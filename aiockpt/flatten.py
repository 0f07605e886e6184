"""State dict → tree, entries and the memory that they come from. No I/O, no copies.

How tensors become entries. Tensors that overlap in one storage form a *group*, which
becomes one entry, so tied weights and views travel once and stay aliased. Everything
else becomes an entry of its own that holds just the bytes of the tensor:

=========================================  ======================================
the group                                  its entry
=========================================  ======================================
one contiguous tensor                      the tensor itself
one view that uses half of its span        the span, with the view's strides
one sparser view                           a dense copy (flag ``COMPACTED``)
several views                              the span of all of them
=========================================  ======================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from aiockpt._leaves import DTYPE_NAMES, extension
from aiockpt.errors import UnsupportedLeafError
from aiockpt.wire.dtypes import DTYPES
from aiockpt.wire.layout import Storage, dense_stride, plan_segment
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import COMPACTED, CONJ, NEG, PARAMETER, REQUIRES_GRAD
from aiockpt.wire.manifest import TensorSpec
from aiockpt.wire.paths import Node, Path, format_path
from aiockpt.wire.references import renumber
from aiockpt.wire.registry import REGISTRY, register_leaf
from aiockpt.wire.tree import encode_tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Description", "Backing", "describe", "register_leaf"]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Backing:
    """Where the bytes of one entry come from.

    Attributes:
        tensor: A tensor of the group; it keeps the storage alive.
        start: First byte, counted from the start of the tensor's untyped storage.
        nbytes: Bytes to take from there; the entry may be a few bytes longer.
        dense: Copy the tensor's elements in order instead of raw bytes.
    """

    tensor: torch.Tensor
    start: int
    nbytes: int
    dense: bool = False


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


@dataclass(slots=True, eq=False)
class _Member:
    """A tensor of the state dict; ``start`` and ``stop`` are bytes in its storage."""

    tensor: torch.Tensor
    name: str
    number: int
    flags: int
    start: int
    stop: int

    @property
    def itemsize(self) -> int:
        return self.tensor.itemsize

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.tensor.dtype]

    @property
    def code(self) -> str | None:
        return DTYPES[self.dtype_name][1]


@dataclass(slots=True, eq=False)
class _Group:
    """Members that share bytes, and the entry that they become."""

    members: list[_Member]
    start: int
    stop: int
    dense: bool = False
    cover: _Member | None = None
    storage: Storage = field(init=False)


class _Collector:
    """Numbers tensors as the tree codec meets them; the same object, the same number."""

    def __init__(self, limits: Limits, *, allow_pickle: bool) -> None:
        self.members: list[_Member] = []
        self._numbers: dict[int, int] = {}
        self._names: set[str] = set()
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
            self.members.append(_member(tensor, self._name(path), number))
        return number

    def _name(self, path: Path) -> str:
        name = format_path(path)
        unique, again = name or "tensor", 1
        while unique in self._names or unique == "__metadata__":
            again += 1
            unique = f"{name}#{again}"
        self._names.add(unique)
        return unique


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
    )


def _member(tensor: torch.Tensor, name: str, number: int) -> _Member:
    if tensor.device.type == "meta":
        raise UnsupportedLeafError(name, "meta tensor", "it has no data to send")
    start = tensor.storage_offset() * tensor.itemsize
    return _Member(tensor, name, number, _flags(tensor), start, start + _span(tensor))


def _flags(tensor: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    if tensor.is_conj():
        flags |= CONJ
    if tensor.is_neg():
        flags |= NEG
    return flags


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, as they lie in the storage."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize


def _groups(members: Iterable[_Member]) -> list[_Group]:
    """Group members that overlap in one storage, in order of first appearance."""
    by_storage: dict[tuple[int, torch.device], list[_Member]] = {}
    groups = []
    for member in members:
        if member.start == member.stop:
            groups.append(_Group([member], member.start, member.stop))
            continue
        key = (member.tensor.untyped_storage().data_ptr(), member.tensor.device)
        by_storage.setdefault(key, []).append(member)
    for shared in by_storage.values():
        groups += _overlapping(shared)
    groups.sort(key=lambda group: group.members[0].number)
    return groups


def _overlapping(members: list[_Member]) -> list[_Group]:
    if len(members) == 1:
        return [_Group(members, members[0].start, members[0].stop)]
    groups: list[_Group] = []
    for member in sorted(members, key=lambda member: member.start):
        if groups and member.start < groups[-1].stop:
            groups[-1].members.append(member)
            groups[-1].stop = max(groups[-1].stop, member.stop)
        else:
            groups.append(_Group([member], member.start, member.stop))
    for group in groups:
        group.members.sort(key=lambda member: member.number)
    return groups


def _settle(group: _Group) -> None:
    """Decide what the group's entry is."""
    first = group.members[0]
    align = max(member.itemsize for member in group.members)
    group.dense = _is_sparse(group)
    if group.dense:
        group.start, group.stop = 0, first.nbytes
        group.cover = first
    else:
        group.start -= group.start % align
        group.stop += -(group.stop - group.start) % align
        group.cover = next((m for m in group.members if _covers(m, group)), None)
    name = (group.cover or first).name
    code, shape = _entry_type(group)
    group.storage = Storage(name, code, shape, group.stop - group.start, align)


def _is_sparse(group: _Group) -> bool:
    first = group.members[0]
    same = all(_same_view(first, member) for member in group.members)
    return same and 2 * first.nbytes < group.stop - group.start


def _same_view(one: _Member, other: _Member) -> bool:
    return one is other or (
        one.start == other.start
        and one.flags & (CONJ | NEG) == other.flags & (CONJ | NEG)
        and one.tensor.dtype == other.tensor.dtype
        and one.tensor.shape == other.tensor.shape
        and one.tensor.stride() == other.tensor.stride()
    )


def _covers(member: _Member, group: _Group) -> bool:
    return (
        member.start == group.start
        and member.stop == group.stop
        and member.tensor.is_contiguous()
        and member.code is not None
    )


def _entry_type(group: _Group) -> tuple[str, tuple[int, ...]]:
    """The entry's safetensors type: what other tools see."""
    first, nbytes = group.members[0], group.stop - group.start
    if group.cover is not None and group.cover.code is not None:
        return group.cover.code, tuple(group.cover.tensor.shape)
    if first.code is not None and nbytes % first.itemsize == 0:
        return first.code, (nbytes // first.itemsize,)
    return "U8", (nbytes,)


def _spec(member: _Member, group: _Group, entry: int) -> TensorSpec | None:
    """What the entry does not say about a member; None for a plain dense tensor."""
    if member is group.cover and not member.flags and not group.dense:
        return None
    tensor = member.tensor
    stride, offset, flags = tensor.stride(), 0, member.flags
    if group.dense:
        stride = dense_stride(tensor.shape)
        flags |= COMPACTED
    else:
        offset = (member.start - group.start) // member.itemsize
    return TensorSpec(
        entry, member.dtype_name, tuple(tensor.shape), tuple(stride), offset, flags
    )


def _number_tensors(groups: Sequence[_Group]) -> tuple[list[TensorSpec], list[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    views: list[TensorSpec] = []
    numbers = [0] * sum(len(group.members) for group in groups)
    for entry, group in enumerate(groups):
        for member in group.members:
            spec = _spec(member, group, entry)
            numbers[member.number] = entry if spec is None else len(groups) + len(views)
            if spec is not None:
                views.append(spec)
    return views, numbers


def _backing(group: _Group) -> Backing:
    tensor = group.members[0].tensor
    held = tensor.untyped_storage().nbytes() - group.start
    nbytes = group.stop - group.start
    return Backing(tensor, group.start, min(nbytes, held), group.dense)


def describe(
    state_dict: object, *, limits: Limits, allow_pickle: bool = False
) -> Description:
    """Describe a state dict without copying a byte of it.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
    """
    collector = _Collector(limits, allow_pickle=allow_pickle)
    tree = encode_tree(
        state_dict, registry=REGISTRY, leaf=collector.leaf, limits=limits
    )
    groups = _groups(collector.members)
    for group in groups:
        _settle(group)
    order, offsets, segment_bytes = plan_segment([group.storage for group in groups])
    groups = [groups[index] for index in order]
    views, numbers = _number_tensors(groups)
    renumber(tree, numbers)
    return Description(
        tree=tree,
        storages=[group.storage for group in groups],
        offsets=offsets,
        segment_bytes=segment_bytes,
        backings=[_backing(group) for group in groups],
        views=views,
        tensors={numbers[m.number]: m.tensor for m in collector.members},
    )
