"""Entries in the order of the tree, before they have places in the data segment.

Most tensors are *plain*: contiguous, alone in their memory, nothing to autograd. Of
these there may be 100,000, so no object is made for one: it is a line in columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, attrgetter, le, mul
from typing import Final, TypeAlias, cast

import torch

from aiockpt.format.entries import Storage, Storages
from aiockpt.memory.copies import Backings, Part, column, numbers
from aiockpt.state.groups import Group, group_members
from aiockpt.state.members import CODES, Member

__all__ = ["Drafts", "draft"]

_ITEMSIZES: Final = {code: dtype.itemsize for dtype, code in CODES.items() if code}

# Tensors that C functions look at in a row, with the interpreter lock held.
_SLICE: Final = 1000

_DTYPE: Final = attrgetter("dtype")
_NBYTES: Final = attrgetter("nbytes")
_SHAPE: Final = attrgetter("shape")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")

_Columns: TypeAlias = """tuple[
    list[str | None], list[tuple[int, ...]], array[int], array[int]
]"""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What becomes of each tensor, by its number.

    A plain tensor is an entry. Each other one is in ``owners``: the group that it is
    a member of, whose entry goes by the number of the group's first member.

    Attributes:
        codes: Safetensors' codes of plain tensors; None for the others.
        shapes: Their shapes; tensors of one shape share it.
        backings: Of plain tensors, and of groups; the other lines mean nothing.
        owners: Groups, and the tensors as members of them.
    """

    codes: Sequence[str | None]
    shapes: Sequence[tuple[int, ...]]
    backings: Backings
    owners: Mapping[int, tuple[Group, Member]]

    def entries(self) -> Sequence[int]:
        """Return the numbers that entries go by."""
        if not self.owners:
            return range(len(self.codes))
        return [
            number
            for number, code in enumerate(self.codes)
            if code is not None or self.owners[number][0].first == number
        ]

    def storages(self, firsts: Sequence[int], names: Sequence[str]) -> Storages:
        """Return the entries that go by ``firsts``, of tensors with these names."""
        if self.owners:
            return Storages.of(self._storage(each, names[each]) for each in firsts)
        codes, sizes = cast("Sequence[str]", self.codes), self.backings.sizes
        aligns = [*map(_ITEMSIZES.__getitem__, codes)]
        return Storages(names, codes, self.shapes, column(numbers(sizes)), aligns)

    def _storage(self, number: int, name: str) -> Storage:
        code = self.codes[number]
        if code is None:
            return self.owners[number][0].storage
        nbytes = self.backings.sizes[number]
        return Storage(name, code, self.shapes[number], nbytes, _ITEMSIZES[code])


def draft(
    tensors: Sequence[torch.Tensor], names: Sequence[str], *, writing: bool
) -> Drafts:
    """Make entries of tensors; ``writing`` says that their memory will be written.

    Raises:
        UnsupportedLeafError: a tensor has no memory; or it cannot be written, because
            an element of it belongs to another entry too.
    """
    codes, shapes, starts, sizes = _looked_at(tensors)
    members: dict[int, Member] = {}
    for number, code in enumerate(codes):
        if code is None:
            member = Member(tensors[number], names[number], number)
            members[number], sizes[number] = member, member.stop - member.start
    for number in _overlapping(starts, sizes) - members.keys():
        members[number] = Member(tensors[number], names[number], number)
        codes[number] = None
    groups = group_members(members.values(), writing=writing)
    return Drafts(
        codes,
        shapes,
        _backings(Backings(tensors, starts, sizes, {}), groups),
        {
            member.number: (group, member)
            for group in groups
            for member in group.members
        },
    )


def _looked_at(tensors: Sequence[torch.Tensor]) -> _Columns:
    """Return codes, shapes, addresses and sizes, some tensors at a time.

    One object for equal shapes, of which there are many.
    """
    codes: list[str | None] = []
    shapes: list[tuple[int, ...]] = []
    starts, sizes = array("Q"), array("Q")
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for first in range(0, len(tensors), _SLICE):
        some = tensors[first : first + _SLICE]
        starts.extend(map(torch.Tensor.data_ptr, some))
        sizes.extend(map(_NBYTES, some))
        own = [*map(tuple, map(_SHAPE, some))]
        shapes += map(known.setdefault, own, own)
        codes += _plain_codes(some, starts[first:], sizes[first:])
    return codes, shapes, starts, sizes


def _plain_codes(
    tensors: Sequence[torch.Tensor], addresses: Sequence[int], sizes: Sequence[int]
) -> list[str | None]:
    """Return the codes of tensors that are plain; None for each other one."""
    codes = [*map(CODES.__getitem__, map(_DTYPE, tensors))]
    if _all_are_plain(tensors, codes, addresses, sizes):
        return codes
    return [*map(_plain_code, tensors, addresses, sizes)]


def _all_are_plain(
    tensors: Sequence[torch.Tensor],
    codes: Sequence[str | None],
    addresses: Sequence[int],
    sizes: Sequence[int],
) -> bool:
    """Say at once what `_plain_code` says tensor by tensor: mostly, all are."""
    kinds = {*codes}
    if (
        None in kinds
        or not all(addresses)
        or {*map(type, tensors)} != {torch.Tensor}
        or any(map(_REQUIRES_GRAD, tensors))
        or any(map(torch.Tensor.is_neg, tensors))
        or ("C64" in kinds and any(map(torch.Tensor.is_conj, tensors)))
        or not all(map(torch.Tensor.is_contiguous, tensors))
    ):
        return False
    widths = map(_ITEMSIZES.__getitem__, codes)  # type: ignore[arg-type]
    offsets = map(mul, map(torch.Tensor.storage_offset, tensors), widths)
    storages = map(torch.Tensor.untyped_storage, tensors)
    held = map(torch.UntypedStorage.nbytes, storages)
    return all(map(le, map(add, offsets, sizes), held))


def _plain_code(tensor: torch.Tensor, address: int, nbytes: int) -> str | None:
    """Return the code of a tensor that is as plain as can be seen by itself."""
    code = CODES[tensor.dtype]
    if (
        code is None
        or not address
        or type(tensor) is not torch.Tensor
        or tensor.requires_grad
        or tensor.is_neg()
        or (code == "C64" and tensor.is_conj())
        or not tensor.is_contiguous()
    ):
        return None
    stop = tensor.storage_offset() * _ITEMSIZES[code] + nbytes
    return code if stop <= tensor.untyped_storage().nbytes() else None


def _overlapping(starts: array[int], sizes: array[int]) -> set[int]:
    """Return the numbers of those that some other one overlaps."""
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


def _backings(plain: Backings, groups: Sequence[Group]) -> Backings:
    """Put those of groups in between those of plain tensors."""
    if not groups:
        return plain
    tensors = [*plain.tensors]
    parts: dict[int, tuple[Part, ...]] = {}
    for group in groups:
        own, first = group.backing(), group.first
        tensors[first] = own.tensor
        plain.addresses[first], plain.sizes[first] = own.address, own.nbytes
        if own.parts:
            parts[first] = own.parts
    return Backings(tensors, plain.addresses, plain.sizes, parts)
