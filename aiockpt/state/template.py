"""``into=``: finds the template's memory for the bytes of a checkpoint."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from operator import lt
from typing import NamedTuple

import torch

from aiockpt.format.limits import Limits
from aiockpt.format.manifest import CONJ, NEG, Manifest
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import Reference, check_numbers, references
from aiockpt.memory.copies import Backings, Part
from aiockpt.memory.held import HeldMemory
from aiockpt.runtime.system import collector_paused
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.containers import Adoption
from aiockpt.state.contents import Contents, entries_of
from aiockpt.state.distributed import Layout as WholeLayout
from aiockpt.state.distributed import check_places, has_version, layouts
from aiockpt.state.flatten import ODD, Wanted, survey, wanted
from aiockpt.state.match import RECEIVE, Matched, decode_hole, match
from aiockpt.state.nodes import Decoders, decoders_for
from aiockpt.state.pairing import Pairing
from aiockpt.state.sharding import is_filled

__all__ = ["Filled", "Match", "Template", "changed_of", "ids_of"]

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True)
class Match:
    """The pairs of a template and a manifest that fit each other.

    Attributes:
        backings: The template's memory, one per entry of the manifest; zero bytes for
            an entry that carries no tensor of the template.
        tensors: The template's tensors by the manifest's tensor number.
        changed: The tensors of the template that have other elements once filled.
        parts: Numbers of tensors that registered leaves are made of. A leaf is a
            value, so the receiver makes a new one and never fills the old one.
        blobs: Numbers of tensors that hold the bytes of values.
        wholes: The template's distributed tensors, by the `id` of a local tensor.
        fresh: Numbers of tensors that get new memory, since the template has nothing
            for them.
        copied: Numbers of tensors whose elements are copied in the end, and the
            template's tensors that get them. They have no backing.
        adoption: Puts values into the template's containers. None if the template
            need not fit; the receive then returns a new state dict.
        nodes: Make named tuples and pytree nodes of the template's types.
        contents: What the template had when it was described. None if the template
            need not fit.
        tree: What is taken of the checkpoint's tree. None: all of it.
    """

    backings: Backings
    tensors: Filled
    changed: Sequence[torch.Tensor]
    parts: Set[int]
    blobs: Set[int]
    wholes: Mapping[int, torch.Tensor]
    fresh: Set[int] = frozenset()
    copied: Sequence[tuple[int, torch.Tensor]] = ()
    adoption: Adoption | None = None
    nodes: Decoders | None = None
    contents: Contents | None = None
    tree: Node = None


class Template:
    """A state dict to receive into.

    Args:
        state_dict: The state dict.
        limits: Bound its size and depth.
        allow_pickle: Whether it may contain leaves that only pickle can encode.
        exact: Whether a checkpoint must fit it exactly. If not, tensors that the
            template lacks, or that differ from its own, get new memory.

    Raises:
        LimitExceededError: it is too deep, or has too many nodes.
        StateDictError: reading a tensor or a registered type failed.
        UnsupportedLeafError: it need not fit, and has a leaf that no checkpoint can
            hold, or a tensor whose memory cannot be written.
    """

    def __init__(
        self,
        state_dict: object,
        *,
        limits: Limits,
        allow_pickle: bool,
        exact: bool = True,
    ) -> None:
        self._state_dict, self._limits = state_dict, limits
        self._nodes = decoders_for(state_dict)
        self._wanted: Wanted | None = None
        self._contents: Contents | None = None
        if exact:
            self._wanted = wanted(state_dict, limits=limits)
            held, shapes = self._wanted.held, self._wanted.shapes
            with collector_paused():
                self._contents = Contents(entries_of(state_dict), held, shapes)
            return
        own = survey(
            state_dict,
            limits=limits,
            allow_pickle=allow_pickle,
            writing=True,
            reading=True,  # else a tensor without memory is refused
        )
        self._tree, self._tensors, self._drafts = own.tree, own.tensors, own.drafts
        self._wholes = own.wholes

    def __repr__(self) -> str:
        own = self._tensors if self._wanted is None else self._wanted.tensors
        return f"<Template tensors={len(own)}>"

    def match(self, manifest: Manifest) -> Match:
        """Match the tensors of a checkpoint with the template's, by path.

        Values may differ, including registered leaves, and flags such as
        ``requires_grad``.

        Raises:
            TemplateMismatchError: the match must be exact, and the template differs;
                see `aiockpt.state.match`.
            UnsupportedLeafError: a tensor of the template cannot be filled.
            DeviceMeshError: a distributed tensor needs new memory, and this process
                has no mesh for it.
            RemoteProtocolError: the tree names a tensor that the manifest lacks.
        """
        with collector_paused():
            if self._wanted is None:
                return self._match_some(manifest)
            return self._match(manifest, self._wanted)

    def _match(self, manifest: Manifest, own: Wanted) -> Match:
        catalogue = Catalogue([manifest], limits=self._limits)
        found = match(catalogue, own, RECEIVE)
        found.check_meshes(catalogue)
        backings, late = _by_entry(catalogue, own, found)
        there = array("q", [-1]) * manifest.tensor_count
        fills = zip(*found.straight, strict=True), zip(*found.copied, strict=True)
        for piece, number in chain(*fills):
            there[piece] = number
        for piece in chain(found.new, found.values):  # tied to what is made anew
            there[piece] = -1
        blobs = found.blobs()
        return Match(
            backings,
            Filled(own.tensors, there),
            changed_of(own, found),
            {*found.values} - blobs,
            blobs,
            own.wholes,
            {*found.new},
            [(piece, own.tensors[number]) for piece, number in late],
            Adoption(self._state_dict, ids_of(own, _doubtful(found, there))),
            {**self._nodes, ODD: decode_hole},
            self._contents,
            found.tree,
        )

    def _match_some(self, manifest: Manifest) -> Match:
        """Match each entry whose tensors are exactly those of one template entry."""
        own = {
            (each.path, each.leaf): each.number
            for each in references(self._tree)
            if is_filled(each)
        }
        filled: list[Reference] = []
        values: list[Reference] = []
        for each in references(manifest.tree):
            check_numbers((each.number,), manifest.tensor_count)
            (filled if is_filled(each) else values).append(each)
        theirs, mine = self._layouts(manifest)
        alike = {
            path
            for path, layout in theirs.items()
            if path in mine and mine[path].comparable() == layout.comparable()
        }
        pairing = Pairing(manifest, self._tensors, self._drafts)
        misfits = [
            each
            for each in filled
            if (number := own.get((each.path, each.leaf))) is None
            or (each.leaf is not None and each.leaf[0] not in alike)
            or not pairing.add(each.number, number)
        ]
        lost = {manifest.storage_of(each.number) for each in (*misfits, *values)}
        lost |= self._not_alone(pairing)
        # All local parts of a distributed tensor are the template's, or all are new.
        wholes: dict[Path, set[int]] = {path: set() for path in theirs}
        for each in filled:
            if each.leaf is not None:
                wholes[each.leaf[0]].add(manifest.storage_of(each.number))
        while more := _beside(lost, wholes.values()):
            lost |= more
        made = {path: layout for path, layout in theirs.items() if wholes[path] & lost}
        check_places(made)
        fresh = {n.number for n in filled if manifest.storage_of(n.number) in lost}
        pairing.leave_out(lost, fresh)
        if misfits:
            where = format_path(misfits[0].path)
            logger.info(
                "%d of %d tensors get new memory: the template lacks them or they "
                "differ, first %s",
                *(len(fresh), manifest.tensor_count, where),
            )
        tensors = Filled(self._tensors, pairing.tensors.there)
        uncounted = filter(has_version, self._wholes.values())
        return Match(
            self._drafts.backings.taken(pairing.entries.there),
            tensors,
            [*tensors.each(), *uncounted],
            {value.number for value in values if value.kind == "tensor"},
            {value.number for value in values if value.kind == "blob"},
            self._wholes,
            fresh,
            nodes=self._nodes,
        )

    def _not_alone(self, pairing: Pairing) -> set[int]:
        """Return their entries whose memory here also contains other tensors."""
        paired = {own for own in pairing.tensors.there if own >= 0}
        owners = self._drafts.owners
        return {
            entry
            for entry, own in enumerate(pairing.entries.there)
            if own in owners
            and any(each.number not in paired for each in owners[own][0].members)
        }

    def _layouts(
        self, manifest: Manifest
    ) -> tuple[Mapping[Path, WholeLayout], Mapping[Path, WholeLayout]]:
        """Return the layouts of their distributed tensors, and of ours, by path."""
        count, limits = manifest.tensor_count, self._limits
        mine = layouts(self._tree, count=len(self._tensors), limits=limits)
        return layouts(manifest.tree, count=count, limits=limits), mine


def _beside(lost: Set[int], wholes: Iterable[Set[int]]) -> set[int]:
    """Return the remaining entries of each distributed tensor that lost an entry."""
    return {entry for entries in wholes if entries & lost for entry in entries} - lost


def changed_of(own: Wanted, found: Matched) -> list[torch.Tensor]:
    """Return the tensors of a template that have other elements once filled.

    A distributed tensor that counts its own writes is one of them, too.
    """
    numbers = chain(found.straight.tensors, found.copied.tensors)
    tensors = [*map(own.tensors.__getitem__, numbers)]
    wholes = map(own.wholes.get, map(id, tensors if own.wholes else ()))
    counting = {id(each): each for each in wholes if each is not None}
    changed = [each for each in tensors if each.numel()]
    return [*changed, *filter(has_version, counting.values())]


def ids_of(own: Wanted, numbers: Iterable[int]) -> set[int]:
    """Return the `id` of tensors of a template, and of what they are parts of."""
    found = {id(own.tensors[number]) for number in numbers}
    return found.union(id(own.wholes[each]) for each in found & own.wholes.keys())


def _by_entry(
    catalogue: Catalogue, own: Wanted, found: Matched
) -> tuple[Backings, list[tuple[int, int]]]:
    """Return the memory of each entry, and the fills that are copied in the end.

    Tensors that overlap or meet in the same way on both sides are one entry together.
    The others are parts of their entry. A part moves as bytes, so tensors that are
    conjugated or negated on one side only are copied in the end.
    """
    entries, straight = catalogue.sources[0].entries, found.straight
    count = len(entries)
    order, sizes = array("q", [-1]) * count, array("Q", [0]) * count
    plain = not (catalogue.has_views or len(found.values) or len(found.copied.pieces))
    if plain and not _has_repeated(straight.pieces):  # most are
        for piece, number in zip(*straight, strict=True):
            order[piece], sizes[piece] = number, own.sizes[number]
        held = own.held.taken(order)
        return Backings(held, held.addresses, sizes, {}, {}), []
    addresses = array("Q", [0]) * count
    busy = {*map(catalogue.whole_entry, chain(found.new, found.values))}
    homes: dict[int, list[_Fill]] = {}
    for is_straight, fills in ((True, straight), (False, found.copied)):
        for piece, number in zip(*fills, strict=True):
            _, start, stop = catalogue.reach(piece)
            if start == stop:
                continue
            address = own.held.addresses[number]
            fill = _Fill(start, stop, address, piece, number, is_straight)
            homes.setdefault(catalogue.whole_entry(piece), []).append(fill)
    parts: dict[int, tuple[Part, ...]] = {}
    inner: dict[int, HeldMemory] = {}
    late: list[tuple[int, int]] = []
    for entry, some in homes.items():
        some.sort()
        first, start, stop = some[0], entries.starts[entry], entries.stops[entry]
        order[entry] = first.number
        reach = 0 if entry in busy else _reach(start, some)
        if reach and _holds(own, first, reach - start):
            addresses[entry], sizes[entry] = first.address, reach - start
            continue
        pairs = [(each, _part(catalogue, own, each, start, stop)) for each in some]
        moved = [(each.number, part) for each, part in pairs if part is not None]
        late += ((each.piece, each.number) for each, part in pairs if part is None)
        if moved:
            parts[entry] = tuple(part for _, part in moved)
            inner[entry] = own.held.taken([number for number, _ in moved])
        if len(moved) == len(pairs) and entry not in busy:
            sizes[entry] = stop - start
        elif not moved:
            order[entry] = -1
    return Backings(own.held.taken(order), addresses, sizes, parts, inner), late


def _reach(start: int, fills: Sequence[_Fill]) -> int:
    """Return where fills end that are an entry together; 0 if they are not."""
    reach = start
    for each in fills:
        alike = each.is_straight and each.shift == fills[0].shift
        if not alike or each.start > reach:
            return 0
        reach = max(reach, each.stop)
    return reach


def _holds(own: Wanted, fill: _Fill, nbytes: int) -> bool:
    """Say whether the storage of a tensor goes on for so many bytes."""
    tensor = own.tensors[fill.number]
    offset = tensor.storage_offset() * tensor.itemsize
    return offset + nbytes <= own.held.storage_sizes[fill.number]


def _part(
    catalogue: Catalogue, own: Wanted, fill: _Fill, start: int, stop: int
) -> Part | None:
    """Return a fill as a part of the entry ``[start, stop)``; None if it is none."""
    piece, tensor = catalogue.piece(fill.piece), own.tensors[fill.number]
    flags = bool(piece.flags & CONJ), bool(piece.flags & NEG)
    size = tensor.itemsize
    # A peer may send entries that torch cannot see as words of this size.
    aligned = not any(each % size for each in (start, stop, fill.start))
    if not aligned or flags != (tensor.is_conj(), tensor.is_neg()):
        return None
    return Part(tensor, piece.stride, (fill.start - start) // size)


def _doubtful(found: Matched, there: Sequence[int]) -> Iterator[int]:
    """Yield the tensors of the template for which another one stands in the result."""
    fills = zip(*found.straight, strict=True), zip(*found.copied, strict=True)
    for piece, number in chain(*fills):
        if there[piece] != number:
            yield number


def _has_repeated(pieces: Sequence[int]) -> bool:
    """Say whether a piece is there twice; a set of all of them takes much memory."""
    return not all(map(lt, pieces, islice(pieces, 1, None))) and (
        len({*pieces}) < len(pieces)
    )


class _Fill(NamedTuple):
    """The bytes of a piece, and the address of the tensor that gets them."""

    start: int
    stop: int
    address: int
    piece: int
    number: int
    is_straight: bool

    @property
    def shift(self) -> int:
        """A number that is equal for fills that are alike apart on both sides."""
        return self.address - self.start


class Filled(Mapping[int, torch.Tensor]):
    """A mapping from the manifest's numbers to tensors, without an object for each."""

    def __init__(self, tensors: Sequence[torch.Tensor], there: Sequence[int]) -> None:
        self._tensors = tensors
        self._there = there

    def __getitem__(self, number: int) -> torch.Tensor:
        own = self._there[number]
        if own < 0:
            raise KeyError(number)
        return self._tensors[own]

    def __iter__(self) -> Iterator[int]:
        return (number for number, own in enumerate(self._there) if own >= 0)

    def __len__(self) -> int:
        return sum(own >= 0 for own in self._there)

    def __bool__(self) -> bool:
        return any(own >= 0 for own in self._there)

    def each(self) -> Iterator[torch.Tensor]:
        """Yield the tensors, faster than `values`."""
        return (self._tensors[own] for own in self._there if own >= 0)

    def beside(self, others: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return a tensor for each number, from ``others`` where this has none."""
        unused = torch.empty(0)  # a number that the tree does not mention
        return [
            self._tensors[own] if own >= 0 else others.get(number, unused)
            for number, own in enumerate(self._there)
        ]
