"""How tensors become entries of the data segment. Decisions only, no copies.

Tensors whose memory overlaps form a *group*, which becomes one entry, so tied weights
and views travel once and stay aliased. Everything else becomes an entry of its own
that holds just the bytes of the tensor:

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from aiockpt._leaves import DTYPE_NAMES
from aiockpt.errors import UnsupportedLeafError
from aiockpt.wire.dtypes import DTYPES
from aiockpt.wire.layout import Storage, dense_stride
from aiockpt.wire.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    TensorSpec,
)

__all__ = ["Backing", "Group", "Member", "Part", "group_members"]

_LAZY = CONJ | NEG


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose elements lie in an entry with another stride, or between others.

    ``stride`` and ``offset`` count elements, the latter from the entry's start.
    """

    tensor: torch.Tensor
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Backing:
    """Where the bytes of one entry are in the state dict.

    Attributes:
        tensor: A tensor of the group; it keeps the storage alive.
        address: Of the first byte, on the tensor's device.
        nbytes: Bytes to take from there; the entry may be a few bytes longer.
        parts: What to copy, element by element; if empty, the bytes as they are.
    """

    tensor: torch.Tensor
    address: int
    nbytes: int
    parts: Sequence[Part] = ()


class Member:
    """A tensor of the state dict, and the addresses that it spans."""

    __slots__ = (
        "contiguous",
        "flags",
        "itemsize",
        "name",
        "number",
        "start",
        "stop",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, name: str, number: int) -> None:
        if tensor.is_meta:
            raise UnsupportedLeafError(name, "meta tensor", "it has no data to send")
        self.tensor = tensor
        self.name = name
        self.number = number
        self.flags = _flags(tensor)
        self.itemsize = tensor.itemsize
        self.contiguous = tensor.is_contiguous()
        span = tensor.nbytes if self.contiguous else _span(tensor)
        self.start = tensor.data_ptr()
        self.stop = self.start + span
        # A sharded module frees the storage of a parameter that it has gathered.
        stop = tensor.storage_offset() * self.itemsize + span
        held = tensor.untyped_storage().nbytes() if self.start else 0
        if span and stop > held:
            raise UnsupportedLeafError(name, "tensor", "its memory has been freed")

    @property
    def code(self) -> str | None:
        """The safetensors code of its dtype, where there is one."""
        return DTYPES[DTYPE_NAMES[self.tensor.dtype]][1]

    def is_same_view(self, other: Member) -> bool:
        """Say whether both have the same elements in the same order."""
        return self is other or (
            self.start == other.start
            and self.flags & _LAZY == other.flags & _LAZY
            and self.tensor.dtype == other.tensor.dtype
            and self.tensor.shape == other.tensor.shape
            and self.tensor.stride() == other.tensor.stride()
        )


class Group:
    """Members that share memory, and the entry that they become."""

    __slots__ = ("cover", "dense", "members", "start", "stop", "storage")

    def __init__(self, member: Member) -> None:
        self.members = [member]
        self.start = member.start
        self.stop = member.stop
        self.dense = False
        self.cover: Member | None = None
        self.storage: Storage

    def settle(self) -> None:
        """Decide what the entry is."""
        first = self.members[0]
        if len(self.members) == 1 and first.contiguous:
            self.cover = first
            self._become(first, first.tensor.nbytes, first.itemsize)
            return
        self.members.sort(key=attrgetter("number"))
        first = self.members[0]
        self.dense = self._is_sparse()
        if self.dense:
            self.cover = first
            self._become(first, first.tensor.nbytes, first.itemsize)
        else:
            self._settle_span()

    def _settle_span(self) -> None:
        align = max(member.itemsize for member in self.members)
        first = self.members[0].tensor
        # Offsets are multiples of the element size counted from the storage's start.
        base = first.data_ptr() - int(first.storage_offset()) * first.itemsize
        self.start -= (self.start - base) % align
        covers = (member for member in self.members if self._is_covered_by(member))
        self.cover = next(covers, None)
        nbytes = self.stop - self.start
        self._become(self.cover or self.members[0], nbytes + -nbytes % align, align)

    def _become(self, member: Member, nbytes: int, align: int) -> None:
        code = member.code
        shape: tuple[int, ...]
        if code is not None and member is self.cover:
            shape = tuple(map(int, member.tensor.shape))
        elif code is not None and nbytes % member.itemsize == 0:
            shape = (nbytes // member.itemsize,)
        else:
            code, shape = "U8", (nbytes,)
        self.storage = Storage(member.name, code, shape, nbytes, align)

    def _is_sparse(self) -> bool:
        first = self.members[0]
        same = all(first.is_same_view(member) for member in self.members)
        return same and 2 * first.tensor.nbytes < self.stop - self.start

    def _is_covered_by(self, member: Member) -> bool:
        return (
            member.contiguous
            and member.start == self.start
            and member.stop == self.stop
            and (self.stop - self.start) % member.itemsize == 0
            and member.code is not None
        )

    def spec(self, member: Member, entry: int) -> TensorSpec | None:
        """What the entry does not say about a member; None for a plain tensor."""
        tensor = member.tensor
        is_plain = member is self.cover and not member.flags and not self.dense
        if is_plain and member.code is not None:
            return None
        stride, offset, flags = tuple(tensor.stride()), 0, member.flags
        if self.dense:
            stride = dense_stride(tensor.shape)
            flags |= COMPACTED
        else:
            offset = (member.start - self.start) // member.itemsize
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(entry, name, shape, stride, offset, flags)

    def backing(self, *, writing: bool) -> Backing:
        """Where its bytes are; all of them, or those that may be written."""
        first = self.members[0].tensor
        nbytes = self.stop - self.start
        if self.dense:
            parts = [Part(first, dense_stride(first.shape), 0)]
        elif writing and self._has_holes():
            parts = [self._part(member) for member in self.members]
        else:
            parts = []
        return Backing(first, self.start, nbytes, parts)

    def _part(self, member: Member) -> Part:
        offset = (member.start - self.start) // member.itemsize
        return Part(member.tensor, tuple(member.tensor.stride()), offset)

    def _has_holes(self) -> bool:
        """Whether memory between the members' elements is not the state dict's."""
        reached = self.start
        for member in sorted(self.members, key=attrgetter("start")):
            if member.start <= reached and _is_solid(member.tensor):
                reached = max(reached, member.stop)
        return reached < self.stop


def group_members(members: Iterable[Member]) -> list[Group]:
    """Group members that overlap in memory, in order of first appearance."""
    groups: list[Group] = []
    by_device: dict[torch.device, list[Member]] = {}
    for member in members:
        if member.start == member.stop:
            groups.append(Group(member))
        else:
            by_device.setdefault(member.tensor.device, []).append(member)
    for neighbours in by_device.values():
        neighbours.sort(key=attrgetter("start"))
        groups += _overlapping(neighbours)
    for group in groups:
        group.settle()
    groups.sort(key=lambda group: group.members[0].number)
    return groups


def _overlapping(members: Iterable[Member]) -> list[Group]:
    groups: list[Group] = []
    stop = -1
    for member in members:
        if member.start < stop:
            group = groups[-1]
            group.members.append(member)
            group.stop = stop = max(stop, member.stop)
        else:
            groups.append(Group(member))
            stop = member.stop
    return groups


def _flags(tensor: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    if tensor.is_conj():
        flags |= CONJ
    return flags | NEG if tensor.is_neg() else flags


def _is_solid(tensor: torch.Tensor) -> bool:
    """Whether the elements leave no memory out between the first and the last."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride > reach:
                return False
            reach += (size - 1) * stride
    return True


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, as they lie in memory."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize
