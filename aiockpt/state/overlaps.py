"""How tensors that share memory become entries of the data segment.

Tensors whose spans of memory overlap form a *group*, which becomes one entry. So tied
weights and views travel once and stay aliased:

=========================================  ======================================
the group                                  its entry
=========================================  ======================================
one contiguous tensor                      the tensor itself
views that use half of their span or more  the span, with the views' strides
views that use less                        each sparse view (it uses less than
                                           half of its own span) leaves the group
                                           with a dense copy (``COMPACTED``); the
                                           other views are grouped again
members that no address aligns together    the members that fit the widest one;
                                           the others are grouped again
=========================================  ======================================

Tensors that are the same view always stay together. Different views that leave a group
become independent: where they share elements, their copies do not. So a template with
such tensors is refused. Memory in a span that is no element of any tensor is never
read; it travels as zeros.

This module decides only. It copies nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import gcd
from operator import attrgetter
from typing import Final

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    TensorSpec,
    dense_stride,
)
from aiockpt.memory.copies import Backing, Part, column, numbers
from aiockpt.state.leaves import DTYPE_NAMES

CODES: Final = {dtype: DTYPES[name][1] for dtype, name in DTYPE_NAMES.items()}
"""The safetensors code of each torch dtype, or None."""


class OverlapMember:
    """A tensor of the state dict, with the addresses that it spans."""

    __slots__ = ("flags", "itemsize", "name", "number", "start", "stop", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str, number: int) -> None:
        if tensor.is_meta:
            raise UnsupportedLeafError(name, "meta tensor", "it has no data to send")
        self.tensor = tensor
        self.name = name
        self.number = number
        self.flags = flags_of(tensor)
        self.itemsize = tensor.itemsize
        self.start = tensor.data_ptr()
        nbytes = span(tensor)
        self.stop = self.start + nbytes
        # A sharded module frees the storage of a parameter that it has gathered.
        stop = tensor.storage_offset() * self.itemsize + nbytes
        held = tensor.untyped_storage().nbytes() if self.start else 0
        if nbytes and stop > held:
            raise UnsupportedLeafError(name, "tensor", "its memory has been freed")

    @property
    def code(self) -> str | None:
        """The safetensors code of the dtype, or None."""
        return CODES[self.tensor.dtype]

    @property
    def used(self) -> int:
        """Bytes of the elements; at most the span, since expanded elements repeat."""
        return min(self.tensor.nbytes, self.stop - self.start)

    @property
    def is_sparse(self) -> bool:
        """Whether the elements use less than half of the span."""
        return 2 * self.tensor.nbytes < self.stop - self.start

    def view(self) -> tuple[object, ...]:
        """Return a key that is equal for the same elements in the same order."""
        tensor, lazy = self.tensor, self.flags & (CONJ | NEG)
        return (self.start, tensor.dtype, lazy, tensor.shape, tensor.stride())

    def holds(self, start: int, stop: int) -> bool:
        """Say whether this tensor's own storage contains these addresses."""
        storage = self.tensor.untyped_storage()
        base = storage.data_ptr()
        return base <= start and stop <= base + storage.nbytes()


def by_view(members: Iterable[OverlapMember]) -> list[list[OverlapMember]]:
    """Sort members into lists of equal views."""
    views: dict[tuple[object, ...], list[OverlapMember]] = {}
    for member in members:
        views.setdefault(member.view(), []).append(member)
    return list(views.values())


def overlapping(starts: array[int], sizes: array[int]) -> set[int]:
    """Return the numbers of tensors whose memory overlaps that of another one."""
    order = torch.argsort(numbers(starts), stable=True)
    ascending = numbers(starts)[order]
    if bool((ascending + numbers(sizes)[order])[:-1].le(ascending[1:]).all()):
        return set()
    found: set[int] = set()
    reach, reaching = -1, -1
    for number in column(order):
        start, size = starts[number], sizes[number]
        if size and start < reach:
            found |= {number, reaching}
        if start + size > reach:
            reach, reaching = start + size, number
    return found


def runs(members: Iterable[OverlapMember]) -> list[list[OverlapMember]]:
    """Sort members into lists whose spans overlap."""
    found: list[list[OverlapMember]] = []
    stop = -1
    for member in sorted(members, key=lambda member: member.start):
        if member.start < stop:
            found[-1].append(member)
            stop = max(stop, member.stop)
        else:
            found.append([member])
            stop = member.stop
    return found


def share_elements(one: Sequence[OverlapMember], other: OverlapMember) -> bool:
    """Say whether a byte belongs to an element of ``other`` and of one in ``one``.

    The answer is exact where spans only interleave. The cost is proportional to the
    number of elements.
    """
    near = [each for each in one if each.start < other.stop and other.start < each.stop]
    if not near:
        return False
    members = [*near, other]
    low = min(member.start for member in members)
    unit = gcd(*(m.itemsize for m in members), *(m.start - low for m in members))
    theirs = torch.cat([_positions(member, low, unit) for member in near])
    return bool(torch.isin(_positions(other, low, unit), theirs).any())


def repeats(tensor: torch.Tensor) -> bool:
    """Say whether two elements of a tensor are in the same memory.

    The cost is proportional to the number of elements if strides do not tell.
    """
    reach = 1
    if tensor.is_contiguous():
        return False
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    steps = [(stride, size) for stride, size in pairs if size > 1]
    for stride, size in steps:
        if stride < reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if not steps[0][0]:
        return True
    member = OverlapMember(tensor, "", 0)
    positions, _ = _positions(member, member.start, member.itemsize).sort()
    return bool(positions.diff().eq(0).any())


def _positions(member: OverlapMember, low: int, unit: int) -> torch.Tensor:
    """Return the units of memory that hold the elements, counted from ``low``."""
    positions = torch.tensor([(member.start - low) // unit])
    width, tensor = member.itemsize // unit, member.tensor
    axes = [*zip(tensor.shape, tensor.stride(), strict=True)]
    for size, step in [(size, step * width) for size, step in axes if step]:
        positions = (positions[:, None] + step * torch.arange(size)).flatten()
    return (positions[:, None] + torch.arange(width)).flatten()


def flags_of(tensor: torch.Tensor) -> int:
    """Return the flags of a tensor in the wire format."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    if tensor.is_conj():
        flags |= CONJ
    return flags | NEG if tensor.is_neg() else flags


def is_solid(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill all memory between the first and the last."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride > reach:
                return False
            reach += (size - 1) * stride
    return True


def span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element in memory to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize


class Group:
    """Members that share memory, with the entry that they become.

    Attributes:
        members: The tensors, in the order of their numbers.
        start: The address of the entry's first byte.
        stop: The address after the members' last byte; the entry may end later.
        dense: Whether the entry is a dense copy of one sparse view.
        cover: The member that the entry is by itself, if there is one.
        name: The entry's name.
        code: Its safetensors code.
        shape: Its shape.
        nbytes: Its bytes.
        align: The element size of the widest member.
    """

    __slots__ = (
        "align",
        "code",
        "cover",
        "dense",
        "members",
        "name",
        "nbytes",
        "shape",
        "start",
        "stop",
    )

    def __init__(
        self, members: Iterable[OverlapMember], *, dense: bool = False
    ) -> None:
        self.members = sorted(members, key=attrgetter("number"))
        self.start = min(member.start for member in self.members)
        self.stop = max(member.stop for member in self.members)
        self.dense = dense
        self.cover: OverlapMember | None = self.members[0]
        if dense:
            self.align = self.cover.itemsize
            self.nbytes = self.cover.tensor.nbytes
        else:
            widest = _widest(self.members)
            self.align = widest.itemsize
            # Not the storage's start: buffers of other libraries overlap at any byte.
            self.start -= (self.start - widest.start) % self.align
            assert all((m.start - self.start) % m.itemsize == 0 for m in self.members)
            span = self.stop - self.start
            covers = (member for member in self.members if self._is_covered_by(member))
            self.cover = None if span % self.align else next(covers, None)
            self.nbytes = span + -span % self.align
        named = self.cover or self.members[0]
        self.name, code = named.name, named.code
        self.shape: tuple[int, ...]
        if code is not None and self.cover is not None:
            self.code, self.shape = code, tuple(map(int, named.tensor.shape))
        elif code is not None and self.nbytes % named.itemsize == 0:
            self.code, self.shape = code, (self.nbytes // named.itemsize,)
        else:
            self.code, self.shape = "U8", (self.nbytes,)

    @property
    def first(self) -> int:
        """The number of the first member."""
        return self.members[0].number

    def _is_covered_by(self, member: OverlapMember) -> bool:
        return (
            member.start == self.start
            and member.stop == self.stop
            and member.tensor.is_contiguous()
            and member.code is not None
        )

    def spec(self, member: OverlapMember, entry: int) -> TensorSpec | None:
        """Return how a member differs from its entry; None for a plain one."""
        tensor = member.tensor
        stride, offset, flags = tuple(tensor.stride()), 0, member.flags
        is_plain = member is self.cover and not flags and not self.dense
        # Without elements a tensor is contiguous, whatever its strides are.
        as_usual = tensor.numel() or stride == dense_stride(tensor.shape)
        if is_plain and as_usual and member.code is not None:
            return None
        if self.dense:
            stride = dense_stride(tensor.shape)
            flags |= COMPACTED
        else:
            offset = (member.start - self.start) // member.itemsize
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(entry, name, shape, stride, offset, flags)

    def backing(self) -> Backing:
        """Return the entry's memory, as raw bytes if it contains no other bytes."""
        first = self.members[0].tensor
        nbytes = self.stop - self.start
        if self.dense:
            part = Part(first, dense_stride(first.shape), 0)
            return Backing(first, self.start, nbytes, (part,))
        if not self._has_holes():
            for member in self.members:
                if not nbytes or member.holds(self.start, self.stop):
                    return Backing(member.tensor, self.start, nbytes)
        parts = tuple(self._part(same[0]) for same in by_view(self.members))
        return Backing(first, self.start, nbytes, parts)

    def _part(self, member: OverlapMember) -> Part:
        offset = (member.start - self.start) // member.itemsize
        return Part(member.tensor, tuple(member.tensor.stride()), offset)

    def _has_holes(self) -> bool:
        """Say whether memory between the elements belongs to no member."""
        reached = self.start
        for member in sorted(self.members, key=attrgetter("start")):
            if member.start <= reached and is_solid(member.tensor):
                reached = max(reached, member.stop)
        return reached < self.stop


def group_members(members: Iterable[OverlapMember], *, writing: bool) -> list[Group]:
    """Group members that overlap in memory, as far as one entry can hold them.

    Args:
        members: The tensors.
        writing: Whether their memory will be written.

    Raises:
        UnsupportedLeafError: with ``writing``, two tensors with separate entries share
            an element, which would be written twice; or a sparse view has one twice,
            which its dense copy does not.
    """
    groups: list[Group] = []
    by_device: dict[torch.device, list[OverlapMember]] = {}
    for member in members:
        if member.start == member.stop:
            groups.append(Group([member]))
        else:
            by_device.setdefault(member.tensor.device, []).append(member)
    for neighbours in by_device.values():
        for run in runs(neighbours):
            parts = _split(run)
            if writing:
                _check_apart(parts)
            groups += parts
    return groups


def _split(run: list[OverlapMember]) -> list[Group]:
    groups: list[Group] = []
    waiting = [run]
    while waiting:
        members = waiting.pop()
        fit, others = _aligned(members)
        if others:
            waiting += runs(fit) + runs(others)
            continue
        rest, sparse = _filling(members)
        groups += (Group(same, dense=True) for same in sparse)
        if sparse:
            waiting += runs(rest)
        else:
            groups.append(Group(rest))
    return groups


def _widest(members: Iterable[OverlapMember]) -> OverlapMember:
    return max(members, key=attrgetter("itemsize"))


def _aligned(
    members: Iterable[OverlapMember],
) -> tuple[list[OverlapMember], list[OverlapMember]]:
    """Split members: those aligned with the widest one's entry, and the others."""
    members = sorted(members, key=attrgetter("number"))
    origin = _widest(members).start
    halves: tuple[list[OverlapMember], list[OverlapMember]] = ([], [])
    for member in members:
        halves[(member.start - origin) % member.itemsize != 0].append(member)
    return halves


def _filling(
    members: list[OverlapMember],
) -> tuple[list[OverlapMember], list[list[OverlapMember]]]:
    """Split members: those whose span is worth sending, and the sparse views."""
    views = by_view(members)
    span = max(m.stop for m in members) - min(m.start for m in members)
    if 2 * sum(same[0].used for same in views) >= span:
        return members, []
    # The others fill half of their spans, and so half of any run of them.
    rest = [member for same in views if not same[0].is_sparse for member in same]
    return rest, [same for same in views if same[0].is_sparse]


def _check_apart(groups: list[Group]) -> None:
    for position, group in enumerate(groups):
        if group.dense and repeats(group.members[0].tensor):
            remedy = "its elements share memory; put a copy by contiguous() there"
            raise UnsupportedLeafError(group.name, "view", remedy)
        before = [member for other in groups[:position] for member in other.members]
        for same in by_view(group.members):
            if share_elements(before, same[0]):
                remedy = (
                    "it shares elements with another tensor in a way that no "
                    "checkpoint keeps; receive without into="
                )
                raise UnsupportedLeafError(same[0].name, "view", remedy)
