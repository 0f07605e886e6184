"""Entries in the order of the tree, before they have places in the data segment.

Most tensors are *plain*: contiguous, alone in their memory, nothing to autograd. Of
these there may be 100,000, so no object is made for one: it is a line in columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from aiockpt._backings import Backings, Part
from aiockpt._groups import Group, group_members
from aiockpt._members import CODES, Member
from aiockpt.wire.layout import Storage

__all__ = ["Drafts", "draft"]

_ITEMSIZES: Final = {code: dtype.itemsize for dtype, code in CODES.items() if code}

_REGION_BITS: Final = 22

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

    def entries(self) -> list[int]:
        """Return the numbers that entries go by."""
        return [
            number
            for number, code in enumerate(self.codes)
            if code is not None or self.owners[number][0].first == number
        ]

    def storage(self, number: int, name: str) -> Storage:
        """Return the entry of a plain tensor that is called ``name``, or of a group."""
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


def _looked_at(tensors: Iterable[torch.Tensor]) -> _Columns:
    """Return codes, shapes, addresses and sizes: all at once, while a tensor is cached.

    One object for equal shapes, of which there are many.
    """
    codes: list[str | None] = []
    shapes: list[tuple[int, ...]] = []
    starts, sizes = array("Q"), array("Q")
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for tensor in tensors:
        address, nbytes, shape = tensor.data_ptr(), tensor.nbytes, tensor.shape
        codes.append(_plain_code(tensor, address, nbytes))
        shapes.append(known.get(shape) or known.setdefault(tuple(shape), tuple(shape)))
        starts.append(address)
        sizes.append(nbytes)
    return codes, shapes, starts, sizes


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


def _overlapping(starts: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """Return the numbers of those that some other one overlaps."""
    found: set[int] = set()
    reach, reaching = -1, -1
    for number in _by_address(starts):
        start, size = starts[number], sizes[number]
        if size and start < reach:
            found |= {number, reaching}
        if start + size > reach:
            reach, reaching = start + size, number
    return found


def _by_address(starts: Sequence[int]) -> Iterator[int]:
    """Yield numbers in the order of their addresses.

    Region by region, since a sort keeps the interpreter lock until it is done.
    """
    regions: dict[int, list[int]] = {}
    for number, start in enumerate(starts):
        regions.setdefault(start >> _REGION_BITS, []).append(number)
    for _, numbers in sorted(regions.items()):
        yield from sorted(numbers, key=starts.__getitem__)


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
