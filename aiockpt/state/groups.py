"""How tensors become entries of the data segment. Decisions only, no copies.

Tensors whose spans of memory overlap form a *group*, which becomes one entry, so tied
weights and views travel once and stay aliased:

=========================================  ======================================
the group                                  its entry
=========================================  ======================================
one contiguous tensor                      the tensor itself
views that use half of their span or more  the span, with the views' strides
views that use less                        the sparse ones (each by itself uses
                                           less than half of its own span) leave
                                           with a dense copy each (``COMPACTED``);
                                           the others are grouped again
members that no address aligns together    those that fit the widest; the others
                                           are grouped again
=========================================  ======================================

Tensors that are the same view never part. Different ones that leave a group do: where
they share elements, the copies do not, so a template with such tensors is refused.
Memory in a span that is no element of any tensor is never read: it travels as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.entries import Storage
from aiockpt.format.manifest import COMPACTED, TensorSpec, dense_stride
from aiockpt.memory.copies import Backing, Part
from aiockpt.state.leaves import DTYPE_NAMES
from aiockpt.state.members import Member, by_view, runs, share_elements

__all__ = ["Backing", "Group", "Part", "group_members"]


class Group:
    """Members that share memory, and the entry that they become."""

    __slots__ = ("cover", "dense", "members", "start", "stop", "storage")

    def __init__(self, members: Iterable[Member], *, dense: bool = False) -> None:
        self.members = sorted(members, key=attrgetter("number"))
        self.start = min(member.start for member in self.members)
        self.stop = max(member.stop for member in self.members)
        self.dense = dense
        self.cover: Member | None = self.members[0]
        self.storage = self._compact() if dense else self._span()

    @property
    def first(self) -> int:
        """The number of its first member."""
        return self.members[0].number

    def _compact(self) -> Storage:
        first = self.members[0]
        return self._storage(first, first.tensor.nbytes, first.itemsize)

    def _span(self) -> Storage:
        widest = _widest(self.members)
        align = widest.itemsize
        # Not from the storage's start: buffers of other libraries overlap at any byte.
        self.start -= (self.start - widest.start) % align
        assert all((m.start - self.start) % m.itemsize == 0 for m in self.members)
        nbytes = self.stop - self.start
        covers = (member for member in self.members if self._is_covered_by(member))
        self.cover = None if nbytes % align else next(covers, None)
        named = self.cover or self.members[0]
        return self._storage(named, nbytes + -nbytes % align, align)

    def _storage(self, member: Member, nbytes: int, align: int) -> Storage:
        code = member.code
        shape: tuple[int, ...]
        if code is not None and member is self.cover:
            shape = tuple(map(int, member.tensor.shape))
        elif code is not None and nbytes % member.itemsize == 0:
            shape = (nbytes // member.itemsize,)
        else:
            code, shape = "U8", (nbytes,)
        return Storage(member.name, code, shape, nbytes, align)

    def _is_covered_by(self, member: Member) -> bool:
        return (
            member.start == self.start
            and member.stop == self.stop
            and member.tensor.is_contiguous()
            and member.code is not None
        )

    def spec(self, member: Member, entry: int) -> TensorSpec | None:
        """What the entry does not say about a member; None for a plain tensor."""
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
        """Where its bytes are: as they lie in memory, where all of them are its own."""
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

    def _part(self, member: Member) -> Part:
        offset = (member.start - self.start) // member.itemsize
        return Part(member.tensor, tuple(member.tensor.stride()), offset)

    def _has_holes(self) -> bool:
        """Whether memory between the members' elements is not the state dict's."""
        reached = self.start
        for member in sorted(self.members, key=attrgetter("start")):
            if member.start <= reached and member.is_solid():
                reached = max(reached, member.stop)
        return reached < self.stop


def group_members(members: Iterable[Member], *, writing: bool) -> list[Group]:
    """Group members that overlap in memory, as far as one entry can hold them.

    Raises:
        UnsupportedLeafError: with ``writing``, two tensors that have entries of their
            own share an element, which would be written twice.
    """
    groups: list[Group] = []
    by_device: dict[torch.device, list[Member]] = {}
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


def _split(run: list[Member]) -> list[Group]:
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


def _widest(members: Iterable[Member]) -> Member:
    return max(members, key=attrgetter("itemsize"))


def _aligned(members: Iterable[Member]) -> tuple[list[Member], list[Member]]:
    """Part those whose offsets are whole elements, in an entry that the widest fits."""
    members = sorted(members, key=attrgetter("number"))
    origin = _widest(members).start
    halves: tuple[list[Member], list[Member]] = ([], [])
    for member in members:
        halves[(member.start - origin) % member.itemsize != 0].append(member)
    return halves


def _filling(members: list[Member]) -> tuple[list[Member], list[list[Member]]]:
    """Part those that make a span worth sending from the sparse views, if need be."""
    views = by_view(members)
    span = max(m.stop for m in members) - min(m.start for m in members)
    if 2 * sum(same[0].used for same in views) >= span:
        return members, []
    # The others fill half of their spans, and so of whatever runs these make.
    rest = [member for same in views if not same[0].is_sparse for member in same]
    return rest, [same for same in views if same[0].is_sparse]


def _check_apart(groups: list[Group]) -> None:
    for position, group in enumerate(groups):
        before = [member for other in groups[:position] for member in other.members]
        for same in by_view(group.members):
            if share_elements(before, same[0]):
                remedy = (
                    "it shares elements with another tensor in a way that no "
                    "checkpoint keeps; receive without into="
                )
                raise UnsupportedLeafError(same[0].name, "view", remedy)
