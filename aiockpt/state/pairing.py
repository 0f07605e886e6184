"""A template's tensors against those of a manifest, pair by pair."""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from operator import itemgetter
from typing import Final, TypeAlias

import torch

from aiockpt.format.manifest import (
    COMPACTED,
    CONJ,
    NEG,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
    dense_stride,
)
from aiockpt.state.flatten import Drafts
from aiockpt.state.leaves import DTYPE_NAMES

__all__ = ["Misfit", "Pairing"]

# What a tensor is here, and how it travelled, need not agree.
_LOCAL_FLAGS = PARAMETER | REQUIRES_GRAD | COMPACTED

# Tensors that are compared by one call: their numbers are objects meanwhile.
_SLICE: Final = 512

Misfit: TypeAlias = "tuple[str, str] | None"
"""What is expected and what there is, where a pair does not fit."""


class Pairing:
    """Pairs their tensors and entries with ours, one to one.

    Attributes:
        tensors: Which of our tensors is each of theirs.
        entries: Which of our entries, by the number that it goes by, is each of theirs.
    """

    def __init__(
        self, manifest: Manifest, tensors: Sequence[torch.Tensor], drafts: Drafts
    ) -> None:
        self._manifest = manifest
        self._own = tensors
        self._drafts = drafts
        self._dtypes = manifest.entries.dtypes
        self._shapes = manifest.entries.shapes
        self.tensors = Bijection(manifest.tensor_count, len(tensors))
        self.entries = Bijection(len(manifest.entries), len(tensors))

    def add_all(self, theirs: Sequence[int], own: Sequence[int]) -> bool:
        """Pair plain tensors, none of which is shared: most states have no others.

        Returns False where one is something else, or does not fit; this pairing is of
        no use then, and `add` finds out in another one.
        """
        if max(theirs, default=-1) >= len(self._dtypes):
            return False
        for start in range(0, len(theirs), _SLICE):
            some, mine = theirs[start : start + _SLICE], own[start : start + _SLICE]
            there, here = itemgetter(*some), itemgetter(*mine)
            if (
                there(self._dtypes) != here(self._drafts.codes)
                or there(self._shapes) != here(self._drafts.shapes)
                or not self.tensors.add_all(some, mine)
            ):
                return False
        # A plain tensor has the number of its entry, on either side.
        self.entries.there = self.tensors.there[: len(self._dtypes)]
        return True

    def add(self, number: int, mine: int) -> Misfit:
        """Pair two tensors, and their entries, if they fit."""
        if self._is_plain_pair(number, mine):
            misfit = self.entries.add(number, mine)
        else:
            misfit = self._compare(number, mine)
        return misfit or self.tensors.add(number, mine)

    def leave_out(self, entries: Set[int], numbers: Set[int]) -> None:
        """Undo the pairs of these entries and tensors of theirs."""
        for entry in entries:
            self.entries.there[entry] = -1
        for number in numbers:
            self.tensors.there[number] = -1

    def _is_plain_pair(self, number: int, mine: int) -> bool:
        """Say whether both are dense tensors of one dtype and shape: most are."""
        return (
            number < len(self._dtypes)
            and self._dtypes[number] == self._drafts.codes[mine]
            and self._shapes[number] == self._drafts.shapes[mine]
        )

    def _compare(self, number: int, mine: int) -> Misfit:
        theirs, own = self._manifest.tensor(number), self._spec(mine)
        if _comparable(theirs) != _comparable(own):
            return _words(theirs), _words(own)
        return self.entries.add(theirs.storage, own.storage)

    def _spec(self, number: int) -> TensorSpec:
        """Return what a manifest would say about a tensor of ours."""
        tensor, entry = self._own[number], number
        if (owner := self._drafts.owners.get(number)) is not None:
            group, member = owner
            entry = group.first
            if (spec := group.spec(member, entry)) is not None:
                return spec
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(entry, name, shape, dense_stride(shape), 0, 0)


class Bijection:
    """A mapping that must also hold backwards: what is shared there is shared here.

    ``there`` has the number of ours by the number of theirs, or -1.
    """

    def __init__(self, theirs: int, own: int) -> None:
        self.there = array("q", [-1]) * theirs
        self._back = array("q", [-1]) * own

    def add(self, theirs: int, own: int) -> Misfit:
        """Map a number of theirs to one of ours, if no other is mapped to either."""
        if self.there[theirs] == own:
            return None
        if self.there[theirs] >= 0:
            return "memory shared with another tensor", "its own"
        if self._back[own] >= 0:
            return "memory of its own", "memory that is shared"
        self.there[theirs] = own
        self._back[own] = theirs
        return None

    def add_all(self, theirs: Sequence[int], own: Sequence[int]) -> bool:
        """Map new numbers to new ones, until one is not; return whether all were."""
        there, back = self.there, self._back
        for number, mine in zip(theirs, own, strict=True):
            if there[number] >= 0 or back[mine] >= 0:
                return False
            there[number] = mine
            back[mine] = number
        return True


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    """What must be equal; strides of dimensions of one element mean nothing."""
    stride: tuple[int, ...] = ()
    if 0 not in spec.shape:
        stride = tuple(
            step for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1
        )
    return spec.dtype, spec.shape, stride, spec.offset, spec.flags & ~_LOCAL_FLAGS


def _words(spec: TensorSpec) -> str:
    lazy = " conjugated" * bool(spec.flags & CONJ) + " negated" * bool(spec.flags & NEG)
    where = f" from element {spec.offset} of its memory" * bool(spec.offset)
    return f"{spec.dtype} {list(spec.shape)} stride {list(spec.stride)}{lazy}{where}"
