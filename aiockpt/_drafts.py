"""Entries in the order of the tree, before they have places in the data segment.

Most tensors are *plain*: contiguous, alone in their memory, nothing to autograd. Of
these there may be 100,000, so nothing is made for one but its entry and its backing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aiockpt._groups import Backing, Group, group_members
from aiockpt._members import CODES, Member
from aiockpt.wire.layout import Storage

__all__ = ["Drafts", "draft"]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Entries that belong to ``owners``: a plain tensor, by its number, or a group."""

    storages: Sequence[Storage]
    backings: Sequence[Backing]
    owners: Sequence[int | Group]


def draft(
    tensors: Sequence[torch.Tensor], names: Sequence[str], *, writing: bool
) -> Drafts:
    """Make entries of tensors; ``writing`` says that their memory will be written.

    Raises:
        UnsupportedLeafError: a tensor has no memory; or it cannot be written, because
            an element of it belongs to another entry too.
    """
    storages: list[Storage | None] = []
    backings: list[Backing | None] = []
    for tensor, name in zip(tensors, names, strict=True):
        storage, backing = _plain(tensor, name)
        storages.append(storage)
        backings.append(backing)
    owners: list[int | Group] = list(range(len(tensors)))
    members = _members(tensors, names, backings)
    for member in members:
        storages[member.number] = backings[member.number] = None
    for group in group_members(members, writing=writing):
        first = group.members[0].number
        owners[first] = group
        storages[first], backings[first] = group.storage, group.backing()
    return Drafts(
        [storage for storage in storages if storage is not None],
        [backing for backing in backings if backing is not None],
        [owner for owner, held in zip(owners, backings, strict=True) if held],
    )


def _plain(
    tensor: torch.Tensor, name: str
) -> tuple[Storage, Backing] | tuple[None, None]:
    """Return the entry of a tensor that is as plain as can be seen by itself."""
    code, address = CODES[tensor.dtype], tensor.data_ptr()
    if (
        code is None
        or not address
        or type(tensor) is not torch.Tensor
        or tensor.requires_grad
        or tensor.is_neg()
        or (code == "C64" and tensor.is_conj())
        or not tensor.is_contiguous()
    ):
        return None, None
    nbytes, itemsize = tensor.nbytes, tensor.itemsize
    stop = tensor.storage_offset() * itemsize + nbytes
    if stop > tensor.untyped_storage().nbytes():
        return None, None
    storage = Storage(name, code, tuple(tensor.shape), nbytes, itemsize)
    return storage, Backing(tensor, address, nbytes)


def _members(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    backings: Sequence[Backing | None],
) -> list[Member]:
    """Return the tensors that are not plain, or not alone in their memory."""
    odd = [
        Member(tensors[number], names[number], number)
        for number, backing in enumerate(backings)
        if backing is None
    ]
    spans = [(member.start, member.stop, member.number) for member in odd]
    spans += [
        (backing.address, backing.address + backing.nbytes, number)
        for number, backing in enumerate(backings)
        if backing is not None and backing.nbytes
    ]
    shared = _overlapping(spans)
    shared -= {member.number for member in odd}
    odd += (Member(tensors[number], names[number], number) for number in shared)
    return odd


def _overlapping(spans: list[tuple[int, int, int]]) -> set[int]:
    """Return the numbers of those that some other one overlaps."""
    found: set[int] = set()
    reach, reaching = -1, -1
    for start, stop, number in sorted(spans):
        if start < reach:
            found |= {number, reaching}
        if stop > reach:
            reach, reaching = stop, number
    return found
