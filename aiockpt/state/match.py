"""Pairs a template with what the sources hold, path by path.

Every difference between the two is decided here, for every way to fill a template:

=======================================  ==============================================
the difference                           what happens
=======================================  ==============================================
only the template has a path             `Rule.missing` says whether it is an error
only the sources have a path             `Rule.extra` says whether the template gets it
a container is empty in the template     an error, or it stays empty, by both of these
None in the template                     what is there is taken as it is: *new* tensors
a meta tensor in the template            *new*, or an error by `Rule.extra`
another dtype or shape                   an error: nothing is cast
another mesh or other placements         an error
other strides; conjugated or negated     *copy*: elements, not bytes
on one side only
tied in the sources only                 *copy*: each tensor of the template is filled
tied or overlapping in the template      an error: one of two values would be lost
only
tied in both                             *straight*, if the same bytes are shared
a registered leaf                        made anew, also if it is made of tensors
another kind of value or container       an error, but a number is a number
lists of other lengths                   items that the template lacks are extra; too
                                         many (selected) ones in it are an error
=======================================  ==============================================

With `NEAR`, none of these is an error: what does not fit is *new*.

Another mesh does not end a load of files. The load then unites the files of all ranks
for the mesh of the template, and matches again; see `aiockpt.state.reshard`.

Each tensor that goes to the template's memory is *straight* (the bytes of its piece are
the bytes of that memory) or *copy* (they arrive in an arena, and their elements are
copied). `aiockpt.state.dispositions` compares the memory of both sides. What has no
memory in the template is *new*. Everything else is skipped.

The trees are walked side by side. Rows of tensors are compared column by column, since
there may be 100,000 of them. Nothing is read, made or changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, cast

from aiockpt.errors import (
    MissingKeysError,
    RemoteProtocolError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.format.limits import raise_if_cancelled
from aiockpt.format.paths import NAMED_TUPLE, PYTREE, Node
from aiockpt.format.references import check_numbers, mentions
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.memory.held import HeldMemory
from aiockpt.runtime.system import collector_paused
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.containers import STAYS, how_keys_differ, left_empty, renamed
from aiockpt.state.dispositions import Fills, Pairs, check, dispose, near
from aiockpt.state.distributed import check_places
from aiockpt.state.flatten import NO_MEMORY, ODD, Wanted
from aiockpt.state.node_types import TYPES, NodeTypes, mismatch_of
from aiockpt.state.selection import Select, Selection, below, item
from aiockpt.state.sharding import Layout, is_filled
from aiockpt.state.trees import (
    DICTS,
    HOLE,
    Items,
    blaming,
    entered,
    is_distributed,
    items_of,
    keys_of,
    number_of,
    structure_of,
    tag_of,
    values_of,
)

_NO_TEMPLATE: Final = Wanted(
    None, (), (), (), array("Q"), HeldMemory.of(()), MappingProxyType({}), ()
)


def decode_hole(payload: object) -> object:
    """Decode `HOLE`; see `STAYS`.

    Raises:
        ValueError: it is another value of a peer's.
    """
    if payload != HOLE[2]:  # type: ignore[index]
        raise ValueError("it is no tag of a leaf")
    return STAYS


class Rule(NamedTuple):
    """Which differences between a template and the sources are errors.

    Attributes:
        missing: What the sources may not lack: any path of the template (``all``), only
            its ``tensors``, or ``none``, since the template keeps what it has.
        extra: What the template may not lack: ``tensors``, for which it has no memory,
            while other values are added to it; or ``none``, since it gets nothing. With
            ``new``, no difference is an error: a tensor becomes a new one unless the
            template has memory for it, in which nobody else has a part.
    """

    missing: Literal["all", "tensors", "none"]
    extra: Literal["tensors", "none", "new"]

    @property
    def is_whole(self) -> bool:
        """Whether everything is taken that the sources have."""
        return self.extra != "none"

    @property
    def is_near(self) -> bool:
        """Whether no difference is an error."""
        return self.extra == "new"


RECEIVE: Final = Rule(missing="tensors", extra="tensors")
"""Everything is received, and all memory is the template's."""

LOAD: Final = Rule(missing="all", extra="none")
"""The keys of the template are loaded, or the selected ones of them."""

LAX: Final = Rule(missing="none", extra="none")
"""As `LOAD`, as far as the sources have them."""

NEAR: Final = Rule(missing="none", extra="new")
"""Everything is received, and the memory is the template's wherever it fits."""


@dataclass(frozen=True, slots=True)
class Matched:
    """What is taken of the sources, and which memory it goes to.

    Attributes:
        tree: The part of the catalogue's tree that is taken. Its values go into the
            template's containers at the same paths.
        straight: The fills whose bytes go straight to the template's memory.
        copied: The fills whose elements are copied there.
        new: The pieces that become new tensors.
        values: The pieces that other values are made of.
        missing: The wanted paths that the sources or the template lack.
        warnings: How the template differs in addition, for a log.
    """

    tree: Node
    straight: Fills
    copied: Fills
    new: Sequence[int] = ()
    values: Sequence[int] = ()
    missing: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def fills(self) -> Iterator[tuple[int, int]]:
        """Yield the pieces that go to the template, and the tensors that they fill."""
        yield from zip(*self.straight, strict=True)
        yield from zip(*self.copied, strict=True)

    def blobs(self) -> set[int]:
        """Return those of ``values`` that are the bytes of a value."""
        if not len(self.values):
            return set()
        rows = (each.numbers for each in mentions(self.tree) if each.kind == "blob")
        return set().union(*rows)

    def check_meshes(self, catalogue: Catalogue) -> None:
        """Refuse new distributed tensors that this process cannot hold.

        Raises:
            DeviceMeshError: it lacks a process group that one needs.
        """
        if new := {*self.new}:
            found = {
                path: layout
                for path, numbers, layout in catalogue.layouts.all_in(self.tree)
                if not (numbers and new.isdisjoint(numbers))
            }
            check_places(found)


def match(
    catalogue: Catalogue,
    wanted: Wanted | None,
    rule: Rule,
    *,
    select: Select | None = None,
    name: str = "",
) -> Matched:
    """Pair a template with the sources.

    Args:
        catalogue: What the sources hold.
        wanted: The template; None: everything that is selected is new.
        rule: Which differences are errors.
        select: The paths that count; everything else stays as it is on both sides.
        name: The name of the checkpoint, for errors.

    Raises:
        TemplateMismatchError: the template does not fit; the error names the path.
        MissingKeysError: the sources lack paths that the rule or ``select`` asks for,
            or all of the template.
        UnsupportedLeafError: a tensor of the template cannot be filled.
        RemoteProtocolError: the tree of a source is malformed.
    """
    with collector_paused():
        own = wanted or _NO_TEMPLATE
        walk = _Walk(catalogue, own, rule, select)
        with blaming(catalogue.sources):
            tree = walk.tree()
            missing, warnings = walk.checked(name)
        others = [*walk.new, *walk.values]
        if rule.is_near:
            found = catalogue.layouts.all_in(catalogue.tree)
            wholes = [numbers for _, numbers, _ in found]
            straight, copied, made = near(catalogue, own, walk.pairs, others, wholes)
            walk.new.extend(made)
        else:
            straight, copied = dispose(catalogue, own, walk.pairs, others)
    return Matched(tree, straight, copied, walk.new, walk.values, missing, warnings)


class _Differences:
    """What a walk has noted about how a template and the sources differ.

    Attributes:
        found: Whether they have something in common.
        missing: The wanted paths that the sources lack.
        keys: How the keys differ, of the first dict that lacks one.
        empty: The errors for containers that stay empty.
        extra: The path of the first tensor for which the template has no memory.
        detail: How the keys differ where that tensor is.
        unfilled: The path of the first tensor that the sources lack.
    """

    def __init__(self) -> None:
        self.found = False
        self.missing: list[str] = []
        self.keys = ""
        self.empty: list[TemplateMismatchError] = []
        self.extra = self.detail = self.unfilled = ""

    def checked(
        self, rule: Rule, selection: Selection, trees: tuple[Node, Node], name: str
    ) -> tuple[list[str], list[str]]:
        """Return the missing paths and the warnings, unless the rule refuses them.

        Args:
            rule: The rule.
            selection: The paths that count.
            trees: The tree of the template, and that of the sources.
            name: The name of the checkpoint.

        Raises:
            TemplateMismatchError, MissingKeysError: the rule refuses a difference.
        """
        if self.extra:
            more = f", but {self.unfilled}, which the checkpoint lacks"
            actual = "nothing" + more * bool(self.unfilled)
            raise mismatch_of(self.extra, "a tensor", actual, self.detail)
        if self.unfilled:
            raise mismatch_of(self.unfilled, "nothing", "a tensor")
        if rule.is_whole and not self.found:
            some, others = (_nested(items_of(each) or {}) for each in trees)
            detail = how_keys_differ(some, others, "")
            raise mismatch_of("", "other keys", "none of them", detail)
        unmet = selection.unmet()
        missing = [*dict.fromkeys([*self.missing, *unmet])]
        none = bool(self.missing) and not self.found
        if missing and (rule.missing != "none" or none):
            nowhere = {*self.missing}
            nowhere.update(names_without_a_path(unmet, trees[1]))
            if nowhere:
                lost = sorted(nowhere)
                raise MissingKeysError(name, lost, none=none, detail=self.keys)
            raise mismatch_of(unmet[0], "a value", "nothing")
        if self.empty and rule.missing != "none":
            raise self.empty[0]
        return missing, [*filter(None, [self.keys]), *map(str, self.empty)]


class _Walk:
    """Walks the trees of a template and the sources side by side.

    Attributes:
        pairs: The tensors that both have.
        new: The pieces that become new tensors.
        values: The pieces that other values are made of.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        wanted: Wanted,
        rule: Rule,
        select: Select | None,
    ) -> None:
        self.pairs, self.new, self.values = Pairs(), array("q"), array("q")
        self._catalogue, self._wanted, self._rule = catalogue, wanted, rule
        self._selection = Selection(select)
        self._is_whole, self._is_near = rule.is_whole, rule.is_near
        self._types = NodeTypes(wanted, catalogue)
        self._differences = _Differences()
        self._optimizers: set[str] = set()  # the paths of their states
        self._in_leaf = 0  # the depth inside a value that is selected as a whole

    def tree(self) -> Node:
        """Walk the trees; return what is taken."""
        mine, theirs = self._wanted.tree, self._catalogue.tree
        if mine is None:
            self._differences.found = True
            found = self._chosen(theirs, "")
            return ["dict", [], []] if found is HOLE else found
        self._selection.takes("")  # the root always matches
        return self._pair(mine, theirs, "")

    def checked(self, name: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the missing paths and the warnings, unless the rule refuses them."""
        if self._is_near:
            return (), ()
        trees = self._wanted.tree, self._catalogue.tree
        return self._differences.checked(self._rule, self._selection, trees, name)

    # ---------------------------------------------------------------- what both have

    def _pair(self, mine: Node, theirs: Node, path: str) -> Node:
        """Return what is taken at a path that both have."""
        if theirs is HOLE:  # what the template has stays
            self._differences.found = True
            return HOLE
        try:
            return self._fitting(mine, theirs, path)
        except (TemplateMismatchError, UnsupportedLeafError):
            if not self._is_near:
                raise
            return self._taken(theirs)

    def _fitting(self, mine: Node, theirs: Node, path: str) -> Node:
        own, mine = mine, self._plain_of(mine, theirs)
        if self._is_left_empty(mine, theirs, path):
            # What makes the value around it may look at it, so it gets an equal one.
            return _emptied(own, mine) if self._in_leaf else HOLE
        kinds = tag_of(mine), tag_of(theirs)
        is_open = kinds[0] in DICTS or kinds[0] == "list"
        is_empty = self._is_whole and values_of(theirs) == []
        if is_empty or not (is_open and values_of(mine)):
            self._differences.found = True
        if mine is None:
            return self._anew(theirs, path)
        if kinds[0] == "tensor" or is_distributed(mine):
            return self._pair_tensor(mine, theirs, path)
        if kinds[1] == "tensor" or is_distributed(theirs):
            raise self._types.unfit(mine, theirs, path)
        if kinds[0] in DICTS and kinds[1] in DICTS:
            return self._pair_dicts(mine, theirs, path)
        if kinds == ("list", "list"):
            return self._pair_lists(mine, theirs, path)
        if not self._types.is_alike(mine, theirs):
            raise self._types.unfit(mine, theirs, path)
        old, new = structure_of(mine), structure_of(theirs)
        if old and new and old.kind == new.kind and len(old.items) == len(new.items):
            match theirs:
                case ["ext", _, ["tuple", [_, beside]]]:  # a pytree node's context
                    self._taken(beside)
            self._in_leaf += 1
            pairs = enumerate(zip(old.items, new.items, strict=True))
            found = [self._pair(*pair, item(path, at)) for at, pair in pairs]
            self._in_leaf -= 1
            return new.made_of(found)
        if self._is_whole and any(_first_tensor(each, path) for each in (mine, theirs)):
            raise self._types.unfit(mine, theirs, path, lengths=True)
        return self._taken(theirs)

    def _plain_of(self, mine: Any, theirs: Node) -> Node:
        """Return the plain container in a dict or list if theirs is a plain one."""
        plain = (*DICTS, "list")
        if tag_of(mine) != "ext" or tag_of(theirs) not in plain:
            return cast("Node", mine)
        is_structure = mine[1].startswith((NAMED_TUPLE, PYTREE))
        found = self._wanted.plain.get(id(mine), None if is_structure else mine[2])
        return cast("Node", found if tag_of(found) in plain else mine)

    def _pair_tensor(self, mine: Any, theirs: Any, path: str) -> Node:
        """Pair a tensor of the template, which may be distributed."""
        numbers, layout = [mine[1]], None
        if mine[0] != "tensor":
            numbers, layout = self._catalogue.layouts.read((path,), *mine[1:])
        tensors = [*map(self._wanted.tensors.__getitem__, numbers)]
        is_meta = any(tensor.is_meta for tensor in tensors)
        if is_meta and self._is_whole:
            raise UnsupportedLeafError(path, "meta tensor", NO_MEMORY)
        if layout is None and tag_of(theirs) == "tensor":
            pieces = [number_of(theirs, path)]
        elif layout is not None and is_distributed(theirs):
            pieces = self._pieces_of(layout, theirs, path)
        else:
            raise self._types.unfit(mine, theirs, path)
        if is_meta:
            for piece, tensor in zip(pieces, tensors, strict=True):
                check(tensor, self._catalogue.piece(piece), path)
            return self._taken(theirs)
        self._add(path, None, pieces, numbers)
        if layout is not None and not (self._is_whole or self._in_leaf):
            return HOLE  # nothing is made: only its local tensors are filled
        return cast("Node", theirs)

    def _add(
        self,
        path: str,
        names: Sequence[object] | None,
        pieces: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Add tensors that both have."""
        if pieces:
            check_numbers(pieces, len(self._catalogue))
            self._differences.found = True
            self.pairs.add(path, names, pieces, numbers)

    def _pieces_of(self, layout: Layout, theirs: Any, path: str) -> list[int]:
        """Return the pieces of a distributed tensor that fit the template's layout."""
        pieces, other = self._catalogue.layouts.read((path,), theirs[1], theirs[2])
        if self._catalogue.layouts.are_same(layout, other):
            return pieces
        raise mismatch_of(path, str(other), str(layout))

    def _pair_dicts(self, mine: Any, theirs: Any, path: str) -> Node:
        if self._is_row(mine, theirs):
            self._add(path, mine[1], theirs[2], mine[2])
            return cast("Node", theirs)
        raise_if_cancelled()
        left, right = items_of(mine) or {}, items_of(theirs) or {}
        if "param_groups" in right:
            self._optimizers.add(below(path, "state"))
        taken: Items = {}
        row: list[tuple[object, int, int]] = []  # a key, a piece, a tensor
        for key, old in left.items():
            if (pair := self._plain_pair(old, right.get(key), path)) is not None:
                row.append((key, *pair))
                taken[key] = right[key]
                continue
            self._add_row(path, row)
            where = below(path, key)
            if key not in right:
                self._lacks(old, where, path, left, right)
            elif self._is_selected(right[key], where):
                taken[key] = self._pair(old, right[key], where)
        self._add_row(path, row)
        for key, new in right.items() if self._is_whole else ():
            if key not in left:
                taken[key] = self._added(new, below(path, key), path, left, right)
        order = right if self._is_near else taken  # the result is a new dict then
        taken = {key: taken[key] for key in order if taken.get(key, HOLE) is not HOLE}
        beside = self._attributes(mine, theirs, path) if self._is_whole else []
        return self._dict_of(theirs, taken, beside)

    def _attributes(self, mine: Any, theirs: Any, path: str) -> list[Node]:
        """Return what is taken of the attributes of two dicts: none or one node."""
        old, new = (each[3:] if each[0] == "odict" else [] for each in (mine, theirs))
        if new and tag_of(new[0]) not in DICTS:
            raise RemoteProtocolError(f"malformed tree: attributes of {path[:200]}")
        if old and new:
            return [self._pair_dicts(old[0], new[0], path)]
        if old:
            self._note_unfilled(old[0], path)
        return [self._taken(each) for each in new]

    def _is_row(self, mine: Any, theirs: Any) -> bool:
        """Say whether two dicts have the same keys, and ours only plain tensors."""
        if mine[:2] != theirs[:2] or mine[0] != "tensors" or not mine[1]:
            return False
        if not self._selection.everything or {*map(type, theirs[2])} != {int}:
            return False
        plain = None not in map(self._wanted.codes.__getitem__, mine[2])
        return plain and len(theirs[2]) == len(mine[2])

    def _plain_pair(
        self, mine: Node, theirs: Node, path: str
    ) -> tuple[int, int] | None:
        """Return the numbers of two tensors if ours is plain, as most are."""
        if tag_of(mine) != "tensor" or tag_of(theirs) != "tensor":
            return None
        if not (self._in_leaf or self._selection.everything):
            return None
        piece, number = number_of(theirs, path), number_of(mine, path)
        return None if self._wanted.codes[number] is None else (piece, number)

    def _add_row(self, path: str, row: list[tuple[object, int, int]]) -> None:
        """Add the tensors of a row, in the order of the tree; empty the row."""
        if row:
            self._add(path, *zip(*row, strict=True))
            row.clear()

    def _pair_lists(self, mine: Any, theirs: Any, path: str) -> Node:
        old, new = mine[1], theirs[1]
        stay: list[Node] = []  # the items that only the template has
        if self._is_near:
            old = old[: len(new)]
        elif len(old) > len(new) and not self._selects(mine, path, len(new)):
            old, stay = old[: len(new)], [HOLE] * (len(old) - len(new))
        elif len(old) > len(new):
            expected, actual = (f"a list of {len(each)}" for each in (new, old))
            raise mismatch_of(path, expected, actual)
        taken: list[Node] = [HOLE] * len(old)
        for at, (one, other) in enumerate(zip_longest(old, new)):
            where = item(path, at)
            if self._is_whole and at >= len(old):
                left, right = (items_of(each) or {} for each in (mine, theirs))
                taken.append(self._added(other, where, path, left, right))
            elif self._is_selected(other, where):
                # The list grows up to its last selected item only.
                taken += [None] * (at + 1 - len(taken))
                taken[at] = self._pair(one, other, where)
        return ["list", [*taken, *stay]]

    # ------------------------------------------------------------ what only one has

    def _lacks(
        self, old: Node, where: str, path: str, left: Items, right: Items
    ) -> None:
        """Note what the sources lack."""
        if self._is_near:
            return
        match old:
            case ["ext", tag, int(number)] if tag == ODD and self._is_whole:
                value = self._wanted.odd[number]
                if remedy := remedy_for(value):
                    raise unsupported(value, where, remedy)
        if self._is_whole:
            self._note_unfilled(old, where)
        elif lacking := [*self._lacking(old, where)]:
            self._differences.missing += lacking
            if not self._differences.keys:
                self._differences.keys = how_keys_differ(
                    _nested(left), _nested(right), path
                )

    def _note_unfilled(self, old: Node, path: str) -> None:
        """Note the first tensor that the sources lack."""
        if not self._differences.unfilled:
            self._differences.unfilled = _first_tensor(old, path)

    def _added(
        self, new: Node, where: str, path: str, left: Items, right: Items
    ) -> Node:
        """Return a value that the template lacks, and gets; refuse tensors."""
        if self._is_near or not (first := _first_tensor(new, where)):
            return self._taken(new)
        if not self._differences.extra:
            self._differences.extra = first
            self._differences.detail = renamed(_nested(left), _nested(right), path)
        return HOLE

    def _is_left_empty(self, mine: Any, theirs: Any, path: str) -> bool:
        """Say whether a container is empty here, and full there, and stays so."""
        kind = TYPES.get(tag_of(mine) or "")
        if self._is_near or kind is None:
            return False
        if values_of(mine) != [] or not values_of(theirs):
            return False
        dicts = tag_of(mine) in DICTS and tag_of(theirs) in DICTS
        if not (dicts or tag_of(mine) == tag_of(theirs)):
            return False
        if not self._selects(theirs, path):
            return False
        if self._is_whole and not _first_tensor(theirs, path):
            return False
        there = items_of(theirs) or {}
        optimizer, whole = path in self._optimizers, self._is_whole
        error = left_empty(path, kind, there, optimizer=optimizer, whole=whole)
        if whole:
            raise error
        self._differences.empty.append(error)
        return True

    def _lacking(self, node: Node, path: str) -> Iterator[str]:
        """Yield the selected paths at and below one that the sources lack."""
        if self._in_leaf or self._selection.takes(path):
            yield path
        elif (inside := entered(node, path)) is not None:
            for _, each, where in inside:
                yield from self._lacking(each, where)
        elif self._selection.takes_leaf(path):
            yield path

    # ------------------------------------------------------------------ the selection

    def _is_selected(self, theirs: Node, path: str) -> bool:
        if self._in_leaf or self._selection.everything or self._selection.takes(path):
            return True
        if entered(theirs, path) is not None:
            return self._selection.enters(path)
        return self._selection.takes_leaf(path)

    def _selects(self, node: Node, path: str, first: int = 0) -> bool:
        """Say whether something at or below a path is selected.

        Args:
            node: A node of either side.
            path: Its path.
            first: The first item to look at.
        """
        if self._in_leaf or self._selection.takes(path):
            return True
        if (inside := entered(node, path)) is not None:
            rest = islice(inside, first, None)
            return any(self._selects(each, where) for _, each, where in rest)
        return self._selection.takes_leaf(path)

    def _anew(self, theirs: Node, path: str) -> Node:
        """Return the selected part of a value for which the template has None."""
        if self._in_leaf or entered(theirs, path) is None:
            return self._taken(theirs)
        found = self._chosen(theirs, path)
        return None if found is HOLE else found

    def _chosen(self, theirs: Node, path: str) -> Node:
        """Return the selected part of a value, or `HOLE`."""
        if self._selection.takes(path):
            return self._taken(theirs)
        if (inside := entered(theirs, path)) is None:
            return self._taken(theirs) if self._selection.takes_leaf(path) else HOLE
        if not self._selection.enters(path):
            return HOLE
        found = {key: self._chosen(each, where) for key, each, where in inside}
        kept = {key: each for key, each in found.items() if each is not HOLE}
        if not kept:
            return HOLE
        if tag_of(theirs) == "list":
            return ["list", [kept.get(at) for at in range(len(found))]]
        return self._dict_of(theirs, kept)

    def _taken(self, theirs: Node) -> Node:
        """Return a value of the sources as it is; its tensors become new ones."""
        for mention in mentions(theirs) if isinstance(theirs, list) else ():
            check_numbers(mention.numbers, len(self._catalogue))
            (self.new if is_filled(mention) else self.values).extend(mention.numbers)
        return theirs

    def _dict_of(
        self, theirs: Any, taken: Items, beside: list[Node] | None = None
    ) -> Node:
        """Return the node of a dict with some of its items.

        Args:
            theirs: The node of the sources.
            taken: The items.
            beside: The attributes of an OrderedDict; None: those of the sources.
        """
        tag, *rows = theirs
        head: list[Node] = ["dict" if tag == "tensors" else tag]
        if tag == "defaultdict":
            head.append(rows.pop(0))
        known, more = keys_of(theirs), beside
        if more is None:
            more = [self._taken(each) for each in rows[2:]]
        keys = [self._taken(known[key]) for key in taken]
        return [*head, keys, [*taken.values()], *more]


def _emptied(own: Any, mine: Any) -> Node:
    """Return a node of an equal empty container; see `Wanted` for both nodes."""
    match own:
        case ["ext", str(tag), _] if not tag.startswith((NAMED_TUPLE, PYTREE)):
            return ["ext", tag, mine]
        case ["odict", keys, values, _]:  # without its attributes, which stay
            return ["odict", keys, values]
    return cast("Node", own)


def names_without_a_path(names: list[str], tree: Node) -> list[str]:
    """Return those of some names that no path of a tree has."""
    selection, waiting = Selection(names), [(tree, "")]
    while names and waiting:
        node, path = waiting.pop()
        if not selection.takes(path):
            inside = entered(node, path)
            waiting += ((each, where) for _, each, where in inside or ())
    return selection.unmet()


def _nested(items: Items) -> dict[Any, Any]:
    """Return items whose containers are dicts, so that an error can look into them."""
    return {
        key: _nested(inside) if (inside := items_of(node)) is not None else None
        for key, node in items.items()
    }


def _first_tensor(node: Node, path: str) -> str:
    """Return the path of the first tensor of the state dict at or below a path."""
    for mention in mentions(node) if isinstance(node, list) else ():
        if is_filled(mention) and len(mention.numbers):
            last = () if mention.names is None else mention.names[:1]
            for step in (*mention.path, *last):
                is_int = isinstance(step, int)
                path = item(path, step) if is_int else below(path, step)  # type: ignore[arg-type]
            return path
    return ""
