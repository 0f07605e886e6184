"""Pairs the tensors of a checkpoint with the tensors of a local state dict.

In this module, "theirs" are the tensors and entries of the checkpoint's manifest, and
"ours" are those of the local state dict. Both are known by number. `Places` pairs them
by path. `Pairing` compares each pair. `alike` returns the memory of a state dict that
may already hold the bytes of a checkpoint. What differs is no error here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence, Set
from operator import itemgetter
from typing import Final

import torch

from aiockpt.format.manifest import (
    COMPACTED,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    TensorSpec,
    dense_stride,
)
from aiockpt.format.paths import Node, Path
from aiockpt.format.references import Mention, check_numbers, mentions
from aiockpt.memory.copies import Backings
from aiockpt.runtime.system import collector_paused
from aiockpt.state.flatten import Drafts, Survey
from aiockpt.state.leaves import DTYPE_NAMES

__all__ = ["Pairing", "alike"]

_NONE: Final = -1

# These flags may differ between the two tensors of a pair.
_LOCAL_FLAGS = PARAMETER | REQUIRES_GRAD | COMPACTED

# Tensors compared by one call. Each of their numbers is an object meanwhile.
_SLICE: Final = 512


class Pairing:
    """A one-to-one mapping from their tensors and entries to ours.

    Attributes:
        tensors: The number of our tensor for each of theirs.
        entries: The number of our entry for each of theirs.
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
        """Pair plain, unshared tensors. Most states have no others.

        Returns False if a tensor is not plain or does not fit. The caller then makes
        a new pairing and calls `add` for each tensor.
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

    def add(self, number: int, mine: int) -> bool:
        """Pair two tensors, and their entries; return False if they do not fit."""
        if self._is_plain_pair(number, mine):
            fits = self.entries.add(number, mine)
        else:
            fits = self._compare(number, mine)
        return fits and self.tensors.add(number, mine)

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

    def _compare(self, number: int, mine: int) -> bool:
        theirs, own = self._manifest.tensor(number), self._spec(mine)
        alike = _comparable(theirs) == _comparable(own)
        return alike and self.entries.add(theirs.storage, own.storage)

    def _spec(self, number: int) -> TensorSpec:
        """Return the spec that a manifest would have for one of our tensors."""
        tensor, entry = self._own[number], number
        if (owner := self._drafts.owners.get(number)) is not None:
            group, member = owner
            entry = group.first
            if (spec := group.spec(member, entry)) is not None:
                return spec
        name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        return TensorSpec(entry, name, shape, dense_stride(shape), 0, 0)


class Bijection:
    """A one-to-one mapping: tensors that share on one side share on the other.

    ``there`` has our number for each of their numbers, or -1 if there is none.
    """

    def __init__(self, theirs: int, own: int) -> None:
        self.there = array("q", [-1]) * theirs
        self._back = array("q", [-1]) * own

    def add(self, theirs: int, own: int) -> bool:
        """Map one of their numbers to one of ours; False if either has another one."""
        if self.there[theirs] == own:
            return True
        if self.there[theirs] >= 0 or self._back[own] >= 0:
            return False
        self.there[theirs] = own
        self._back[own] = theirs
        return True

    def add_all(self, theirs: Sequence[int], own: Sequence[int]) -> bool:
        """Map numbers that are all new; stop and return False at one that is not."""
        there, back = self.there, self._back
        for number, mine in zip(theirs, own, strict=True):
            if there[number] >= 0 or back[mine] >= 0:
                return False
            there[number] = mine
            back[mine] = number
        return True


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    """Return what must be equal; strides of one-element dimensions are left out."""
    stride: tuple[int, ...] = ()
    if 0 not in spec.shape:
        stride = tuple(
            step for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1
        )
    return spec.dtype, spec.shape, stride, spec.offset, spec.flags & ~_LOCAL_FLAGS


class Places:
    """Pairs their tensors to fill with ours while their tree is read.

    Both trees are read side by side while they have the same structure. From the first
    difference on, such as keys in another order, `Places` looks paths up. That takes
    more time and much more memory, since there may be 100,000 paths.

    Args:
        own: Our tree.

    Attributes:
        theirs: The numbers of their paired tensors.
        own: Our number for each of them, at the same index.
    """

    def __init__(self, own: Node) -> None:
        self.theirs = array("q")
        self.own = array("q")
        self._tree, self._beside = own, mentions(own)
        self._by_path: dict[Path, int] = {}
        self._parted = False

    def add(self, mention: Mention) -> None:
        """Pair the tensors of their next node."""
        if not self._parted:
            mine = next(self._beside, None)
            if mine and (mine.path, mine.names) == (mention.path, mention.names):
                self.theirs.extend(mention.numbers)
                self.own.extend(mine.numbers)
                return
            self._part()
        self._look_up(mention)

    def _part(self) -> None:
        self._parted = True
        for mention in mentions(self._tree):
            for path, _, number, _ in mention.references():
                self._by_path[path] = number

    def _look_up(self, mention: Mention) -> None:
        for path, _, number, _ in mention.references():
            mine = self._by_path.get(path)
            if mine is not None:
                self.theirs.append(number)
                self.own.append(mine)


def alike(manifest: Manifest, own: Survey) -> Backings:
    """Return the memory of a state dict that may hold the bytes of each entry.

    An entry without such memory gets zero bytes. Tensors are paired if they have the
    same path, dtype, shape and strides. A wrong pair does no harm, because the reader
    of that memory compares digests.

    Raises:
        RemoteProtocolError: the tree names a tensor that the manifest lacks.
    """
    with collector_paused():
        pairing = _paired(manifest, own)
    there = array("q", _fitting(manifest, own.drafts, pairing.entries.there))
    return own.drafts.backings.taken(there)


def _paired(manifest: Manifest, own: Survey) -> Pairing:
    places = Places(own.tree)
    for mention in mentions(manifest.tree):
        check_numbers(mention.numbers, manifest.tensor_count)
        places.add(mention)
    pairing = Pairing(manifest, own.tensors, own.drafts)
    if not pairing.add_all(places.theirs, places.own):
        pairing = Pairing(manifest, own.tensors, own.drafts)
        for number, mine in zip(places.theirs, places.own, strict=True):
            pairing.add(number, mine)  # pairs that do not fit are left out
    return pairing


def _fitting(manifest: Manifest, drafts: Drafts, there: array[int]) -> Iterator[int]:
    """Yield our entry for each of theirs, or -1 if their sizes differ.

    Our group may have members that theirs lacks, so it may be larger.
    """
    entries = manifest.entries
    columns = zip(there, entries.starts, entries.stops, strict=True)
    for mine, start, stop in columns:
        fits = mine >= 0
        if fits and drafts.codes[mine] is None:
            group, _ = drafts.owners[mine]
            fits = group.nbytes == stop - start and start % group.align == 0
        yield mine if fits else _NONE
