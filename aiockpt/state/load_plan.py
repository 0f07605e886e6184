"""Plans which bytes of a checkpoint go into which memory.

A `LoadPlan` is the plan for one data segment. One of three rules makes it:

* `EverythingNew` makes new tensors over an arena.
* `IntoTemplate` fills a template that the checkpoint must fit, tensor by tensor.
* `Selected` loads selected paths, or the keys of a template, or both.

`Selected` asks the matcher which tensors of the sources go to which of the template.
The bytes of most of them go straight there. All other bytes arrive in the arena of
their data segment. The template's part of them is copied after everything has been
read. The values that are no tensors are read and made first, because they may turn out
to be malformed.

Nothing is read here, and nothing is changed before `Rule.finish`.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.entries import Entries
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import format_path
from aiockpt.format.references import mentions, registered
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import Backings, CopyPlan, Reaches, Spans, once
from aiockpt.memory.device import PortFor
from aiockpt.memory.held import HeldMemory
from aiockpt.runtime.system import collector_paused
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.containers import Adoption
from aiockpt.state.contents import Contents, entries_with
from aiockpt.state.flatten import ODD, wanted
from aiockpt.state.leaves import kind_of
from aiockpt.state.match import LAX, LOAD, decode_hole, match
from aiockpt.state.nodes import decoders_for
from aiockpt.state.rebuild import (
    Frame,
    OnDevice,
    assemble,
    parts_over,
    tensors_over,
)
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Select
from aiockpt.state.template import Match, changed_of, ids_of

__all__ = [
    "EverythingNew",
    "IntoTemplate",
    "LoadPlan",
    "Ranges",
    "Rule",
    "Selected",
    "state_over",
]

logger = logging.getLogger("aiockpt")

_UNUSED: Final = torch.empty(0)  # a number that the tree does not mention

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Half-open byte ranges of a data segment, in ascending order, without overlap."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where the bytes of one data segment go.

    Attributes:
        ranges: The bytes to read; adjacent ranges are joined.
        reaches: The entries of the segment, or other ranges of it.
        backings: The memory that the bytes of each reach go to directly; zero bytes for
            one that has none. None: all bytes stay in the arena.
        kept: For each reach, whether its bytes stay in the arena.
        allocated: Whether the plan has allocated memory on a device, so that copies to
            it must wait for this thread's current stream.
    """

    ranges: Ranges
    reaches: Reaches
    backings: Backings | None = None
    kept: Sequence[int] = ()
    allocated: bool = False

    def copies(self, arena: Arena, ports: PortFor) -> CopyPlan | None:
        """Return the copies between the arena and the backings, or None."""
        if self.backings is None:
            return None
        return CopyPlan(self.backings, self.reaches, arena=arena, port_for=ports)


class Rule(Protocol):
    """How a data segment becomes a state dict."""

    @property
    def values(self) -> Ranges:
        """The bytes that must be read before `plan` is called."""

    @property
    def uses_arena(self) -> bool:
        """Whether the state dict uses memory of the arena."""

    @property
    def missing(self) -> Sequence[str]:
        """The paths that were wanted and not found; known after `plan`."""

    def plan(self) -> LoadPlan:
        """Return where the bytes go."""

    def changed(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the template that have other elements once filled."""

    def check(self) -> None:
        """Check that the template is as it was; call it right before it is filled.

        Raises:
            LocalProtocolError: a tensor of it has other memory, or was replaced.
        """

    def assemble(self) -> object:
        """Return the state dict after its bytes were read; `finish` completes it.

        Raises:
            RemoteProtocolError: the tree is malformed, or has a leaf type that this
                process has not registered.
        """

    def finish(self) -> None:
        """Complete the template: after a last check, put in what is no tensor.

        Raises:
            LocalProtocolError: as `check`; a tensor that left took its bytes along.
        """


class EverythingNew:
    """The rule for a new state dict, whose tensors lie over the arena.

    The tensors exist before their bytes arrive. The rule keeps no reference to
    ``manifest``.

    Args:
        manifest: The manifest of the checkpoint.
        buffer: The memory of the arena.
        limits: Bound the tree.
        allow_pickle: Accept leaves that only pickle can encode.
        on_device: Entries whose memory is on a device.

    Raises:
        RemoteProtocolError: torch has no such tensor.
    """

    values: Ranges = ()
    missing: Sequence[str] = ()
    uses_arena = True

    def __init__(
        self,
        manifest: Manifest,
        buffer: memoryview,
        *,
        limits: Limits,
        allow_pickle: bool,
        on_device: OnDevice | None = None,
    ) -> None:
        self._limits, self._allow_pickle = limits, allow_pickle
        self._tensors = tensors_over(manifest, buffer, on_device=on_device)
        self._frame = Frame.of(manifest)
        self._whole = (0, manifest.segment_bytes)

    def plan(self) -> LoadPlan:
        """Return a plan that reads everything."""
        return LoadPlan([self._whole], Entries())

    def changed(self) -> Iterable[torch.Tensor]:
        """Return nothing: there is no template."""
        return ()

    def check(self) -> None:
        """Do nothing: there is no template."""

    def assemble(self) -> object:
        """Put the tensors into the tree."""
        return assemble(
            self._frame,
            self._tensors,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
        )

    def finish(self) -> None:
        """Do nothing: all bytes are in their final memory."""


class IntoTemplate:
    """The rule for a template that a checkpoint fits.

    Args:
        manifest: The manifest of the checkpoint.
        match: The pairs of the template's tensors and the checkpoint's.
        buffer: The memory of the arena.
        limits: Bound the tree.
        allow_pickle: Accept leaves that only pickle can encode.
        on_device: Entries whose memory is on a device.
    """

    values: Ranges = ()
    missing: Sequence[str] = ()

    def __init__(
        self,
        manifest: Manifest,
        match: Match,
        buffer: memoryview,
        *,
        limits: Limits,
        allow_pickle: bool,
        on_device: OnDevice | None = None,
    ) -> None:
        self._match, self._buffer, self._on_device = match, buffer, on_device
        self._limits, self._allow_pickle = limits, allow_pickle
        self._frame = Frame.of(manifest)
        if match.tree is not None:
            self._frame = replace(self._frame, tree=match.tree)
        self._whole = (0, manifest.segment_bytes)
        self._entries = manifest.entries
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Only a rule that makes tensors needs the rest of the manifest.
        makes = match.parts or match.blobs or match.fresh or match.copied
        self._manifest = manifest if makes else None
        self.uses_arena = bool(match.fresh)

    def plan(self) -> LoadPlan:
        """Return a plan that reads everything, mostly into the template. Call once."""
        entries, self._entries = self._entries, Entries()  # frees much memory
        return LoadPlan([self._whole], entries, self._match.backings)

    def changed(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the template."""
        return self._match.changed

    def check(self) -> None:
        """Check that the template is as it was."""
        if self._match.contents is not None:
            self._match.contents.check()

    def assemble(self) -> object:
        """Return the template, once `finish` has put the values into it."""
        match, values = self._match, dict[int, torch.Tensor]()
        if self._manifest is not None:
            make = partial(
                parts_over, self._manifest, self._buffer, on_device=self._on_device
            )
            values = make(parts=match.parts, blobs=match.blobs, fresh=match.fresh)
            copied = {piece for piece, _ in match.copied}
            there = make(parts=frozenset(), blobs=frozenset(), fresh=copied)
            self._copies = [(target, there[piece]) for piece, target in match.copied]
        state = assemble(
            self._frame,
            match.tensors.beside(values),
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            wholes=match.wholes,
            nodes=match.nodes,
        )
        return state if match.adoption is None else match.adoption.plan(state)

    def finish(self) -> None:
        """Copy the tensors that have no backing; put the values into the template."""
        for target, source in self._copies:
            _copy_elements(target, source)
        self._copies = []  # they keep the arena
        if self._match.contents is not None:
            self._match.contents.check_filled()
        if self._match.adoption is not None:
            self._match.adoption.finish()


class Selected:
    """The rule for selected paths, for the keys of a template, or for both.

    A value that is not selected costs nothing. Its bytes are not read, and its type
    need not be registered.

    Args:
        segments: The data segments; several are shards of flat dicts.
        limits: Bound the trees.
        allow_pickle: Accept leaves that only pickle can encode.
        select: The selected paths; None: all of them.
        template: The state dict to fill; None: the result is new.
        device: The device for tensors that the template lacks; None: they stay in the
            memory of their segment.
        strict: Whether the checkpoint must have every wanted path, the template every
            selected one, and no container may be empty here and full there. Keys that
            only the checkpoint has never count.
        name: The name of the checkpoint, for errors.

    Attributes:
        missing: The wanted paths that the checkpoint or the template lacks.

    Raises:
        TemplateMismatchError: a value of the template has another type, shape or
            dtype; or the rule is strict and the template lacks a selected path, or
            has an empty container for a full one.
        MissingKeysError: the checkpoint lacks every key of the template; or the rule is
            strict and it lacks a selected path, or a key of the template.
        UnsupportedLeafError: a tensor of the template cannot be filled.
        RemoteProtocolError: the tree of a segment is malformed.
    """

    uses_arena = True

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        limits: Limits,
        allow_pickle: bool,
        select: Select | None = None,
        template: object | None = None,
        device: torch.device | None = None,
        strict: bool = False,
        name: str = "",
    ) -> None:
        self._segments, self._device = segments, device
        self._limits, self._allow_pickle = limits, allow_pickle
        self._template = template
        manifests = [each.manifest for each in segments]
        odd = [*chain.from_iterable(each.odd for each in segments)]
        self._catalogue = Catalogue(manifests, limits=limits, odd=odd)
        own = None if template is None else wanted(template, limits=limits)
        if callable(select):
            select = cache(select)  # the matcher may ask for a path again
        rule = LOAD if strict else LAX
        found = match(self._catalogue, own, rule, select=select, name=name)
        for warning in found.warnings:
            logger.warning("%s: %s", name, warning)
        self.missing = found.missing
        self._own, self._found = own, found
        fills = zip(*found.straight, strict=True), zip(*found.copied, strict=True)
        self._straight = [*fills[0]]
        self._copied = [*fills[1]]  # a piece, and a tensor of the template
        self._result: object = None
        self._adoption: Adoption | None = None
        self._contents: Contents | None = None
        self._changed: Sequence[torch.Tensor] = ()
        self._moved = self._new_for_device()
        self._straight_there = self._alone(self._moved)
        self._bases: list[dict[int, torch.Tensor]] = [{} for _ in segments]
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: list[tuple[int, torch.Tensor]] = []  # to a tensor of the template
        if own is not None:
            self._note(every=select is None)

    def __repr__(self) -> str:
        return f"<Selected {self._catalogue}>"

    def _note(self, *, every: bool) -> None:
        """Note what is filled of the template, and what it has now."""
        assert self._own is not None
        self._changed = changed_of(self._own, self._found)
        fills = chain(self._straight, self._copied)
        filled = ids_of(self._own, (number for _, number in fills))
        entries = entries_with(self._template, filled, every=every)
        self._contents = Contents(entries)
        self._adoption = Adoption(self._template, filled)

    def _new_for_device(self) -> set[int]:
        """Return the new pieces that go to the device: no parts of other values."""
        if self._device is None:
            return set()
        rows = (each for each in mentions(self._found.tree) if each.leaf is None)
        numbers = chain.from_iterable(each.numbers for each in rows)
        # A piece that is a part of another value, too, must stay with it.
        return {*self._found.new}.intersection(numbers).difference(self._found.values)

    def _alone(self, moved: Set[int]) -> set[int]:
        """Return those new pieces whose bytes can be read straight to the device.

        Their entries have no pieces for other places.
        """
        found, entry_of = self._found, self._catalogue.entry_of
        if not moved:
            return set()
        others = {*found.new} - moved
        others.update(found.values, found.straight.pieces, found.copied.pieces)
        busy = {*map(entry_of, others)}
        homes = ((piece, entry_of(piece)) for piece in moved)
        return {
            piece
            for piece, home in homes
            if home not in busy and self._segments[home[0]].tensors is None
        }

    # ---------------------------------------------------------- values, and the result

    @property
    def values(self) -> Ranges:
        """The byte ranges of the values, if there is one segment."""
        (found,) = self.value_ranges()
        return found

    def value_ranges(self) -> list[Ranges]:
        """Return the byte ranges of each segment's values that are not tensors."""
        found: list[list[tuple[int, int]]] = [[] for _ in self._segments]
        for piece in self._found.values:
            source, start, stop = self._catalogue.reach(piece)
            found[source].append((start, stop))
        return [*map(_joined, found)]

    def plan(self) -> LoadPlan:
        """Return where the bytes of the only segment go; see `plans`."""
        (found,) = self.plans()
        return found

    def plans(self) -> list[LoadPlan]:
        """Return where the bytes of each segment go; the values must have been read.

        Raises:
            RemoteProtocolError: a value is malformed, or of an unregistered type.
            DeviceMeshError: this process has no mesh for a new distributed tensor.
        """
        with collector_paused():  # there may be 100,000 tensors
            state = self._decoded()
            if self._adoption is not None:
                state = self._adoption.plan(state)
            self._result = state
            return self._plans()

    def _decoded(self) -> object:
        """Return what is taken, made of the template's tensors and of new ones."""
        own, tree, manifests = self._own, self._found.tree, self._catalogue.sources
        wholes = {} if own is None else own.wholes
        self._found.check_meshes(self._catalogue)
        is_own = any(each.tensors is not None for each in self._segments)
        travelled = sum(each.total_bytes for each in manifests)
        frame = Frame(
            tree,
            len(manifests[0].entries),
            len(self._catalogue),
            sys.maxsize if is_own else travelled,
        )
        return assemble(
            frame,
            self._tensors(),
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            wholes=wholes,
            nodes={**decoders_for(self._template), ODD: self._odd_decoder()},
        )

    def _odd_decoder(self) -> Callable[[object], object]:
        """Return the decoder of values without an encoding, and of `HOLE`.

        Tensors of the state dict go to the device.

        Raises:
            UnsupportedLeafError: torch cannot move one there.
        """
        odd: dict[object, Any] = dict(enumerate(self._catalogue.odd))
        leaves = registered(self._found.tree) if odd and self._device else ()
        for path, tag, number in leaves:
            value = odd[number] if tag == ODD and number in range(len(odd)) else None
            if isinstance(value, torch.Tensor):
                try:
                    odd[number] = value.to(self._device)
                except (NotImplementedError, RuntimeError) as error:
                    remedy = f"torch cannot move it to {self._device}"
                    where, kind = format_path(path), kind_of(value)
                    raise UnsupportedLeafError(where, kind, remedy) from error
        return lambda payload: (
            odd[payload]
            if type(payload) is int and payload in odd
            else decode_hole(payload)
        )

    def _tensors(self) -> Sequence[torch.Tensor]:
        """Return a tensor for each number that the tree mentions."""
        found, segments = self._found, self._segments
        is_most = 2 * len(found.new) >= len(self._catalogue)
        if self._own is None and self._device is None and is_most:
            return [*chain.from_iterable(map(_all_of, segments))]
        tensors = [_UNUSED] * len(self._catalogue)
        if self._own is not None:
            for piece, number in chain(self._straight, self._copied):
                tensors[piece] = self._own.tensors[number]
        values, blobs = {*found.values}, found.blobs()
        stay = {*found.new} - self._moved
        for piece, tensor in self._made(stay, values - blobs, blobs):
            tensors[piece] = tensor
        self._allocate()
        for piece, tensor in self._made(self._straight_there, moved=True):
            tensors[piece] = tensor
        for piece, tensor in self._made(self._moved - self._straight_there):
            tensors[piece] = self._replica(tensor)
        return tensors

    def _made(
        self,
        fresh: Set[int],
        parts: Set[int] = frozenset(),
        blobs: Set[int] = frozenset(),
        *,
        moved: bool = False,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pieces and tensors over the memory of their segments, or of bases.

        See `parts_over` for the other arguments.
        """
        every = fresh, parts, blobs
        for source, segment in enumerate(self._segments if any(every) else ()):
            numbers = self._catalogue.numbers_of(source)
            first = numbers.start
            own = [{each - first for each in some if each in numbers} for some in every]
            made: Mapping[int, torch.Tensor]
            if segment.tensors is not None:
                made = {each: segment.tensors[each] for each in set().union(*own)}
            else:
                made = parts_over(
                    segment.manifest,
                    segment.arena.buffer,
                    fresh=own[0],
                    parts=own[1],
                    blobs=own[2],
                    on_device=self._bases[source] if moved else None,
                )
            yield from ((first + each, tensor) for each, tensor in made.items())

    # --------------------------------------------------------------------- the device

    def _allocate(self) -> None:
        """Allocate the entries that are read straight to the device."""
        for piece in self._straight_there:
            source, entry = self._catalogue.entry_of(piece)
            if entry not in (bases := self._bases[source]):
                entries = self._segments[source].manifest.entries
                nbytes = entries.stops[entry] - entries.starts[entry]
                bases[entry] = torch.empty(
                    nbytes, dtype=torch.uint8, device=self._device
                )

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, whose storage gets its bytes in `finish`.

        Tensors that share a storage also share it on the device.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:
            return tensor.to(self._device)
        if (known := self._replicas.get(storage.data_ptr())) is None:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            base = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            known = self._replicas[storage.data_ptr()] = base, raw
        return _like(tensor, known[0])

    # ---------------------------------------------------------------------- the bytes

    def _plans(self) -> list[LoadPlan]:
        """Plan where the bytes go, and what is copied in `finish`."""
        rows: list[list[_Row]] = [[] for _ in self._segments]
        kept: list[list[tuple[int, int]]] = [[] for _ in self._segments]
        copied = [*self._copied]
        for piece, number in self._straight:
            source, start, stop = self._catalogue.reach(piece)
            if self._segments[source].tensors is not None:
                copied.append((piece, number))
            elif start < stop:
                rows[source].append((start, stop, number))
        targets = [] if self._own is None else [*self._own.tensors]
        bases: list[torch.Tensor] = []
        for source, there in enumerate(self._bases):
            entries = self._segments[source].manifest.entries
            for entry, base in there.items():
                if base.numel() and not base.is_meta:
                    reach = entries.starts[entry], entries.stops[entry]
                    rows[source].append((*reach, len(targets) + len(bases)))
                    bases.append(base)
        arrive = {*self._found.new} - self._straight_there
        if self._device is not None and self._device.type == "meta":
            arrive -= self._moved
        for piece in chain(arrive, map(itemgetter(0), copied)):
            source, start, stop = self._catalogue.reach(piece)
            kept[source].append((start, stop))
        made = dict(self._made({piece for piece, _ in copied}))
        self._copies = [(number, made[piece]) for piece, number in copied]
        held = HeldMemory.of(bases)
        if self._own is not None:
            held = self._own.held.beside(held)
        return [self._plan(*each, held) for each in zip(rows, kept, strict=True)]

    def _plan(
        self, rows: list[_Row], kept: list[tuple[int, int]], held: HeldMemory
    ) -> LoadPlan:
        """Return the plan of a segment.

        Args:
            rows: What goes straight to memory.
            kept: What stays in the arena; it has no byte in common with ``rows``.
            held: The memory.
        """
        stay = ((start, stop, -1) for start, stop in _joined(kept))
        every = sorted([*_merged(rows), *stay])
        starts, stops = (array("q", [row[at] for row in every]) for at in (0, 1))
        order = [row[2] for row in every]
        home = held.taken(order)
        sizes = array("q", [(e[1] - e[0]) * (e[2] >= 0) for e in every])
        return LoadPlan(
            _joined((start, stop) for start, stop, _ in every),
            Spans(_Names(home.tensors, self._contents), starts, stops),
            Backings(home, home.addresses, sizes, {}, {}),
            bytes(number < 0 for number in order),
            allocated=self._device is not None,
        )

    # ---------------------------------------------------------------------- the end

    def changed(self) -> Sequence[torch.Tensor]:
        """Return the tensors of the template that have other elements once filled."""
        return self._changed

    def check(self) -> None:
        """Check that what is filled of the template is as it was."""
        if self._contents is not None:
            self._contents.check()

    def assemble(self) -> object:
        """Return the state dict, which `plans` has made."""
        return self._result

    def finish(self) -> None:
        """Copy the tensors that arrived elsewhere; put values into the template."""
        self.check()
        for base, raw in self._replicas.values():
            base.copy_(raw)
        own = self._own
        names = _Names(() if own is None else own.tensors, self._contents)
        for number, source in self._copies:
            assert own is not None
            own.held.check(names.__getitem__, number, number + 1)
            _copy_elements(own.tensors[number], source)
        if self._copies and self._contents is not None:
            self._contents.check_filled()
        if self._adoption is not None:
            self._adoption.finish()


_Row: TypeAlias = tuple[int, int, int]
"""The first byte of a range, its end, and the tensor that it goes to; -1: none."""


def _merged(rows: list[_Row]) -> Iterator[_Row]:
    """Yield the rows in order, those that overlap as one: they have the same memory."""
    start, stop, number = 0, 0, -1
    for row in sorted(rows):
        if row[0] < stop:
            stop = max(stop, row[1])
            continue
        if start < stop:
            yield start, stop, number
        start, stop, number = row
    if start < stop:
        yield start, stop, number


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order; those that meet are one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def _copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    destination, origin = once(target, source)
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        destination.copy_(origin)


class _Names(Sequence[str]):
    """The paths of some tensors; only errors ask for them."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], contents: Contents | None
    ) -> None:
        self._tensors, self._contents = tensors, contents

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: Any) -> Any:
        if self._contents is None:
            return ""
        return self._contents.name_of(self._tensors, number)


def _all_of(segment: Segment) -> Sequence[torch.Tensor]:
    """Return all tensors of a segment, over its memory."""
    if segment.tensors is not None:
        return segment.tensors
    return tensors_over(segment.manifest, segment.arena.buffer)


def _like(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the same view, with the same flags, of another storage."""
    replica = torch.empty(0, dtype=tensor.dtype, device=base.device).set_(
        base.untyped_storage(),
        int(tensor.storage_offset()),
        tensor.shape,
        tensor.stride(),
    )
    if tensor.is_conj():
        replica = replica.conj()
    if tensor.is_neg():
        replica = torch._neg_view(replica)  # noqa: SLF001 - torch has no public way
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(replica, tensor.requires_grad)
    return replica.requires_grad_() if tensor.requires_grad else replica


def state_over(
    segments: Sequence[Segment], *, limits: Limits, allow_pickle: bool
) -> object:
    """Return the state dict over some segments, whose bytes have been read.

    Raises:
        RemoteProtocolError: a tree is malformed, or has a leaf of an unregistered type.
        DeviceMeshError: this process has no mesh for a distributed tensor.
    """
    rule = Selected(segments, limits=limits, allow_pickle=allow_pickle)
    rule.plans()
    return rule.assemble()
