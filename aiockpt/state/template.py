"""``into=``: finds the template's memory for the bytes of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import Reference, mentions, references
from aiockpt.memory.copies import Backings
from aiockpt.runtime.system import collector_paused
from aiockpt.state.containers import Adoption
from aiockpt.state.contents import Contents, entries_of
from aiockpt.state.distributed import Layout as WholeLayout
from aiockpt.state.distributed import check_places, has_version, layouts
from aiockpt.state.flatten import survey
from aiockpt.state.nodes import Decoders, decoders_for
from aiockpt.state.pairing import (
    Pairing,
    Places,
    check_numbers,
    is_filled,
    mismatch,
    path_of,
)

__all__ = ["Filled", "Match", "Template"]

logger = logging.getLogger("aiockpt")

_REMEDY = (
    "what it is made of cannot be received into; put None in its place, "
    "and take it from what the receive returns"
)


@dataclass(frozen=True, slots=True)
class Match:
    """The pairs of a template and a manifest that fit each other.

    Attributes:
        backings: The template's memory, one per entry of the manifest; zero bytes for
            an entry that carries no tensor of the template.
        tensors: The template's tensors by the manifest's tensor number.
        parts: Numbers of tensors that registered leaves are made of. A leaf is a
            value, so the receiver makes a new one and never fills the old one.
        blobs: Numbers of tensors that hold the bytes of values.
        wholes: The template's distributed tensors, by the `id` of a local tensor.
        fresh: Numbers of tensors that get new memory, since the template has nothing
            for them. There are some only if the template need not fit.
        adoption: Puts values into the template's containers. None if the template
            need not fit; the receive then returns a new state dict.
        nodes: Make named tuples and pytree nodes of the template's types.
        contents: What the template had when it was described. None if the template
            need not fit.
    """

    backings: Backings
    tensors: Filled
    parts: Set[int]
    blobs: Set[int]
    wholes: Mapping[int, torch.Tensor]
    fresh: Set[int] = frozenset()
    adoption: Adoption | None = None
    nodes: Decoders | None = None
    contents: Contents | None = None

    def changed(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the template that has other elements once filled."""
        yield from self.tensors.each()
        yield from filter(has_version, self.wholes.values())


class Template:
    """A state dict to receive into; ``own`` is its survey.

    Args:
        state_dict: The state dict.
        limits: Bound its size and depth.
        allow_pickle: Whether it may contain leaves that only pickle can encode.
        exact: Whether a checkpoint must fit it exactly. If not, tensors that the
            template lacks, or that differ from its own, get new memory.

    Raises:
        UnsupportedLeafError: the state dict has a leaf that no checkpoint can hold, a
            tensor whose memory cannot be written, or (if ``exact``) a registered leaf
            with tensors in it.
    """

    def __init__(
        self,
        state_dict: object,
        *,
        limits: Limits,
        allow_pickle: bool,
        exact: bool = True,
    ) -> None:
        own = survey(
            state_dict,
            limits=limits,
            allow_pickle=allow_pickle,
            writing=True,
            reading=not exact,  # else a tensor without memory is refused
        )
        self.own, self._limits, self._exact = own, limits, exact
        self._tree, self._tensors, self._drafts = own.tree, own.tensors, own.drafts
        self._wholes = own.wholes
        self._adoption = Adoption(state_dict) if exact else None
        self._contents: Contents | None = None
        if exact:
            entries, drafts = entries_of(state_dict), own.drafts
            with collector_paused():
                self._contents = Contents(entries, drafts.held, drafts.shapes)
        self._nodes = decoders_for(state_dict)
        self._count = _count_filled(own.tree, exact=exact)

    def __repr__(self) -> str:
        return f"<Template tensors={self._count}>"

    def match(self, manifest: Manifest) -> Match:
        """Match the tensors of a checkpoint with the template's, by path.

        Values may differ, including registered leaves, and flags such as
        ``requires_grad``.

        Raises:
            TemplateMismatchError: the match must be exact, and a tensor is missing or
                extra, or differs in dtype, shape, stride, or in the tensors that
                share its memory.
            DeviceMeshError: a distributed tensor needs new memory, and this process
                has no mesh for it.
            RemoteProtocolError: the tree names a tensor that the manifest lacks.
        """
        with collector_paused():
            return self._match(manifest) if self._exact else self._match_some(manifest)

    def _match(self, manifest: Manifest) -> Match:
        places = Places(self._tree)
        values: list[Reference] = []
        for mention in mentions(manifest.tree):
            check_numbers(mention.numbers, manifest.tensor_count)
            if is_filled(mention):
                places.add(mention)
            else:
                values += mention.references()
        self._same_layouts(manifest)
        places.finish(manifest.tree)
        pairing = self._pair(manifest, places)
        _keep_apart(manifest, values, pairing)
        return self._found(pairing, values, frozenset())

    def _found(
        self, pairing: Pairing, values: Sequence[Reference], fresh: Set[int]
    ) -> Match:
        return Match(
            self._drafts.backings.taken(pairing.entries.there),
            Filled(self._tensors, pairing.tensors.there),
            {value.number for value in values if value.kind == "tensor"},
            {value.number for value in values if value.kind == "blob"},
            self._wholes,
            fresh,
            self._adoption,
            self._nodes,
            self._contents,
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
            or pairing.add(each.number, number) is not None
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
        return self._found(pairing, values, fresh)

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

    def _same_layouts(self, manifest: Manifest) -> None:
        theirs, mine = self._layouts(manifest)
        for path in {**theirs, **mine}:
            one, other = theirs.get(path), mine.get(path)
            if one is None or other is None or one.comparable() != other.comparable():
                nothing = "no distributed tensor"
                expected, actual = (str(each or nothing) for each in (one, other))
                raise mismatch(path, expected=expected, actual=actual)

    def _first_of(self, manifest: Manifest, places: Places, place: int) -> int | None:
        """Return the place before that shares memory here, and not there; or None."""
        owners = self._drafts.owners

        def entries(at: int) -> tuple[int, int]:
            own = places.own[at]
            first = owners[own][0].first if own in owners else own
            return first, manifest.storage_of(places.theirs[at])

        own, theirs = entries(place)
        for at in range(place):
            mine, storage = entries(at)
            if mine == own and storage != theirs:
                return at
        return None

    def _pair(self, manifest: Manifest, places: Places) -> Pairing:
        pairing = Pairing(manifest, self._tensors, self._drafts)
        if pairing.add_all(places.theirs, places.own):
            return pairing
        pairing = Pairing(manifest, self._tensors, self._drafts)
        for place, misfit in enumerate(map(pairing.add, places.theirs, places.own)):
            if misfit is not None:
                expected, actual = misfit
                path = path_of(manifest.tree, place)
                # Two of theirs for one memory of ours: that says more than a stride.
                if (first := self._first_of(manifest, places, place)) is not None:
                    other = format_path(path_of(manifest.tree, first))
                    expected, actual = (
                        "memory of its own",
                        f"memory shared with {other}",
                    )
                raise mismatch(path, expected=expected, actual=actual)
        return pairing


def _beside(lost: Set[int], wholes: Iterable[Set[int]]) -> set[int]:
    """Return the remaining entries of each distributed tensor that lost an entry."""
    return {entry for entries in wholes if entries & lost for entry in entries} - lost


def _count_filled(tree: Node, *, exact: bool) -> int:
    """Count the tensors to fill; refuse registered leaves with tensors if ``exact``.

    Such tensors fit one leaf only, and nothing compares their sizes with the sender's.
    """
    count = 0
    for mention in mentions(tree):
        filled = is_filled(mention)
        leaf = None if filled else mention.leaf
        if exact and leaf is not None and mention.kind == "tensor":
            where, tag = leaf
            raise UnsupportedLeafError(format_path(where), tag, _REMEDY)
        count += len(mention.numbers) if filled else 0
    return count


def _keep_apart(
    manifest: Manifest, values: Sequence[Reference], pairing: Pairing
) -> None:
    """Refuse a value whose bytes lie in filled memory: a later fill would change it."""
    for path, _, number, _ in values:
        if pairing.entries.there[manifest.tensor(number).storage] >= 0:
            memory = "a value in the memory of a tensor"
            raise mismatch(path, expected=memory, actual="tensors only")


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
