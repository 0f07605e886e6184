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

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

import msgspec

from aiockpt.errors import (
    AiockptError,
    DeviceMeshError,
    RankValuesError,
    RemoteProtocolError,
    StorageError,
    TemplateMismatchError,
)
from aiockpt.format.dtypes import DTYPES, itemsize, torch_name
from aiockpt.format.entries import Entries, Entry
from aiockpt.format.limits import Limits, raise_if_cancelled
from aiockpt.format.manifest import CONJ, NEG, Manifest, TensorSpec, dense_stride
from aiockpt.format.paths import Node
from aiockpt.format.references import check_numbers, mentions, renumber
from aiockpt.format.tree import fault_of
from aiockpt.runtime.system import collector_paused, is_callers
from aiockpt.state.catalogue import Catalogue, Piece
from aiockpt.state.dotted import renested
from aiockpt.state.flatten import Wanted
from aiockpt.state.mesh import (
    Box,
    ShardRuns,
    apart,
    block,
    cover,
    shape_of,
    shard_of,
    whole,
)
from aiockpt.state.selection import Select, Selection, below, item
from aiockpt.state.sharding import (
    DTensorLayout,
    Layout,
    Partial,
    ShardedLayout,
)
from aiockpt.state.trees import (
    DICTS,
    HOLE,
    has_distributed,
    is_distributed,
    items_of,
    keys_of,
    number_of,
    structure_of,
    tag_of,
    values_of,
)

__all__ = ["BoxCopy", "Policy", "RankValues", "United", "unite"]

RankValues: TypeAlias = Literal["error", "keep"] | int
"""Which value is taken of those that differ by rank: none, the template's, a rank's."""

Claim: TypeAlias = tuple[int, ...]
"""The numbers of pieces, of different sources, that must have the same elements."""

_PARTIAL: Final = "redistribute partial tensors before the save"
_LAZY: Final = CONJ | NEG  # the flags that change elements
_ALIGN: Final = 64  # bytes, at least those of any element
_NEW: Final[Any] = ["new"]  # no template: the value is made
_SKIPPED: Final[Any] = ["skipped"]  # the template lacks the path


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a rank takes of several sources.

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


class BoxCopy(NamedTuple):
    """A box of a source's piece that a new piece needs.

    Attributes:
        piece: The piece.
        number: Its number in the source.
        box: The elements; ``mine`` is where they are in the new piece.
    """

    piece: Piece
    number: int
    box: Box


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
        try:
            tree = walk.united()
        except RecursionError:
            raise RemoteProtocolError("the tree is nested too deeply") from None
        except AiockptError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if is_callers(error):  # such as one of select=
                raise
            if any(why := fault_of(each.tree) for each in sources):
                raise RemoteProtocolError(why) from error
            raise
        found = walk.result(tree)
        if found.claims.keys() <= known.keys():  # or more values may differ
            walk.check_values()
        return found


_Holder: TypeAlias = tuple[int, list[int], Layout]
"""A source, its pieces of a distributed tensor, and the layout."""

Held: TypeAlias = list[tuple[int, Node]]
"""Sources, and what each of them has at a path."""


class _Holdings(NamedTuple):
    """What the sources have of a distributed tensor; many tensors have the same.

    Attributes:
        places: The positions of the pieces that have elements.
        shards: What each of these has of the full tensor.
    """

    places: Sequence[int]
    shards: tuple[ShardRuns, ...]


class _Recipe(NamedTuple):
    """How a shard is put together from others, wherever they lie.

    Attributes:
        shape: The shape of the local tensor.
        are_apart: Whether no two different shards have an element in common.
        parts: The positions of the shards that it takes, and the boxes of each.
        missing: How many elements no shard has.
    """

    shape: tuple[int, ...]
    are_apart: bool
    parts: Sequence[tuple[int, Sequence[Box]]]
    missing: int

    @classmethod
    def of(
        cls, shards: tuple[ShardRuns, ...], mine: ShardRuns, *, prefer: int
    ) -> _Recipe:
        """Return the recipe of ``mine``.

        Raises:
            ValueError: there are more runs or boxes than any real mesh makes.
        """
        are_apart = apart(shards)
        return cls(shape_of(mine), are_apart, *cover(mine, shards, prefer))


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
        self._sources, self._wanted, self._policy = sources, wanted, policy
        self._catalogue = Catalogue(sources, limits=limits, tree=["dict", [], []])
        self._selection = Selection(policy.select)
        self._known = known
        self._claims: dict[Claim, str] = {}
        self._differ: list[str] = []
        self._pieces: list[Piece] = []
        self._copies: list[list[BoxCopy]] = []
        self._paths: list[str] = []
        self._stop = 0  # of the last entry
        self._entries: dict[object, int] = {}  # the number in `_pieces` of a memory
        self._refs: list[tuple[int, int]] = []  # such a number, and flags
        self._made: dict[object, int] = {}  # the number of a tensor
        self._in_structure = 0  # the depth; it is made of all of its items
        self._in_leaf = 0  # the depth in a registered leaf
        # What was taken for a memory that the template has twice.
        self._ties: dict[object, tuple[Held, Node]] = {}
        self._absent: list[tuple[object, list[Node], Node, list[Node]]] = []
        self._shards: dict[int, ShardRuns | None] = {}  # by the id of a layout
        self._fit: set[tuple[int, ...]] = set()  # the ids of layouts of one tensor
        self._firsts = [
            self._catalogue.numbers_of(n).start for n in range(len(sources))
        ]
        self._counts = [each.tensor_count for each in sources]
        self._homes: dict[Piece, int] = {}
        self._held: dict[object, _Holdings] = {}  # by layouts, and the shapes of pieces
        self._piece = cache(self._catalogue.piece)
        self._recipe = cache(partial(_Recipe.of, prefer=policy.prefer))

    def united(self) -> Node:
        """Return the tree."""
        mine = _NEW if self._wanted is None else self._wanted.tree
        trees = [each.tree for each in self._sources]
        if self._policy.is_foreign and self._wanted is not None:
            trees = [renested(each, self._wanted.tree) for each in trees]
        held: Held = [*enumerate(trees)]
        tree = self._unite(held, mine, "", chosen=self._selection.everything)
        for tie, named, key, values in self._absent:
            if tie in self._ties:
                named.append(key)
                values.append(deepcopy(self._ties[tie][1]))
        return tree

    def check_values(self) -> None:
        """Refuse values that differ by rank.

        Raises:
            RankValuesError: there are some.
        """
        if self._differ:
            kept = self._policy.rank_values == "keep"
            raise RankValuesError(self._policy.name, self._differ, kept=kept)

    def result(self, tree: Node) -> United:
        """Return the tree, and the data segment of its new pieces."""
        views: list[TensorSpec] = []
        found: dict[str, Entry] = {}
        for entry, piece in enumerate(self._pieces):
            nbytes, offsets = piece.stop - piece.start, (piece.start, piece.stop)
            code = DTYPES[piece.dtype][1]
            shape = piece.shape if code else (nbytes,)
            found[f"{entry}"] = Entry(code or "U8", shape, offsets)
        first, count = len(self._catalogue), len(self._pieces)
        numbers = [*range(first)]
        for entry, flags in self._refs:
            piece = self._pieces[entry]
            if DTYPES[piece.dtype][1] and not flags:
                numbers.append(first + entry)
            else:  # only a view has a dtype without a code, or flags
                numbers.append(first + count + len(views))
                facts = piece.dtype, piece.shape, piece.stride, 0, flags
                views.append(TensorSpec(entry, *facts))
        if numbers != [*range(first + count)]:
            renumber(tree, numbers)
        entries = Entries.of(found)
        manifest = Manifest(
            step=0,
            snapshot_id="",
            chunk_bytes=max(entries.nbytes, 1),
            algorithm="",
            digests=(),
            entries=entries,
            views=(*views,),
            tree=None,
            header=b"",
            header_bytes=0,
        )
        return United(
            tree,
            manifest,
            self._pieces,
            self._copies,
            self._paths,
            self._policy.name,
            self._claims,
        )

    # ----------------------------------------------------------------------- the walk

    def _unite(self, held: Held, mine: Any, path: str, *, chosen: bool) -> Node:
        """Return what the result has at a path.

        Args:
            held: The sources that have the path.
            mine: What the template has there, or `_NEW`, or `_SKIPPED`.
            path: The path.
            chosen: Whether everything at and below the path is selected.
        """
        raise_if_cancelled()
        if self._policy.is_foreign:
            held = [each for each in held if each[1] is not None] or held[:1]
        kinds = {tag_of(each) for _, each in held}
        if mine is not _SKIPPED and not chosen:
            chosen = self._selection.takes(path)
            mine = mine if chosen or self._selects(kinds, path) else _SKIPPED
        if mine is _SKIPPED:
            return self._moved(*held[0])
        mine = self._plain(mine)
        tie = self._tie_of(mine)
        if tie is not None and tie in self._ties:
            first, node = self._ties[tie]
            if self._are_equal(first, held, path):
                return deepcopy(node)
        found = self._taken(held, mine, path, kinds, chosen=chosen)
        if tie is not None and found is not HOLE:
            self._ties.setdefault(tie, (held, found))
        return found

    def _taken(
        self,
        held: Held,
        mine: Any,
        path: str,
        kinds: set[str | None],
        *,
        chosen: bool,
    ) -> Node:
        """Return what is taken at a path that counts; ``kinds`` are the tags there."""
        if kinds <= DICTS:
            return self._dicts(held, mine, path, chosen=chosen)
        if kinds == {"list"}:
            return self._lists(held, mine, path, chosen=chosen)
        if all(is_distributed(each) for _, each in held):
            return self._distributed(held, mine, path)
        if is_distributed(mine) and kinds == {"tensor"}:
            return self._cut(held, mine, path)
        if (tag := self._leaf(held)) is not None:
            return ["ext", tag, self._payload(held, path)]
        if (made_of := self._structure(held, mine)) is not None:
            self._in_structure += 1
            count = len(_inside(held[0][1]))
            if len(_items_in(mine) or ()) != count:
                mine = _NEW  # the matcher takes the other one, with all of its items
            found = self._items(held, mine, path, count, chosen=True)
            self._in_structure -= 1
            return made_of(found)
        return self._value(held, mine, path)

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

    def _dicts(self, held: Held, mine: Any, path: str, *, chosen: bool) -> Node:
        rows = [(source, items_of(node) or {}) for source, node in held]
        keys: dict[object, Node] = {}
        for _, node in reversed(held):
            keys.update(keys_of(node))
        order = dict.fromkeys(chain.from_iterable(items for _, items in rows))
        old = _items_in(mine) if tag_of(mine) in DICTS else None
        other = _NEW if mine is _NEW or mine is None else _SKIPPED
        values: list[Node] = []
        for key in order:
            some = [(source, items[key]) for source, items in rows if key in items]
            each = other if old is None else old.get(key, _SKIPPED)
            values.append(self._unite(some, each, below(path, key), chosen=chosen))
        named = [*map(keys.__getitem__, order)]
        for key, node in (old or {}).items() if self._policy.is_foreign else ():
            if key not in order and (tie := self._tie_of(node)) is not None:
                self._absent.append((tie, named, keys_of(mine)[key], values))
        frames = [(source, _frame(node)) for source, node in held]
        taken = self._chosen(frames, path)
        if taken is None and other is _NEW:  # else it stays that of the template
            self._differ.append(path)
        source, frame = frames[0] if taken is None else taken
        made: Any = self._moved(source, frame)
        if made[0] == "defaultdict":
            return [*made[:2], named, values]
        return [made[0], named, values, *made[3:]]

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

    def _are_equal(self, first: Held, held: Held, path: str) -> bool:
        """Say whether sources have equal tensors at two paths, as far as is known."""
        one, other = self._elements_of(first, path), self._elements_of(held, path)
        if not one or one.keys() != other.keys():
            return False
        claims = [(one[shard], other[shard]) for shard in one]
        return all([n == m or self._equal((n, m), path) for n, m in claims])  # noqa: C419 - claims

    def _elements_of(self, held: Held, path: str) -> dict[ShardRuns, int]:
        """Return the pieces of a tensor by what they hold; none of another value."""
        found: dict[ShardRuns, int] = {}
        for source, node in held:
            if is_distributed(node):
                numbers, layout = self._read(source, node, path)
                sizes = [self._piece(each).shape for each in numbers]
                found |= zip(self._shards_of(layout, sizes), numbers, strict=True)
            elif tag_of(node) == "tensor":
                first = self._catalogue.numbers_of(source).start
                number = first + number_of(node, path)
                found[whole(self._piece(number).shape)] = number
        return found

    def _lists(self, held: Held, mine: Any, path: str, *, chosen: bool) -> Node:
        sizes = {len(values_of(each) or ()) for _, each in held}
        taken = held[0] if len(sizes) == 1 else self._chosen(held, path)
        if taken is None:
            return self._differing(held, mine, path)
        count = len(values_of(taken[1]) or ())
        return ["list", self._items(held, mine, path, count, chosen=chosen)]

    def _items(
        self, held: Held, mine: Any, path: str, count: int, *, chosen: bool
    ) -> list[Node]:
        """Return the items of lists or structures, as many as one of them has."""
        rows = [(source, _inside(node)) for source, node in held]
        old = _items_in(mine)
        other = _NEW if mine is _NEW or mine is None else _SKIPPED
        found = []
        for at in range(count):
            some = [(source, items[at]) for source, items in rows if at < len(items)]
            each = other if old is None else old.get(at, _SKIPPED)
            found.append(self._unite(some, each, item(path, at), chosen=chosen))
        return found

    def _structure(self, held: Held, mine: Any) -> Callable[[list[Node]], Node] | None:
        """Return how to make a structure with distributed tensors of its items."""
        found = [structure_of(node) for _, node in held]
        first, nodes = found[0], [mine, *(node for _, node in held)]
        alike = {each and (each.kind, len(each.items)) for each in found}
        if first is None or len(alike) > 1:
            return None
        frames = {msgspec.json.encode(each.made_of([])) for each in found if each}
        if len(frames) > 1:
            return None
        return first.made_of if any(map(has_distributed, nodes)) else None

    def _leaf(self, held: Held) -> str | None:
        """Return the tag of a registered leaf that has distributed tensors."""
        nodes: list[Any] = [node for _, node in held]
        if {*map(tag_of, nodes)} != {"ext"} or any(map(structure_of, nodes)):
            return None
        first, *others = {node[1] for node in nodes}
        inner = any(has_distributed(node[2]) for node in nodes)
        return first if inner and not others else None

    def _payload(self, held: Held, path: str) -> Node:
        """Return the payload of a registered leaf that has distributed tensors.

        The leaf is made anew, so nothing of the template counts.
        """
        payloads = [(source, node[2]) for source, node in held]  # type: ignore[index]
        self._in_structure += 1
        self._in_leaf += 1
        found = self._unite(payloads, _NEW, path, chosen=True)
        self._in_leaf -= 1
        self._in_structure -= 1
        return found

    # -------------------------------------------------------------------- any values

    def _value(self, held: Held, mine: Any, path: str) -> Node:
        """Return the value at a path that is no distributed tensor."""
        chosen = self._chosen(held, path)
        if chosen is not None:
            return self._moved(*chosen)
        return self._differing(held, mine, path)

    def _differing(self, held: Held, mine: Any, path: str) -> Node:
        """Return what is taken of values that differ by rank; note the path."""
        stays = self._policy.rank_values == "keep" and mine is not _NEW
        if stays and not self._in_structure:
            return HOLE
        self._differ.append(path)
        return self._moved(*held[0])

    def _chosen(self, held: Held, path: str) -> tuple[int, Node] | None:
        """Return the source that is taken, and its value; None if values differ."""
        policy = self._policy
        by_source = dict(held)
        if policy.own in by_source:
            assert policy.own is not None
            return policy.own, by_source[policy.own]
        if policy.rank_values in by_source:
            assert isinstance(policy.rank_values, int)
            return policy.rank_values, by_source[policy.rank_values]
        if len(held) == 1 or self._agree(held, path):
            return held[policy.prefer % len(held)]
        return None

    def _agree(self, held: Held, path: str) -> bool:
        """Say whether all sources have the same value, as far as is known."""
        rows = [self._outline(*each, path) for each in held]
        if len({text for text, _ in rows}) > 1:
            return False
        claims = [*zip(*(numbers for _, numbers in rows), strict=True)]
        return all([self._equal(claim, path) for claim in claims])  # noqa: C419 - claims

    def _equal(self, claim: Claim, path: str) -> bool:
        """Say whether pieces have the same elements, as far as is known."""
        pieces = [*map(self._piece, claim)]
        if len({(each.dtype, each.shape) for each in pieces}) > 1:
            return False
        if pieces[0].start == pieces[0].stop:
            return True
        self._claims[claim] = path
        return self._known.get(claim, True)

    def _outline(self, source: int, node: Node, path: str) -> tuple[bytes, list[int]]:
        """Return a value without the numbers of its pieces, and these numbers."""
        numbers = [*dict.fromkeys(_numbers_in(node))]
        if numbers:
            check_numbers(numbers, self._sources[source].tensor_count)
        first = self._catalogue.numbers_of(source).start
        try:
            node = deepcopy(node)
            places = {number: at for at, number in enumerate(numbers)}
            renumber(node, places)  # type: ignore[arg-type]
            return msgspec.json.encode(node), [first + each for each in numbers]
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"malformed tree at {path[:200]}") from error

    def _moved(self, source: int, node: Node) -> Node:
        """Return a node of a source with the numbers of its pieces."""
        if not isinstance(node, list):
            return node
        every = self._catalogue.numbers_of(source)
        for mention in mentions(node):
            check_numbers(mention.numbers, len(every))
        node = deepcopy(node)
        try:
            renumber(node, every)
        except LookupError as error:  # a row that `mentions` has not taken for one
            raise RemoteProtocolError("malformed tree: a row of tensors") from error
        return node

    # ------------------------------------------------------------ distributed tensors

    def _distributed(self, held: Held, mine: Any, path: str) -> Node:
        """Return a tensor that is distributed over the sources."""
        rows = [(source, *self._read(source, node, path)) for source, node in held]
        rows, agree = self._of_one_tensor(rows, path)
        if not agree:
            return self._differing(held, mine, path)
        own = [row for row in rows if row[0] == self._policy.own]
        if is_distributed(mine):
            numbers, layout = self._catalogue.layouts.read((path,), *mine[1:])
            for source, _, other in (*own, *rows):
                if self._catalogue.layouts.are_same(layout, other):
                    return self._moved(source, dict(held)[source])
            if self._policy.distributed == "local":
                return self._moved(*held[0])  # the matcher refuses it
            self._check_layouts(layout, [other for _, _, other in rows], path)
            made = [
                self._composed(rows, each, path)
                for each in self._shards_of(layout, self._sizes(numbers))
            ]
            return _renumbered(mine, made)
        if mine is not _NEW and mine is not None and tag_of(mine) != "tensor":
            return self._moved(*held[0])  # the matcher refuses it
        return self._without_place(held, rows, mine, path)

    def _without_place(
        self, held: Held, rows: Sequence[_Holder], mine: Any, path: str
    ) -> Node:
        """Return a tensor that is not distributed in the result, if possible."""
        policy = self._policy
        is_new = mine is _NEW or mine is None
        if policy.distributed == "local":
            return self._local(held, path)
        if policy.distributed == "mesh" and is_new:
            if policy.own in (by_source := dict(held)):
                assert policy.own is not None
                return self._moved(policy.own, by_source[policy.own])
            detail = (
                "the template has no place for it, and another number of ranks saved "
                "it; pass full=True to load the full tensor"
            )
            detail += "" if self._in_leaf else ", or put a tensor there"
            raise DeviceMeshError(f"{rows[0][2]}", detail, path=path)
        layout = rows[0][2]
        self._check_layouts(None, [other for _, _, other in rows], path)
        full = whole(_shape(layout))
        return ["tensor", self._composed(rows, full, path, flags=layout.flags)]

    def _of_one_tensor(
        self, rows: list[_Holder], path: str
    ) -> tuple[list[_Holder], bool]:
        """Return the holders of one tensor, and whether they agree about it.

        On one mesh, equal shards are replicas. Those on another mesh, as of another
        stage of a pipeline, may be of another tensor of this name.
        """
        meshes = [_mesh(layout) for _, _, layout in rows]
        if len({id(each) for each in meshes}) == 1 or len({*meshes}) == 1:
            return rows, True
        policy = self._policy
        for first in (policy.own, policy.rank_values):
            for (source, _, _), mesh in zip(rows, meshes, strict=True):
                if source == first:
                    pairs = zip(rows, meshes, strict=True)
                    return [row for row, each in pairs if each == mesh], True
        holders: dict[object, dict[object, int]] = {}
        for (_, numbers, layout), mesh in zip(rows, meshes, strict=True):
            sizes = [self._piece(each).shape for each in numbers]
            for number, shard in zip(
                numbers, self._shards_of(layout, sizes), strict=True
            ):
                holders.setdefault(shard, {}).setdefault(mesh, number)
        agree = True
        for numbers_by_mesh in holders.values():
            if len(numbers_by_mesh) != len({*meshes}):
                return rows, False
            agree = self._equal((*numbers_by_mesh.values(),), path) and agree
        return rows, agree

    def _check_layouts(
        self, layout: Layout | None, others: Sequence[Layout], path: str
    ) -> None:
        """Check that shards of some layouts can bring those of the template's.

        Raises:
            TemplateMismatchError: the shapes differ, or tensors are partial.
            StorageError: the files disagree about the shape.
        """
        key = id(layout), *map(id, others)
        if key in self._fit:
            return
        shape = _shape(others[0])
        some = others if layout is None else [*others, layout]
        actual = "a full tensor" if layout is None else f"{layout}"
        if any(_is_partial(each) for each in some):
            expected = f"{others[0]}"
            raise TemplateMismatchError(
                path, expected=expected, actual=actual, detail=_PARTIAL
            )
        for other in others:
            if _shape(other) != shape:
                shapes = [*shape], [*_shape(other)]
                self._refuse(path, f"the files disagree about its shape: {shapes}")
        if layout is not None and _shape(layout) != shape:
            raise TemplateMismatchError(path, expected=f"{others[0]}", actual=actual)
        self._fit.add(key)

    def _local(self, held: Held, path: str) -> Node:
        """Return the local tensors of a source: one, or a list of several."""
        source, node = held[0]
        numbers, _ = self._read(source, node, path)
        found: list[Node] = [["tensor", number] for number in numbers]
        return found[0] if len(found) == 1 else ["list", found]

    def _cut(self, held: Held, mine: Any, path: str) -> Node:
        """Return the template's part of a tensor that is whole in a source."""
        chosen = self._chosen(held, path)
        if chosen is None:
            return self._value(held, mine, path)
        source, node = chosen
        number = self._catalogue.numbers_of(source).start + number_of(node, path)
        piece = self._catalogue.piece(number)
        numbers, layout = self._catalogue.layouts.read((path,), *mine[1:])
        if _shape(layout) != piece.shape:
            raise TemplateMismatchError(
                path, expected=f"{piece.dtype} {[*piece.shape]}", actual=f"{layout}"
            )
        shards = (whole(piece.shape),)
        made = [
            self._put_together([number], shards, each, path)
            for each in self._shards_of(layout, self._sizes(numbers))
        ]
        return _renumbered(mine, made)

    def _sizes(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of some tensors of the template."""
        assert self._wanted is not None
        return [self._wanted.shapes[number] for number in numbers]

    def _read(self, source: int, node: Any, path: str) -> tuple[list[int], Layout]:
        """Return the pieces of a distributed tensor in a source, and its layout."""
        numbers, layout = self._catalogue.layouts.read((path,), node[1], node[2])
        check_numbers(numbers, self._counts[source])
        first = self._firsts[source]
        return [first + each for each in numbers], layout

    def _shards_of(
        self, layout: Layout, sizes: Sequence[tuple[int, ...]]
    ) -> list[ShardRuns]:
        """Return what each local tensor of a layout holds.

        Args:
            layout: The layout.
            sizes: The shapes of the local tensors. One may be empty on a rank that is
                not in the mesh.
        """
        if not isinstance(layout, DTensorLayout):
            held = (layout.shards[each] for each in layout.held)
            return [block(each.offsets, each.sizes) for each in held]
        if id(layout) not in self._shards:
            try:
                self._shards[id(layout)] = shard_of(layout)
            except ValueError as error:
                what = f"{layout}"
                self._refuse(what, f"no mesh splits a tensor like this: {error}")
        shard = self._shards[id(layout)]
        return [tuple(() for _ in sizes[0]) if shard is None else shard]

    def _composed(
        self,
        rows: Sequence[_Holder],
        mine: ShardRuns,
        path: str,
        flags: int = 0,
    ) -> int:
        """Return the number of a piece with these elements of a distributed tensor."""
        numbers = [number for _, some, _ in rows for number in some]
        shapes = tuple([self._catalogue.shapes[number] for number in numbers])
        key = shapes, *[id(layout) for _, _, layout in rows]
        if key not in self._held:
            self._held[key] = self._held_by(rows, path)
        held = self._held[key]
        # Without elements, any piece says which dtype the tensor has.
        pieces = [numbers[at] for at in held.places] or numbers
        missing = _dtype_of(rows[0][2])
        return self._put_together(pieces, held.shards, mine, path, flags, missing)

    def _held_by(self, rows: Sequence[_Holder], path: str) -> _Holdings:
        """Return the shards of those pieces of a tensor that have elements."""
        places: list[int] = []
        shards: list[ShardRuns] = []
        count = 0
        for source, numbers, layout in rows:
            sizes = [self._catalogue.shapes[each] for each in numbers]
            some = self._shards_of(layout, sizes)
            for at, (size, shard) in enumerate(zip(sizes, some, strict=True), count):
                if shape_of(shard) != size and 0 not in (*size, *shape_of(shard)):
                    what = f"its part in source {source} has the shape {[*size]}"
                    self._refuse(path, f"{what}, and its layout says otherwise")
                if 0 not in size:
                    places.append(at)
                    shards.append(shard)
            count += len(numbers)
        return _Holdings(places, tuple(shards))

    def _put_together(
        self,
        numbers: Sequence[int],
        shards: tuple[ShardRuns, ...],
        mine: ShardRuns,
        path: str,
        flags: int = 0,
        missing: str = "",
    ) -> int:
        """Return the number of a piece that is made of boxes of others.

        Args:
            numbers: The pieces.
            shards: What each has of the full tensor; empty if none has an element.
            mine: The wanted elements.
            path: The path of the tensor.
            flags: The flags of the new piece, besides those of its elements.
            missing: The dtype if there is no piece.
        """
        kinds = {self._kind_of(number) for number in numbers}
        if len(dtypes := {dtype for dtype, _ in kinds}) > 1:
            self._refuse(path, f"the files disagree about its dtype: {sorted(dtypes)}")
        try:
            recipe = self._recipe(shards, mine)
        except ValueError as error:
            self._refuse(path, f"no mesh splits a tensor like this: {error}")
        if not recipe.are_apart:
            self._refuse(path, "shards of different ranks overlap in part")
        if recipe.missing:
            count = prod(recipe.shape)
            lost = f"no file has {recipe.missing} of the {count} elements"
            remedy = "the part of a rank is lost"
            if len(self._sources) == 1:
                remedy = (
                    "this is the file of one rank: load the directory of all ranks, or "
                    "pass rank= to load its local tensors"
                )
            self._refuse(path, f"{lost} that this rank needs; {remedy}")
        dtype, lazy = self._kind_of(numbers[0]) if numbers else (missing, 0)
        # Two tensors of the same memory become two of one piece's.
        key = id(recipe), dtype, *map(self._home_of, numbers)
        if (key, flags) in self._made:
            return self._made[key, flags]
        boxes: list[BoxCopy] = []
        for at, some in recipe.parts:
            piece = self._piece(numbers[at])
            number = numbers[at] - self._firsts[piece.source]
            boxes += [BoxCopy(piece, number, box) for box in some]
        if len(boxes) == 1 and not flags:
            ((piece, local, box),) = boxes
            if box.sizes == recipe.shape == piece.shape and piece.flags == lazy:
                number = self._made[key, flags] = self._firsts[piece.source] + local
                return number
        if key not in self._entries:
            self._entries[key] = len(self._pieces)
            self._add(dtype, recipe.shape, lazy, boxes, path)
        self._refs.append((self._entries[key], lazy | flags))
        number = len(self._catalogue) + len(self._refs) - 1
        self._made[key, flags] = number
        return number

    def _kind_of(self, number: int) -> tuple[str, int]:
        """Return the dtype of a piece, and the flags that change its elements."""
        code = self._catalogue.codes[number]
        if code is not None:  # it is plain, as most are
            return torch_name(code), 0
        piece = self._piece(number)
        return piece.dtype, piece.flags & _LAZY

    def _home_of(self, number: int) -> int:
        """Return what is equal for pieces of the same elements in the same memory."""
        if not self._catalogue.has_views:
            return number
        piece = self._piece(number)
        own = piece._replace(flags=piece.flags & _LAZY)
        entry = self._catalogue.whole_entry(number)
        if own == self._piece(entry):
            return entry
        return self._homes.setdefault(own, number)

    def _add(
        self,
        dtype: str,
        shape: tuple[int, ...],
        flags: int,
        boxes: list[BoxCopy],
        path: str,
    ) -> None:
        """Add a piece that is put together from boxes."""
        start = -(-self._stop // _ALIGN) * _ALIGN
        self._stop = start + prod(shape) * itemsize(dtype)
        where = len(self._sources), len(self._pieces), start, self._stop
        stride = dense_stride(shape)
        self._pieces.append(Piece(*where, dtype, shape, stride, flags))
        self._copies.append(boxes)
        self._paths.append(path)

    def _refuse(self, path: str, why: str) -> NoReturn:
        name = self._policy.name
        raise StorageError(name, f"{path or 'the state dict'}: {why}")


def _frame(node: Any) -> Node:
    """Return a dict's node without its items."""
    tag, *more = node
    if tag == "defaultdict":
        return [tag, more[0], [], []]
    return ["dict" if tag == "tensors" else tag, [], [], *more[2:]]


def _items_in(node: Any) -> dict[object, Node] | None:
    """Return the items of a node of the template; None if it is no container."""
    if node is _NEW or node is _SKIPPED or node is None:
        return None
    if (found := structure_of(node)) is not None:
        return dict(enumerate(found.items))
    return items_of(node)


def _inside(node: Any) -> Sequence[Node]:
    """Return the items of a list or of a structure."""
    found = structure_of(node)
    return values_of(node) or () if found is None else found.items


def _numbers_in(node: Node) -> Iterable[int]:
    some = mentions(node) if isinstance(node, list) else ()
    return chain.from_iterable(each.numbers for each in some)


def _renumbered(node: Any, numbers: Sequence[int]) -> Node:
    """Return a distributed tensor of the template with other local tensors."""
    tag, (kind, items) = node[1], node[2]
    found: list[Node] = [["tensor", number] for number in numbers]
    held: Node = found[0] if tag == DTensorLayout.tag else ["tuple", found]
    return ["ext", tag, [kind, [held, *items[1:]]]]


def _mesh(layout: Layout) -> object:
    return layout.mesh if isinstance(layout, DTensorLayout) else layout.group


def _shape(layout: Layout) -> tuple[int, ...]:
    return layout.shape if isinstance(layout, DTensorLayout) else layout.size


def _dtype_of(layout: Layout) -> str:
    """Return the dtype of a tensor of which no source has an element."""
    return layout.dtype if isinstance(layout, ShardedLayout) else "float32"


def _is_partial(layout: Layout) -> bool:
    return isinstance(layout, DTensorLayout) and any(
        isinstance(each, Partial) for each in layout.placements
    )
