"""Pairs the tensors of a checkpoint with the tensors of a local state dict.

In this module, "theirs" are the tensors and entries of the checkpoint's manifest, and
"ours" are those of the local state dict. Both are known by number. `Places` pairs them
by path. `Pairing` compares each pair. `alike` returns the memory of a state dict that
may already hold the bytes of a checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Final, TypeAlias

import torch

from aiockpt.errors import RemoteProtocolError, TemplateMismatchError
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
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import Mention, Reference, mentions
from aiockpt.memory.copies import Backings
from aiockpt.runtime.system import collector_paused
from aiockpt.state.containers import left_empty, renamed
from aiockpt.state.flatten import Drafts, Survey
from aiockpt.state.leaves import DTYPE_NAMES
from aiockpt.state.sharding import LAYOUTS

__all__ = [
    "Misfit",
    "Pairing",
    "Places",
    "alike",
    "check_numbers",
    "is_filled",
    "mismatch",
    "path_of",
]

_NONE: Final = -1

# The containers by their tags; templates may have another one of the same family.
_NAMES: Final = {
    "tensors": "a dict",
    "dict": "a dict",
    "odict": "an OrderedDict",
    "defaultdict": "a defaultdict",
    "list": "a list",
    "tuple": "a tuple",
    "deque": "a deque",
}
_FAMILIES: Final = {
    tag: "dict" if name.endswith(("dict", "Dict")) else tag
    for tag, name in _NAMES.items()
}

# These flags may differ between the two tensors of a pair.
_LOCAL_FLAGS = PARAMETER | REQUIRES_GRAD | COMPACTED

# Tensors compared by one call. Each of their numbers is an object meanwhile.
_SLICE: Final = 512

Misfit: TypeAlias = "tuple[str, str] | None"
"""The expected and the actual description of a pair that does not fit, or None."""


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
        a new pairing and calls `add` for each tensor, which says what does not fit.
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

    def add(self, theirs: int, own: int) -> Misfit:
        """Map one of their numbers to one of ours, unless either is mapped already."""
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


def _words(spec: TensorSpec) -> str:
    lazy = " conjugated" * bool(spec.flags & CONJ) + " negated" * bool(spec.flags & NEG)
    where = f" from element {spec.offset} of its memory" * bool(spec.offset)
    return f"{spec.dtype} {list(spec.shape)} stride {list(spec.stride)}{lazy}{where}"


def is_filled(mention: Mention | Reference) -> bool:
    """Say whether a mention names tensors of the state dict that can be filled.

    The local parts of a distributed tensor count. The tensors that a registered leaf
    or another value is made of do not.
    """
    own = mention.leaf is None or mention.leaf[1] in LAYOUTS
    return mention.kind == "tensor" and own


def path_of(tree: Node, place: int) -> Path:
    """Return the path of the ``place``-th tensor to fill, in the order of the tree.

    Only error messages need paths, so no table of paths is kept.
    """
    return next(islice(_paths(filter(is_filled, mentions(tree))), place, None))


def mismatch(path: Path, *, expected: str, actual: str) -> TemplateMismatchError:
    """Return the error for a template that does not fit at ``path``."""
    return TemplateMismatchError(format_path(path), expected=expected, actual=actual)


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Check that a manifest of ``count`` tensors has all of these numbers.

    Raises:
        RemoteProtocolError: it lacks one.
    """
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        wrong = next(number for number in numbers if not 0 <= number < count)
        raise RemoteProtocolError(f"the tree names tensor {wrong}")


class Places:
    """Pairs their tensors to fill with ours while their tree is read.

    Both trees are read side by side while they have the same structure. From the first
    difference on, such as keys in another order, `Places` looks paths up. That takes
    more time and much more memory, since there may be 100,000 paths.

    Args:
        own: Our tree.
        counts: Says which of our mentions are paired. The caller of `add` filters
            theirs.

    Attributes:
        theirs: The numbers of their paired tensors.
        own: Our number for each of them, at the same index.
    """

    def __init__(
        self, own: Node, counts: Callable[[Mention], bool] = is_filled
    ) -> None:
        self.theirs = array("q")
        self.own = array("q")
        self._tree, self._counts = own, counts
        self._beside = filter(counts, mentions(own))
        self._by_path: dict[Path, int] = {}
        self._unmet: dict[Path, int] = {}
        self._astray: list[Path] = []
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
        self._beside = filter(self._counts, mentions(self._tree))
        for mention in self._beside:
            for path, _, number, _ in mention.references():
                self._by_path[path] = number
        self._unmet = dict(islice(self._by_path.items(), len(self.own), None))

    def _look_up(self, mention: Mention) -> None:
        for path, _, number, _ in mention.references():
            mine = self._by_path.get(path)
            if mine is None:
                self._astray.append(path)
                continue
            self.theirs.append(number)
            self.own.append(mine)
            self._unmet.pop(path, None)

    def finish(self, theirs: Node) -> None:
        """Check that each side has a tensor for each tensor of the other.

        Args:
            theirs: Their tree, for the error.

        Raises:
            TemplateMismatchError: one side lacks a tensor. If both do, the error names
                a tensor of each.
        """
        unmet = chain(self._unmet, _paths(self._beside))
        for path in self._astray:
            raise _without_place(self._tree, theirs, path, next(unmet, None))
        for path in unmet:
            raise mismatch(path, expected=_kind_at(theirs, path), actual="a tensor")


def _without_place(
    own: Node, theirs: Node, path: Path, unmet: Path | None
) -> TemplateMismatchError:
    """Return the error for a tensor of theirs; ``unmet`` is one that only we have."""
    node, at = _deepest(own, path)
    mine, full = _children(node), _children(_deepest(theirs, at)[0])
    if len(at) < len(path) and mine is not None and full is not None:
        kinds = [_container_at(tree, at) for tree in (theirs, own)]
        if len({*map(_FAMILIES.get, kinds)}) > 1:
            return mismatch(at, expected=_NAMES[kinds[0]], actual=_NAMES[kinds[1]])
        if not mine:
            beside = _children(_deepest(theirs, at[:-1])[0]) or {}
            return left_empty(
                format_path(at),
                dict if _FAMILIES[kinds[1]] == "dict" else list,
                full.keys(),
                optimizer=at[-1:] == ("state",) and "param_groups" in beside,
                whole=True,
            )
    actual, detail = _kind_at(own, path), ""
    if unmet is not None:
        actual += f", but {format_path(unmet)}, which the checkpoint lacks"
        detail = renamed(mine or {}, full or {}, format_path(at))
    return TemplateMismatchError(
        format_path(path), expected="a tensor", actual=actual, detail=detail
    )


def _container_at(tree: Node, path: Path) -> str:
    node, _ = _deepest(tree, path)
    assert isinstance(node, list)
    return str(node[0])


def _kind_at(tree: Node, path: Path) -> str:
    """Return what a tree has at a path, or at the value above it."""
    node, at = _deepest(tree, path)
    if len(at) < len(path) and _children(node) is not None:
        return "nothing"
    kind = "None" if node is None else f"a value of type {type(node).__name__}"
    if isinstance(node, list):
        is_container = _children(node) is not None
        kind = _NAMES[str(node[0])] if is_container else "another value"
    return kind if len(at) == len(path) else f"{kind} at {format_path(at)}"


def _deepest(tree: Node, path: Path) -> tuple[Node, Path]:
    """Return the node at a path, or at the longest beginning of it that exists."""
    for depth, step in enumerate(path):
        inside = _children(tree)
        if inside is None or step not in inside:
            return tree, path[:depth]
        tree = inside[step]
    return tree, path


def _children(node: Node) -> dict[object, Node] | None:
    """Return the values of a container by key or index; None for another node."""
    match node:
        case ["dict" | "odict" | "tensors", [*keys], [*values], *_]:
            pass
        case ["defaultdict", _, [*keys], [*values]]:
            pass
        case ["list" | "tuple", [*values]] | ["deque", _, [*values]]:
            return dict(enumerate(values))
        case _:
            return None
    pairs = zip(keys, values, strict=False)
    return {key: value for key, value in pairs if not isinstance(key, list)}


def _paths(filled: Iterator[Mention]) -> Iterator[Path]:
    references = chain.from_iterable(mention.references() for mention in filled)
    return map(attrgetter("path"), references)


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
    places = Places(own.tree, counts=_every)
    for mention in mentions(manifest.tree):
        check_numbers(mention.numbers, manifest.tensor_count)
        places.add(mention)
    pairing = Pairing(manifest, own.tensors, own.drafts)
    if not pairing.add_all(places.theirs, places.own):
        pairing = Pairing(manifest, own.tensors, own.drafts)
        for number, mine in zip(places.theirs, places.own, strict=True):
            pairing.add(number, mine)  # pairs that do not fit are left out
    return pairing


def _every(_: Mention) -> bool:
    return True


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
