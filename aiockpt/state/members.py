"""Tensors as ranges of addresses: what they span, what they use, what they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Final

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.manifest import CONJ, NEG, PARAMETER, REQUIRES_GRAD
from aiockpt.state.leaves import DTYPE_NAMES

__all__ = ["CODES", "Member", "by_view", "runs", "share_elements"]

CODES: Final = {dtype: DTYPES[name][1] for dtype, name in DTYPE_NAMES.items()}
"""Torch dtype -> safetensors code, or None."""


class Member:
    """A tensor of the state dict, and the addresses that it spans."""

    __slots__ = ("flags", "itemsize", "name", "number", "start", "stop", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str, number: int) -> None:
        if tensor.is_meta:
            raise UnsupportedLeafError(name, "meta tensor", "it has no data to send")
        self.tensor = tensor
        self.name = name
        self.number = number
        self.flags = _flags(tensor)
        self.itemsize = tensor.itemsize
        self.start = tensor.data_ptr()
        span = _span(tensor)
        self.stop = self.start + span
        # A sharded module frees the storage of a parameter that it has gathered.
        stop = tensor.storage_offset() * self.itemsize + span
        held = tensor.untyped_storage().nbytes() if self.start else 0
        if span and stop > held:
            raise UnsupportedLeafError(name, "tensor", "its memory has been freed")

    @property
    def code(self) -> str | None:
        """The safetensors code of its dtype, where there is one."""
        return CODES[self.tensor.dtype]

    @property
    def used(self) -> int:
        """Bytes of its elements: at most its span, though an expanded one repeats."""
        return min(self.tensor.nbytes, self.stop - self.start)

    @property
    def is_sparse(self) -> bool:
        """Whether it uses less than half of what it spans."""
        return 2 * self.tensor.nbytes < self.stop - self.start

    def view(self) -> tuple[object, ...]:
        """What is equal for tensors with the same elements in the same order."""
        tensor, lazy = self.tensor, self.flags & (CONJ | NEG)
        return (self.start, tensor.dtype, lazy, tensor.shape, tensor.stride())

    def is_solid(self) -> bool:
        """Whether the elements leave no memory out between the first and the last."""
        tensor, reach = self.tensor, 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1:
                if stride > reach:
                    return False
                reach += (size - 1) * stride
        return True

    def holds(self, start: int, stop: int) -> bool:
        """Whether the storage of this very tensor has all of these addresses."""
        storage = self.tensor.untyped_storage()
        base = storage.data_ptr()
        return base <= start and stop <= base + storage.nbytes()


def by_view(members: Iterable[Member]) -> list[list[Member]]:
    """Sort members into lists of those that are the same view."""
    views: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        views.setdefault(member.view(), []).append(member)
    return list(views.values())


def runs(members: Iterable[Member]) -> list[list[Member]]:
    """Return the members in lists of those whose spans overlap."""
    found: list[list[Member]] = []
    stop = -1
    for member in sorted(members, key=lambda member: member.start):
        if member.start < stop:
            found[-1].append(member)
            stop = max(stop, member.stop)
        else:
            found.append([member])
            stop = member.stop
    return found


def share_elements(one: Sequence[Member], other: Member) -> bool:
    """Whether a byte belongs to an element of ``other`` and of some of ``one``.

    Exact where spans only interleave, and in proportion to the elements.
    """
    near = [each for each in one if each.start < other.stop and other.start < each.stop]
    if not near:
        return False
    members = [*near, other]
    low = min(member.start for member in members)
    unit = gcd(*(m.itemsize for m in members), *(m.start - low for m in members))
    theirs = torch.cat([_places(member, low, unit) for member in near])
    return bool(torch.isin(_places(other, low, unit), theirs).any())


def _places(member: Member, low: int, unit: int) -> torch.Tensor:
    """Which units of memory hold the elements, counted from address ``low``."""
    places = torch.tensor([(member.start - low) // unit])
    width, tensor = member.itemsize // unit, member.tensor
    axes = [*zip(tensor.shape, tensor.stride(), strict=True)]
    for size, step in [(size, step * width) for size, step in axes if step]:
        places = (places[:, None] + step * torch.arange(size)).flatten()
    return (places[:, None] + torch.arange(width)).flatten()


def _flags(tensor: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    if tensor.is_conj():
        flags |= CONJ
    return flags | NEG if tensor.is_neg() else flags


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, as they lie in memory."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize
