"""Unites what several ranks saved to what this rank needs.

Each source has a tree: the file of a rank, or one of the files of another tool. `unite`
walks these trees beside that of the template. The result is one tree, as if one source
had saved everything for the mesh of the template:

* A distributed tensor has the layout of the template. Its local tensors are put
  together from *boxes* of the sources' pieces (see `aiockpt.state.mesh`). They are the
  entries of one more data segment, which lies in no file.
* Where the template has no distributed tensor, there is the full tensor.
* Any other value is this rank's own if as many ranks load as saved. Otherwise the
  sources must agree about it, because none of several values may be chosen silently.

What is whole in one source stays a piece of that source. Nothing is read here. Values
that consist of tensors agree if their bytes do, so the caller compares these bytes, and
calls `unite` again if any differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from aiockpt.errors import (
    DeviceMeshError,
    RankValuesError,
    RemoteProtocolError,
    TemplateMismatchError,
)
from aiockpt.format.limits import Limits, raise_if_cancelled
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Node
from aiockpt.format.references import check_numbers, mentions, renumber
from aiockpt.runtime.system import collector_paused
from aiockpt.state.catalogue import Catalogue, Piece
from aiockpt.state.composing import (
    BoxCopy,
    Composer,
    SourceLayouts,
    SourceShards,
    dtype_of,
)
from aiockpt.state.dotted import renested
from aiockpt.state.flatten import Wanted
from aiockpt.state.mesh import ShardRuns, whole
from aiockpt.state.selection import Select, Selection, below, item
from aiockpt.state.sharding import DTensorLayout, Layout
from aiockpt.state.trees import (
    DICTS,
    HOLE,
    blaming,
    has_distributed,
    is_distributed,
    items_of,
    keys_of,
    number_of,
    structure_of,
    tag_of,
    values_of,
)
from aiockpt.transport import whole_number

RankValues: TypeAlias = Literal["error", "keep"] | int
"""Which value is taken of those that differ by rank: none, the template's, a rank's."""


def check_rank_values(rank_values: RankValues) -> RankValues:
    """Return ``rank_values`` if it is one of its values.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(rank_values, str):
        if rank_values not in ("error", "keep"):
            said = f"'error', 'keep' or a rank, not {rank_values!r}"
            raise ValueError(f"rank_values is {said}")
    elif (rank_values := whole_number(rank_values, "rank_values")) < 0:
        raise ValueError(f"rank_values must be a rank, got {rank_values}")
    return rank_values


Claim: TypeAlias = tuple[int, ...]
"""The numbers of pieces, of different sources, that must have the same elements."""

_NEW: Final[Any] = ["new"]  # no template: the value is made
_SKIPPED: Final[Any] = ["skipped"]  # the template lacks the path

# How much is decided about a value by what it is in; each includes those before it.
_ASKED: Final = 0  # nothing: the selection is asked for its path
_CHOSEN: Final = 1  # everything at and below its path is selected
_IN_STRUCTURE: Final = 2  # it is an item of a value that is made of all of its items
_IN_LEAF: Final = 3  # it is a part of a registered leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a rank takes from several sources.

    Attributes:
        own: The number of this rank's own source; None if another number of ranks
            loads the checkpoint than saved it.
        is_foreign: Whether another tool has saved it. Then dotted names count, and None
            in a list stands for what another source has.
        rank_values: Which value is taken of those that differ by rank.
        distributed: What a distributed tensor becomes for which the template has no
            place: the ``full`` tensor; the ``local`` tensors of a source; or this
            rank's part on the ``mesh`` that saved it, if that is possible.
        prefer: A number of this rank's own, by which ranks spread over replicas.
        select: The selected paths; everything else is taken as it is in any source.
        name: The name of the checkpoint, for errors.
    """

    own: int | None = None
    is_foreign: bool = False
    rank_values: RankValues = "error"
    distributed: Literal["full", "local", "mesh"] = "full"
    prefer: int = 0
    select: Select | None = None
    name: str = ""


@dataclass(slots=True)
class United:
    """One tree of several sources, and the data segment of its new pieces.

    Attributes:
        tree: The tree. Its numbers are those of the pieces of all sources, one source
            after the other; then come those of ``manifest``.
        manifest: Describes the data segment of the pieces that are put together.
        pieces: These pieces.
        copies: For each of them, the boxes that bring all of its elements.
        paths: For each of them, the first path that has it.
        name: The name of the checkpoint, for errors.
        claims: Pieces that the tree takes for equal, which only their bytes can tell,
            and the path of each.
    """

    tree: Node
    manifest: Manifest
    pieces: Sequence[Piece]
    copies: Sequence[Sequence[BoxCopy]]
    paths: Sequence[str]
    name: str
    claims: Mapping[Claim, str] = field(default_factory=dict)


def unite(
    sources: Sequence[Manifest],
    wanted: Wanted | None,
    policy: Policy,
    *,
    limits: Limits,
    known: Mapping[Claim, bool],
) -> United:
    """Unite the trees of several sources, as this rank needs it.

    Args:
        sources: The manifest of each source.
        wanted: The template; None: everything is new.
        policy: What is taken.
        limits: Bound the layouts of distributed tensors.
        known: Whether the claims of a former call hold.

    Raises:
        RankValuesError: the sources have different values at a path.
        TemplateMismatchError: a distributed tensor has another global shape in the
            template; or it is a partial one.
        DeviceMeshError: the template has no place for a distributed tensor, and this
            process has no equal mesh.
        StorageError: the sources lack elements of a distributed tensor, or do not fit
            each other.
        RemoteProtocolError: the tree of a source is malformed.
    """
    with collector_paused():
        walk = _Union(sources, wanted, policy, limits, known)
        with blaming(sources):
            tree = walk.tree()
        found = walk.result(tree)
        if found.claims.keys() <= known.keys():  # or more values may differ
            walk.check_values()
        return found


_Nodes: TypeAlias = list[tuple[int, Node]]
"""Sources, and what each of them has at a path."""


class _AtPath(NamedTuple):
    """What the sources and the template have at a path.

    Attributes:
        nodes: The sources that have the path, and their nodes.
        mine: The node of the template, or `_NEW`, or `_SKIPPED`.
        path: The path.
        decided: How much is decided about the value: `_ASKED`, and what follows there.
    """

    nodes: _Nodes
    mine: Any
    path: str
    decided: int

    @property
    def is_new(self) -> bool:
        """Whether the value is made, since the template has no other one."""
        return self.mine is _NEW or self.mine is None


class _Claims:
    """Which pieces are taken for equal; only their bytes tell whether they are.

    Args:
        catalogue: What the sources hold.
        known: Whether the claims of a former call hold.

    Attributes:
        paths: All claims, with the path of each.
    """

    def __init__(self, catalogue: Catalogue, known: Mapping[Claim, bool]) -> None:
        self.paths: dict[Claim, str] = {}
        self._catalogue, self._known = catalogue, known

    def hold(self, claims: Sequence[Claim], path: str) -> bool:
        """Note claims; say whether all of them hold, as far as is known."""
        return all([self._holds(claim, path) for claim in claims])  # noqa: C419 - all are noted

    def _holds(self, claim: Claim, path: str) -> bool:
        if len({*claim}) == 1:
            return True
        pieces = [*map(self._catalogue.piece, claim)]
        if len({(each.dtype, each.shape) for each in pieces}) > 1:
            return False
        if pieces[0].start == pieces[0].stop:
            return True
        self.paths[claim] = path
        return self._known.get(claim, True)

    def agree(self, nodes: _Nodes, path: str) -> bool:
        """Say whether all sources have the same value, as far as is known."""
        rows = [self._outline(*each, path) for each in nodes]
        if len({text for text, _ in rows}) > 1:
            return False
        return self.hold([*zip(*(numbers for _, numbers in rows), strict=True)], path)

    def _outline(self, source: int, node: Node, path: str) -> tuple[bytes, list[int]]:
        """Return a value without the numbers of its pieces, and these numbers."""
        some = mentions(node) if isinstance(node, list) else ()
        numbers = [*dict.fromkeys(chain.from_iterable(each.numbers for each in some))]
        every = self._catalogue.numbers_of(source)
        if numbers:
            check_numbers(numbers, len(every))
        try:
            node = deepcopy(node)
            order = {number: at for at, number in enumerate(numbers)}
            renumber(node, order)  # type: ignore[arg-type]
            return msgspec.json.encode(node), [every[each] for each in numbers]
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"malformed tree at {path[:200]}") from error


class _Union:
    """Walks the trees of all sources side by side."""

    def __init__(
        self,
        sources: Sequence[Manifest],
        wanted: Wanted | None,
        policy: Policy,
        limits: Limits,
        known: Mapping[Claim, bool],
    ) -> None:
        self._wanted, self._policy = wanted, policy
        self._catalogue = Catalogue(sources, limits=limits, tree=["dict", [], []])
        self._selection = Selection(policy.select)
        self._layouts = SourceLayouts(self._catalogue, policy.name)
        self._composer = Composer(self._catalogue, policy.name, policy.prefer)
        self._claims = _Claims(self._catalogue, known)
        self._differ: list[str] = []  # the paths of values that differ by rank
        # What was taken for a memory that the template has twice.
        self._ties: dict[object, tuple[_Nodes, Node]] = {}
        # Tied tensors that the sources lack, and the keys and values of their dicts.
        self._absent: list[tuple[object, list[Node], Node, list[Node]]] = []

    def tree(self) -> Node:
        """Return the tree, with the numbers that the pieces have so far."""
        mine = _NEW if self._wanted is None else self._wanted.tree
        trees = [each.tree for each in self._catalogue.sources]
        if self._policy.is_foreign and self._wanted is not None:
            trees = [renested(each, self._wanted.tree) for each in trees]
        decided = _CHOSEN if self._selection.everything else _ASKED
        tree = self._unite([*enumerate(trees)], mine, "", decided)
        for tie, named, key, values in self._absent:
            if tie in self._ties:
                named.append(key)
                values.append(deepcopy(self._ties[tie][1]))
        return tree

    def result(self, tree: Node) -> United:
        """Return the tree, and the data segment of its new pieces."""
        made = self._composer
        manifest, numbers = made.segment()
        if numbers != [*range(len(numbers))]:
            renumber(tree, numbers)
        new = made.pieces, made.copies, made.paths
        return United(tree, manifest, *new, self._policy.name, self._claims.paths)

    def check_values(self) -> None:
        """Refuse values that differ by rank.

        Raises:
            RankValuesError: there are some.
        """
        if self._differ:
            kept = self._policy.rank_values == "keep"
            raise RankValuesError(self._policy.name, self._differ, kept=kept)

    # ----------------------------------------------------------------------- the walk

    def _unite(self, nodes: _Nodes, mine: Any, path: str, decided: int) -> Node:
        """Return what the result has at a path; see `_AtPath` for the arguments."""
        raise_if_cancelled()
        if self._policy.is_foreign:
            nodes = [each for each in nodes if each[1] is not None] or nodes[:1]
        kinds = {tag_of(each) for _, each in nodes}
        if mine is not _SKIPPED and not decided:
            if self._selection.takes(path):
                decided = _CHOSEN
            elif not self._selects(kinds, path):
                mine = _SKIPPED
        if mine is _SKIPPED:
            return self._catalogue.moved(*nodes[0])
        mine = self._plain(mine)
        tie = self._tie_of(mine)
        if tie is not None and tie in self._ties:
            first, node = self._ties[tie]
            if self._are_equal(first, nodes, path):
                return deepcopy(node)
        found = self._taken(_AtPath(nodes, mine, path, decided), kinds)
        if tie is not None and found is not HOLE:
            self._ties.setdefault(tie, (nodes, found))
        return found

    def _taken(self, at: _AtPath, kinds: set[str | None]) -> Node:
        """Return what is taken at a path that counts; ``kinds`` are the tags there."""
        if kinds <= DICTS:
            return self._dicts(at)
        if kinds == {"list"}:
            return self._lists(at)
        if all(is_distributed(each) for _, each in at.nodes):
            return self._distributed(at)
        if is_distributed(at.mine) and kinds == {"tensor"}:
            return self._cut(at)
        if (tag := _leaf_of(at.nodes)) is not None:
            # The leaf is made anew, so nothing of the template counts.
            payloads = [(source, node[2]) for source, node in at.nodes]  # type: ignore[index]
            return ["ext", tag, self._unite(payloads, _NEW, at.path, _IN_LEAF)]
        if (made_of := _structure_of_all(at)) is not None:
            count = len(_items_in(at.nodes[0][1]) or ())
            if len(_items_in(at.mine) or ()) != count:
                # The matcher takes the other one, with all of its items.
                at = at._replace(mine=_NEW)
            at = at._replace(decided=max(at.decided, _IN_STRUCTURE))
            return made_of(self._items(at, count))
        return self._value(at)

    def _selects(self, kinds: set[str | None], path: str) -> bool:
        """Say whether a path, or something below it, may be selected."""
        if kinds <= DICTS or kinds == {"list"}:
            return self._selection.enters(path)
        return self._selection.takes_leaf(path)

    def _plain(self, mine: Any) -> Any:
        """Return the plain container in a dict or list of a registered type."""
        if tag_of(mine) != "ext" or self._wanted is None or is_distributed(mine):
            return mine
        if structure_of(mine) is not None:
            return self._wanted.plain.get(id(mine), mine)
        found = self._wanted.plain.get(id(mine), mine[2])
        return found if tag_of(found) in (*DICTS, "list") else mine

    def _dicts(self, at: _AtPath) -> Node:
        rows = [(source, items_of(node) or {}) for source, node in at.nodes]
        keys: dict[object, Node] = {}
        for _, node in reversed(at.nodes):
            keys.update(keys_of(node))
        order = dict.fromkeys(chain.from_iterable(items for _, items in rows))
        old = items_of(at.mine) if tag_of(at.mine) in DICTS else None
        other = _NEW if at.is_new else _SKIPPED
        values: list[Node] = []
        for key in order:
            some = [(source, items[key]) for source, items in rows if key in items]
            mine = other if old is None else old.get(key, _SKIPPED)
            values.append(self._unite(some, mine, below(at.path, key), at.decided))
        named = [*map(keys.__getitem__, order)]
        for key, node in (old or {}).items() if self._policy.is_foreign else ():
            if key not in order and (tie := self._tie_of(node)) is not None:
                self._absent.append((tie, named, keys_of(at.mine)[key], values))
        frames = [(source, _frame(node)) for source, node in at.nodes]
        chosen = self._chosen(frames, at.path)
        if chosen is None and other is _NEW:  # else it stays that of the template
            self._differ.append(at.path)
        made: Any = self._catalogue.moved(*(frames[0] if chosen is None else chosen))
        if made[0] == "defaultdict":
            return [*made[:2], named, values]
        return [made[0], named, values, *made[3:]]

    def _lists(self, at: _AtPath) -> Node:
        sizes = {len(values_of(each) or ()) for _, each in at.nodes}
        chosen = at.nodes[0] if len(sizes) == 1 else self._chosen(at.nodes, at.path)
        if chosen is None:
            return self._differing(at)
        return ["list", self._items(at, len(values_of(chosen[1]) or ()))]

    def _items(self, at: _AtPath, count: int) -> list[Node]:
        """Return the items of lists or structures, as many as one of them has."""
        rows = [(source, _items_in(node) or {}) for source, node in at.nodes]
        old = _items_in(at.mine)
        other = _NEW if at.is_new else _SKIPPED
        found = []
        for n in range(count):
            some = [(source, items[n]) for source, items in rows if n in items]
            mine = other if old is None else old.get(n, _SKIPPED)
            found.append(self._unite(some, mine, item(at.path, n), at.decided))
        return found

    # ------------------------------------------------------- ties of other tools' files

    def _tie_of(self, mine: Any) -> object:
        """Return what is equal for tensors of the template with the same memory.

        None: nothing shares this memory, or ours wrote the sources, which have ties.
        Other tools write tied tensors twice, or under one name only.
        """
        own = self._wanted
        if own is None or not self._policy.is_foreign:
            return None
        if tag_of(mine) == "tensor":
            numbers, layout = [number_of(mine, "")], None
        elif is_distributed(mine):
            numbers, layout = self._catalogue.layouts.read((), *mine[1:])
        else:
            return None
        tensors = [own.tensors[each] for each in numbers]
        if not all(own.sizes[each] for each in numbers):
            return None
        memory = [(own.held.addresses[each], own.shapes[each]) for each in numbers]
        return (*memory, *(each.dtype for each in tensors), id(layout))

    def _are_equal(self, first: _Nodes, nodes: _Nodes, path: str) -> bool:
        """Say whether sources have equal tensors at two paths, as far as is known."""
        one, other = self._elements_of(first, path), self._elements_of(nodes, path)
        if not one or one.keys() != other.keys():
            return False
        return self._claims.hold([(one[shard], other[shard]) for shard in one], path)

    def _elements_of(self, nodes: _Nodes, path: str) -> dict[ShardRuns, int]:
        """Return the pieces of a tensor by what they hold; none of another value."""
        found: dict[ShardRuns, int] = {}
        for source, node in nodes:
            if is_distributed(node):
                row = self._layouts.read(source, node, path)
                found |= zip(self._layouts.of_pieces(row), row.numbers, strict=True)
            elif tag_of(node) == "tensor":
                first = self._catalogue.numbers_of(source).start
                number = first + number_of(node, path)
                found[whole(self._catalogue.piece(number).shape)] = number
        return found

    # -------------------------------------------------------------------- any values

    def _value(self, at: _AtPath) -> Node:
        """Return the value at a path that is no distributed tensor."""
        chosen = self._chosen(at.nodes, at.path)
        return self._differing(at) if chosen is None else self._catalogue.moved(*chosen)

    def _differing(self, at: _AtPath) -> Node:
        """Return what is taken of values that differ by rank; note the path."""
        stays = self._policy.rank_values == "keep" and at.mine is not _NEW
        if stays and at.decided < _IN_STRUCTURE:
            return HOLE
        self._differ.append(at.path)
        return self._catalogue.moved(*at.nodes[0])

    def _chosen(self, nodes: _Nodes, path: str) -> tuple[int, Node] | None:
        """Return the source that is taken, and its value; None if values differ."""
        for first in (self._policy.own, self._policy.rank_values):
            for each in nodes:
                if each[0] == first:
                    return each
        if len(nodes) == 1 or self._claims.agree(nodes, path):
            return nodes[self._policy.prefer % len(nodes)]
        return None

    # ------------------------------------------------------------ distributed tensors

    def _distributed(self, at: _AtPath) -> Node:
        """Return a tensor that is distributed over the sources."""
        every = [self._layouts.read(*each, at.path) for each in at.nodes]
        rows, agree = self._of_one_tensor(every, at.path)
        if not agree:
            return self._differing(at)
        if is_distributed(at.mine):
            numbers, layout = self._catalogue.layouts.read((at.path,), *at.mine[1:])
            own = [row for row in rows if row.source == self._policy.own]
            for row in (*own, *rows):
                if self._catalogue.layouts.are_same(layout, row.layout):
                    return self._catalogue.moved(row.source, dict(at.nodes)[row.source])
            if self._policy.distributed == "local":
                return self._catalogue.moved(*at.nodes[0])  # the matcher refuses it
            self._layouts.check(layout, rows, at.path)
            shards = self._wanted_shards(numbers, layout)
            made = [self._composed(rows, shard, at.path) for shard in shards]
            return _renumbered(at.mine, made)
        if not at.is_new and tag_of(at.mine) != "tensor":
            return self._catalogue.moved(*at.nodes[0])  # the matcher refuses it
        return self._without_place(at, rows)

    def _without_place(self, at: _AtPath, rows: Sequence[SourceShards]) -> Node:
        """Return a tensor that is not distributed in the result, if possible."""
        policy, nodes, layout = self._policy, at.nodes, rows[0].layout
        if policy.distributed == "local":
            row = self._layouts.read(*nodes[0], at.path)
            found: list[Node] = [["tensor", number] for number in row.numbers]
            return found[0] if len(found) == 1 else ["list", found]
        if policy.distributed == "mesh" and at.is_new:
            for source, node in nodes:
                if source == policy.own:
                    return self._catalogue.moved(source, node)
            detail = (
                "the template has no place for it, and another number of ranks saved "
                "it; pass full=True to load the full tensor"
            )
            detail += "" if at.decided == _IN_LEAF else ", or put a tensor there"
            raise DeviceMeshError(f"{layout}", detail, path=at.path)
        self._layouts.check(None, rows, at.path)
        full = whole(layout.shape)
        return ["tensor", self._composed(rows, full, at.path, flags=layout.flags)]

    def _of_one_tensor(
        self, rows: list[SourceShards], path: str
    ) -> tuple[list[SourceShards], bool]:
        """Return the sources of one tensor, and whether they agree about it.

        On one mesh, equal shards are replicas. Those on another mesh, as of another
        stage of a pipeline, may be of another tensor of this name.
        """
        meshes = [row.mesh for row in rows]
        if len({id(each) for each in meshes}) == 1 or len({*meshes}) == 1:
            return rows, True
        for first in (self._policy.own, self._policy.rank_values):
            for row in rows:
                if row.source == first:
                    return [each for each in rows if each.mesh == row.mesh], True
        holders: dict[ShardRuns, dict[object, int]] = {}
        for row in rows:
            shards = self._layouts.of_pieces(row)
            for number, shard in zip(row.numbers, shards, strict=True):
                holders.setdefault(shard, {}).setdefault(row.mesh, number)
        agree = True
        for by_mesh in holders.values():
            if len(by_mesh) != len({*meshes}):
                return rows, False
            agree = self._claims.hold([(*by_mesh.values(),)], path) and agree
        return rows, agree

    def _cut(self, at: _AtPath) -> Node:
        """Return the template's part of a tensor that is whole in a source."""
        chosen = self._chosen(at.nodes, at.path)
        if chosen is None:
            return self._differing(at)
        source, node = chosen
        number = self._catalogue.numbers_of(source).start + number_of(node, at.path)
        piece = self._catalogue.piece(number)
        numbers, layout = self._catalogue.layouts.read((at.path,), *at.mine[1:])
        if layout.shape != piece.shape:
            expected = f"{piece.dtype} {[*piece.shape]}"
            raise TemplateMismatchError(at.path, expected=expected, actual=f"{layout}")
        full = (whole(piece.shape),)
        made = [
            self._composer.composed([number], full, shard, at.path)
            for shard in self._wanted_shards(numbers, layout)
        ]
        return _renumbered(at.mine, made)

    def _wanted_shards(self, numbers: Sequence[int], layout: Layout) -> list[ShardRuns]:
        """Return what each local tensor of a distributed one of the template holds."""
        assert self._wanted is not None
        sizes = [self._wanted.shapes[number] for number in numbers]
        return self._layouts.shards_of(layout, sizes)

    def _composed(
        self, rows: Sequence[SourceShards], shard: ShardRuns, path: str, flags: int = 0
    ) -> int:
        """Return the number of a piece with these elements of a distributed tensor."""
        pieces, shards = self._layouts.held_by(rows, path)
        dtype = dtype_of(rows[0].layout)
        return self._composer.composed(
            pieces, shards, shard, path, flags=flags, dtype=dtype
        )


def _frame(node: Any) -> Node:
    """Return a dict's node without its items."""
    tag, *more = node
    if tag == "defaultdict":
        return [tag, more[0], [], []]
    return ["dict" if tag == "tensors" else tag, [], [], *more[2:]]


def _items_in(node: Any) -> dict[object, Node] | None:
    """Return the items of a container or structure; None for another node."""
    found = structure_of(node)
    return items_of(node) if found is None else dict(enumerate(found.items))


def _structure_of_all(at: _AtPath) -> Callable[[list[Node]], Node] | None:
    """Return how to make a structure with distributed tensors of its items."""
    found = [structure_of(node) for _, node in at.nodes]
    first, nodes = found[0], [at.mine, *(node for _, node in at.nodes)]
    alike = {each and (each.kind, len(each.items)) for each in found}
    if first is None or len(alike) > 1:
        return None
    frames = {msgspec.json.encode(each.made_of([])) for each in found if each}
    if len(frames) > 1:
        return None
    return first.made_of if any(map(has_distributed, nodes)) else None


def _leaf_of(nodes: _Nodes) -> str | None:
    """Return the tag of a registered leaf that has distributed tensors."""
    some: list[Any] = [node for _, node in nodes]
    if {*map(tag_of, some)} != {"ext"} or any(map(structure_of, some)):
        return None
    first, *others = {node[1] for node in some}
    inner = any(has_distributed(node[2]) for node in some)
    return first if inner and not others else None


def _renumbered(node: Any, numbers: Sequence[int]) -> Node:
    """Return a distributed tensor of the template with other local tensors."""
    tag, (kind, items) = node[1], node[2]
    found: list[Node] = [["tensor", number] for number in numbers]
    held: Node = found[0] if tag == DTensorLayout.tag else ["tuple", found]
    return ["ext", tag, [kind, [held, *items[1:]]]]
