"""Plans which bytes of a checkpoint go into which memory.

`Matching` makes a `LoadPlan` for each data segment: of everything, of selected paths,
or of what a template wants. It asks the matcher which tensors of the sources go to
which of the template. The bytes of most of them go straight there. All other bytes
arrive in the arena of their data segment. The template's part of them is copied after
everything has been read.

A whole receive reads everything, and plans for each entry of its segment. A load plans
for the byte ranges that it needs. Its values that are no tensors are read and made
first, because they may turn out to be malformed.

Nothing is read here, and nothing is changed before `Matching.finish`.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, starmap
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.entries import Entries
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import TensorSpec
from aiockpt.format.paths import Node, format_path
from aiockpt.format.references import mentions, references, registered
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import (
    Backings,
    CopyPlan,
    Reaches,
    Spans,
    once,
    physical,
)
from aiockpt.memory.device import PortFor
from aiockpt.memory.held import HeldMemory
from aiockpt.runtime.system import collector_paused
from aiockpt.state import match
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.containers import Adoption
from aiockpt.state.contents import Contents, entries_of, entries_with
from aiockpt.state.dispositions import repeated
from aiockpt.state.distributed import has_version
from aiockpt.state.flatten import ODD, Wanted, wanted
from aiockpt.state.leaves import DTYPE_NAMES, kind_of
from aiockpt.state.mesh import merged
from aiockpt.state.nodes import decoders_for
from aiockpt.state.overlaps import flags_of
from aiockpt.state.rebuild import Frame, assemble, parts_over, tensors_over, view_of
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Select

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
        kept: For each reach, whether its bytes stay in the arena; empty without
            backings.
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


class Template:
    """A state dict to fill, described before the checkpoint is known.

    Args:
        state_dict: The state dict.
        limits: Bound its size and depth.
        watched: Whether anything that changes in it, from now on until it is filled, is
            an error. If not, `Matching` notes what it fills.

    Attributes:
        state_dict: The state dict.
        wanted: Its tree and tensors.
        nodes: Make named tuples and pytree nodes of its types.
        contents: What it had; None if nobody has noted it.

    Raises:
        LimitExceededError: it is too deep, or has too many nodes.
        StateDictError: reading a tensor or a registered type failed.
    """

    contents: Contents | None = None

    def __init__(
        self, state_dict: object, *, limits: Limits, watched: bool = False
    ) -> None:
        self.state_dict, self.nodes = state_dict, decoders_for(state_dict)
        self.wanted = wanted(state_dict, limits=limits)
        if watched:
            held, shapes = self.wanted.held, self.wanted.shapes
            with collector_paused():
                self.contents = Contents(entries_of(state_dict), held, shapes)


class Matching:
    """What is taken of a checkpoint, and where it goes.

    A value that is not selected costs nothing. Its bytes are not read, and its type
    need not be registered.

    A load reads `value_ranges`, calls `plans`, reads what they say, and calls `finish`.
    A whole receive calls `plans` first, reads everything, and calls `assemble` before
    it touches the template; then `check`, and `finish` in the end.

    Args:
        segments: The data segments. A whole receive has one. It gets its memory after
            this call, since `backings` says how much is needed.
        rule: Which differences between the template and the checkpoint are errors.
        limits: Bound the trees.
        allow_pickle: Accept leaves that only pickle can encode.
        select: The selected paths; None: all of them.
        template: The state dict to fill; None: the result is new.
        device: The device for tensors that the template lacks; None: they stay in the
            memory of their segment.
        name: The name of the checkpoint, for errors.
        tree: The tree of several segments together; see `aiockpt.state.reshard`.

    Attributes:
        backings: The template's memory of each entry, of a whole receive into one.

    Raises:
        TemplateMismatchError, MissingKeysError, UnsupportedLeafError: the template does
            not fit; see `aiockpt.state.match`.
        DeviceMeshError: this process has no mesh for a new distributed tensor.
        RemoteProtocolError: the tree of a segment is malformed.
    """

    backings: Backings | None = None
    _ready: Sequence[torch.Tensor] | None = None

    def __init__(
        self,
        segments: Sequence[Segment],
        rule: match.Rule,
        *,
        limits: Limits,
        allow_pickle: bool,
        select: Select | None = None,
        template: Template | None = None,
        device: torch.device | None = None,
        name: str = "",
        tree: Node | None = None,
    ) -> None:
        self._segments, self._rule = segments, rule
        self._limits, self._allow_pickle = limits, allow_pickle
        manifests = [each.manifest for each in segments]
        odd = [*chain.from_iterable(each.odd for each in segments)]
        catalogue = Catalogue(manifests, limits=limits, odd=odd, tree=tree)
        own = None if template is None else template.wanted
        if callable(select):
            select = cache(select)  # the matcher may ask for a path again
        with collector_paused():
            found = match.match(catalogue, own, rule, select=select, name=name)
            found.check_meshes(catalogue)
        for warning in found.warnings:
            logger.warning("%s: %s", name, warning)
        self._catalogue, self._found = catalogue, found
        self._late = [_LateFill(*each) for each in zip(*found.copied, strict=True)]
        is_own = any(each.tensors is not None for each in segments)
        if is_own:  # nothing of these segments is read
            fills = starmap(_LateFill, zip(*found.straight, strict=True))
            self._late += (fill for fill in fills if self._is_made(fill.piece))
        self._result: object = None
        self._device = _NewOnDevice(device, segments, catalogue, found)
        nbytes = sys.maxsize if is_own else sum(each.total_bytes for each in manifests)
        count = len(catalogue)
        self._frame = Frame(found.tree, catalogue.entries(), count, nbytes)
        self._filled: _FilledTemplate | None = None
        if template is not None:
            self._filled = _FilledTemplate(template, found, rule, every=select is None)
            if rule.is_near:
                self._report_new()
        if rule.is_whole and own is not None:
            self.backings, late = _by_entry(catalogue, own, found)
            self._late += late

    @property
    def missing(self) -> Sequence[str]:
        """The wanted paths that the checkpoint or the template lacks."""
        return self._found.missing

    def _is_made(self, piece: int) -> bool:
        """Say whether a program has made the tensor of a piece already."""
        source = self._catalogue.source_of(piece)
        return self._segments[source].tensors is not None

    def _report_new(self) -> None:
        new = {*self._found.new}
        if first := next(
            (e for e in references(self._found.tree) if e.number in new), None
        ):
            logger.info(
                "%d of %d tensors get new memory: the template lacks them or they "
                "differ, first %s",
                *(len(new), self._frame.tensors, format_path(first.path)),
            )

    # ---------------------------------------------------------- values, and the result

    @property
    def values(self) -> Ranges:
        """The byte ranges of the values, if there is one segment."""
        (found,) = self.value_ranges()
        return found

    @property
    def uses_arena(self) -> bool:
        """Whether new tensors may lie over the arena."""
        return not self._rule.is_whole or bool(len(self._found.new))

    def value_ranges(self) -> list[Ranges]:
        """Return the byte ranges to read before `plans` is called, of each segment.

        Values that are no tensors are made first, because they may be malformed. In a
        whole receive they arrive with everything else, before the template is filled.
        """
        if self._rule.is_whole:
            return [()]
        found: list[list[tuple[int, int]]] = [[] for _ in self._segments]
        for piece in self._found.values:
            source, start, stop = self._catalogue.reach(piece)
            found[source].append((start, stop))
        return [*map(merged, found)]

    def plan(self) -> LoadPlan:
        """Return where the bytes of the only segment go; see `plans`."""
        (found,) = self.plans()
        return found

    def plans(self) -> list[LoadPlan]:
        """Return where the bytes of each segment go; the values must have been read.

        Raises:
            RemoteProtocolError: a value is malformed, or of an unregistered type.
        """
        with collector_paused():  # there may be 100,000 tensors
            if self._rule.is_whole:
                return [self._whole_plan()]
            self._result = self.decoded()
            return self._plans()

    def _whole_plan(self) -> LoadPlan:
        (manifest,) = self._catalogue.sources
        entries, found = manifest.entries, self._found
        stay: set[int] = set()
        if self._filled is None:
            self._ready, entries = self._tensors(), Entries()
        else:
            others = chain(found.new, found.values)
            stay.update(map(self._catalogue.whole_entry, others))
        if self._filled is None or not (self._late or stay):
            self._segments = ()  # nothing more is made of it, and it is large
            del self._catalogue
        kept = bytes(entry in stay for entry in range(len(entries)))
        return LoadPlan([(0, manifest.segment_bytes)], entries, self.backings, kept)

    def decoded(self) -> object:
        """Return what is taken, made of the template's tensors and of new ones."""
        filled = self._filled
        odd = _decoder_of_odd(self._segments, self._found.tree, self._device.device)
        state = assemble(
            self._frame,
            self._tensors() if self._ready is None else self._ready,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            wholes={} if filled is None else filled.own.wholes,
            nodes={**({} if filled is None else filled.nodes), ODD: odd},
        )
        made = dict(self._made({late.piece for late in self._late}))
        self._late = [_LateFill(*late[:2], made[late.piece]) for late in self._late]
        return state if filled is None else filled.plan(state)

    def _tensors(self) -> Sequence[torch.Tensor]:
        """Return a tensor for each number that the tree mentions."""
        found, segments = self._found, self._segments
        is_most = self._rule.is_whole or 2 * len(found.new) >= self._frame.tensors
        filled, device = self._filled, self._device
        if filled is None and device.device is None and is_most:
            return [*chain.from_iterable(map(_all_of, segments))]
        tensors = [_UNUSED] * self._frame.tensors
        if filled is not None:
            for piece, number in found.fills():
                tensors[piece] = filled.own.tensors[number]
        values, blobs = {*found.values}, found.blobs()
        stay = {*found.new} - device.moved
        for piece, tensor in self._made(stay, values - blobs, blobs):
            tensors[piece] = tensor
        device.allocate()
        for piece, tensor in self._made(device.straight.keys(), moved=True):
            tensors[piece] = tensor
        for piece, tensor in self._made(device.moved - device.straight.keys()):
            tensors[piece] = device.replica(tensor)
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
                    segment.buffer,
                    fresh=own[0],
                    parts=own[1],
                    blobs=own[2],
                    on_device=self._device.bases[source]
                    if moved
                    else segment.on_device,
                )
            yield from ((first + each, tensor) for each, tensor in made.items())

    # ---------------------------------------------------------------------- the bytes

    def _plans(self) -> list[LoadPlan]:
        """Plan where the bytes go, and what is copied in `finish`."""
        rows: list[list[_Row]] = [[] for _ in self._segments]
        kept: list[list[tuple[int, int]]] = [[] for _ in self._segments]
        for piece, number in zip(*self._found.straight, strict=True):
            source, start, stop = self._catalogue.reach(piece)
            if start < stop and self._segments[source].tensors is None:
                rows[source].append((start, stop, number))
        own = None if self._filled is None else self._filled.own
        device = self._device
        count = 0 if own is None else len(own.tensors)
        bases: list[torch.Tensor] = []
        for source, there in enumerate(device.bases):
            entries = self._segments[source].manifest.entries
            for entry, base in there.items():
                if base.numel() and not base.is_meta:
                    reach = entries.starts[entry], entries.stops[entry]
                    rows[source].append((*reach, count + len(bases)))
                    bases.append(base)
        arrive = {*self._found.new} - device.straight.keys()
        if device.device is not None and device.device.type == "meta":
            arrive -= device.moved
        for piece in chain(arrive, (late.piece for late in self._late)):
            source, start, stop = self._catalogue.reach(piece)
            kept[source].append((start, stop))
        held = HeldMemory.of(bases)
        if own is not None:
            held = own.held.beside(held)
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
        stay = ((start, stop, -1) for start, stop in merged(kept))
        every = sorted([*_merged(rows), *stay])
        starts, stops = (array("q", [row[at] for row in every]) for at in (0, 1))
        order = [row[2] for row in every]
        home = held.taken(order)
        sizes = array("q", [(e[1] - e[0]) * (e[2] >= 0) for e in every])
        return LoadPlan(
            merged((start, stop) for start, stop, _ in every),
            Spans(_LazyPaths(home.tensors, self._filled), starts, stops),
            Backings(home, home.addresses, sizes, {}, {}),
            bytes(number < 0 for number in order),
            allocated=self._device.device is not None,
        )

    # ---------------------------------------------------------------------- the end

    def changed(self) -> Sequence[torch.Tensor]:
        """Return the tensors of the template that have other elements once filled."""
        return () if self._filled is None else self._filled.changed

    def check(self) -> None:
        """Check that what is filled of the template is as it was."""
        if self._filled is not None:
            self._filled.contents.check()

    def assemble(self) -> object:
        """Return the state dict, which `finish` completes."""
        if self._rule.is_whole:
            self._result = self.decoded()
        return self._result

    def finish(self) -> Set[torch.device]:
        """Copy the tensors that arrived elsewhere; put values into the template.

        Return the devices that this thread's current stream has copied to.
        """
        if not self._rule.is_whole:  # its owner had much time to change it
            self.check()
        devices = self._device.finish()
        if (filled := self._filled) is None:
            return devices
        own = filled.own
        names = _LazyPaths(own.tensors, filled)
        for late in self._late:
            assert late.made is not None
            number, target = late.number, own.tensors[late.number]
            own.held.check(names.__getitem__, number, number + 1)
            _copy_elements(target, late.made)
            devices.add(target.device)
        self._late = []  # they keep the arena
        filled.finish()
        return devices


class _LateFill(NamedTuple):
    """A tensor of the template whose elements are copied at the end.

    Attributes:
        piece: The piece that it gets.
        number: Its number in the template.
        made: The tensor over the bytes of the piece, once that is made.
    """

    piece: int
    number: int
    made: torch.Tensor | None = None


class _FilledTemplate:
    """What a load fills of a template.

    Args:
        template: The template.
        found: What is taken of the sources.
        rule: Which differences are errors.
        every: Whether everything is selected.

    Attributes:
        own: The template as data, without what is large and no longer needed.
        nodes: Make named tuples and pytree nodes of its types.
        changed: The tensors that have other elements once they are filled.
        contents: What the template has now, of what is filled.
    """

    def __init__(
        self, template: Template, found: match.Matched, rule: match.Rule, *, every: bool
    ) -> None:
        own, self.nodes = template.wanted, template.nodes
        numbers = [*found.straight.tensors, *found.copied.tensors]
        self.changed = changed_of(own, numbers)
        if template.contents is None:
            filled, every = ids_of(own, numbers), every and not rule.is_near
            entries = entries_with(template.state_dict, filled, every=every)
            self.contents = Contents(entries)
        else:
            self.contents = template.contents
        self._adoption: Adoption | None = None
        if not rule.is_near:  # else the result is another state dict
            filled = ids_of(own, _doubtful(found))
            self._adoption = Adoption(template.state_dict, filled)
        self.own = replace(own, tree=None, codes=(), shapes=(), sizes=array("Q"))

    def plan(self, state: object) -> object:
        """Return the result; plan the assignments that make the template the same."""
        return state if self._adoption is None else self._adoption.plan(state)

    def finish(self) -> None:
        """Check that the template has what was filled, and assign the other values."""
        self.contents.check_filled()
        if self._adoption is not None:
            self._adoption.finish()


def _doubtful(found: match.Matched) -> Iterator[int]:
    """Yield the tensors for which the result may have another one.

    Their pieces are also those of other tensors, or of what is made anew.
    """
    pieces = array("q", found.straight.pieces)
    pieces.extend(found.copied.pieces)
    others = repeated(pieces).union(found.new, found.values)
    if not others.isdisjoint(pieces):
        yield from (number for piece, number in found.fills() if piece in others)


class _NewOnDevice:
    """New tensors on a device.

    Args:
        device: The device; None: new tensors stay in the memory of their segment.
        segments: The data segments.
        catalogue: What they hold.
        found: What is taken of them.

    Attributes:
        device: As the argument.
        moved: The new pieces that go to the device.
        straight: Those of them whose bytes are read straight to the device. For each,
            its source and entry, and the bytes of the entry.
        bases: The memory on the device of such entries, for each segment.
    """

    def __init__(
        self,
        device: torch.device | None,
        segments: Sequence[Segment],
        catalogue: Catalogue,
        found: match.Matched,
    ) -> None:
        self.device = device
        self.moved: set[int] = set()
        self.straight: dict[int, tuple[int, int, int]] = {}
        self.bases: list[dict[int, torch.Tensor]] = [{} for _ in segments]
        # By the address of a storage in host memory: its copy, and its bytes.
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if device is None:
            return
        rows = (each for each in mentions(found.tree) if each.leaf is None)
        numbers = chain.from_iterable(each.numbers for each in rows)
        # A piece that is a part of another value, too, must stay with it.
        self.moved = {*found.new}.intersection(numbers).difference(found.values)
        if not self.moved:
            return
        others = {*found.new} - self.moved
        others.update(found.values, found.straight.pieces, found.copied.pieces)
        busy = {*map(catalogue.entry_of, others)}
        for piece in self.moved:
            source, entry = catalogue.entry_of(piece)
            if (source, entry) not in busy and segments[source].tensors is None:
                entries = segments[source].manifest.entries
                nbytes = entries.stops[entry] - entries.starts[entry]
                self.straight[piece] = source, entry, nbytes

    def allocate(self) -> None:
        """Allocate the entries that are read straight to the device."""
        for source, entry, nbytes in self.straight.values():
            if entry not in (bases := self.bases[source]):
                bases[entry] = torch.empty(
                    nbytes, dtype=torch.uint8, device=self.device
                )

    def replica(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, whose storage gets its bytes in `finish`.

        Tensors that share a storage also share it on the device.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:
            return tensor.to(self.device)
        if (known := self._replicas.get(storage.data_ptr())) is None:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            base = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            known = self._replicas[storage.data_ptr()] = base, raw
        name, offset = DTYPE_NAMES[tensor.dtype], int(tensor.storage_offset())
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        spec = TensorSpec(0, name, shape, stride, offset, flags_of(tensor))
        return view_of(known[0], spec)

    def finish(self) -> set[torch.device]:
        """Copy the bytes of the replicas; return the devices that get some."""
        for base, raw in self._replicas.values():
            base.copy_(raw)
        bases = (base for base, _ in self._replicas.values())
        return {base.device for base in bases if not base.is_meta}


def _decoder_of_odd(
    segments: Sequence[Segment], tree: Node, device: torch.device | None
) -> Callable[[object], object]:
    """Return the decoder of values without an encoding, and of `HOLE`.

    Tensors of the state dict go to the device.

    Raises:
        UnsupportedLeafError: torch cannot move one there.
    """
    values: Iterable[Any] = chain.from_iterable(each.odd for each in segments)
    odd: dict[object, Any] = dict(enumerate(values))
    for path, tag, number in registered(tree) if odd and device else ():
        value = odd.get(number) if tag == ODD and isinstance(number, int) else None
        if isinstance(value, torch.Tensor):
            try:
                odd[number] = value.to(device)
            except (NotImplementedError, RuntimeError) as error:
                remedy = f"torch cannot move it to {device}"
                where, kind = format_path(path), kind_of(value)
                raise UnsupportedLeafError(where, kind, remedy) from error
    return lambda payload: (
        odd[payload]
        if type(payload) is int and payload in odd
        else match.decode_hole(payload)
    )


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


def _copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    lazy = [(each.is_conj(), each.is_neg()) for each in (target, source)]
    if lazy[0] == lazy[1]:  # words keep every bit, of a NaN, too
        target, source = physical(target), physical(source)
    destination, origin = once(target, source)
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        destination.copy_(origin)


class _LazyPaths(Sequence[str]):
    """The paths of some tensors; only errors ask for them."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], filled: _FilledTemplate | None
    ) -> None:
        self._tensors, self._filled = tensors, filled

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: Any) -> Any:
        if self._filled is None:
            return ""
        return self._filled.contents.name_of(self._tensors, number)


def _all_of(segment: Segment) -> Sequence[torch.Tensor]:
    """Return all tensors of a segment, over its memory."""
    if segment.tensors is not None:
        return segment.tensors
    return tensors_over(segment.manifest, segment.buffer, on_device=segment.on_device)


def changed_of(own: Wanted, numbers: Iterable[int]) -> list[torch.Tensor]:
    """Return those tensors of a template that have other elements once filled.

    A distributed tensor that counts its own writes is one of them, too.
    """
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
    catalogue: Catalogue, own: Wanted, found: match.Matched
) -> tuple[Backings, list[_LateFill]]:
    """Return the memory of each entry, and the fills that are copied in the end.

    An entry has memory if all of it goes straight there. Then its tensors overlap or
    meet in the same way on both sides.
    """
    entries, straight = catalogue.sources[0].entries, found.straight
    order, sizes = array("q", [-1]) * len(entries), array("Q", [0]) * len(entries)
    late: list[_LateFill] = []
    if not (catalogue.has_views or repeated(straight.pieces)):  # most have none
        for piece, number in zip(*straight, strict=True):
            order[piece], sizes[piece] = number, own.sizes[number]
    else:
        others = chain(found.new, found.values, found.copied.pieces)
        busy = {*map(catalogue.whole_entry, others)}
        homes: dict[int, list[_Fill]] = {}
        for piece, number in zip(*straight, strict=True):
            _, start, stop = catalogue.reach(piece)
            if start < stop:
                fill = _Fill(start, stop, own.held.addresses[number], piece, number)
                homes.setdefault(catalogue.whole_entry(piece), []).append(fill)
        for entry, fills in homes.items():
            fills.sort()
            first = fills[0]
            nbytes = 0 if entry in busy else _joint(entries.starts[entry], fills)
            if nbytes and _holds(own, first.number, nbytes):
                order[entry], sizes[entry] = first.number, nbytes
            else:
                late += (_LateFill(each.piece, each.number) for each in fills)
    held = own.held.taken(order)
    return Backings(held, held.addresses, sizes, {}, {}), late


class _Fill(NamedTuple):
    """The bytes of a piece, and the address of the tensor that gets them."""

    start: int
    stop: int
    address: int
    piece: int
    number: int


def _joint(start: int, fills: Sequence[_Fill]) -> int:
    """Return the bytes of fills that are an entry together; 0 if they are not."""
    reach, shift = start, fills[0].address - fills[0].start
    for each in fills:
        if each.address - each.start != shift or each.start > reach:
            return 0
        reach = max(reach, each.stop)
    return reach - start


def _holds(own: Wanted, number: int, nbytes: int) -> bool:
    """Say whether the storage of a tensor goes on for so many bytes."""
    tensor = own.tensors[number]
    offset = tensor.storage_offset() * tensor.itemsize
    return offset + nbytes <= own.held.storage_sizes[number]


def state_over(
    segments: Sequence[Segment], *, limits: Limits, allow_pickle: bool
) -> object:
    """Return the state dict over some segments, whose bytes have been read.

    Raises:
        RemoteProtocolError: a tree is malformed, or has a leaf of an unregistered type.
        DeviceMeshError: this process has no mesh for a distributed tensor.
    """
    rule = Matching(segments, match.LOAD, limits=limits, allow_pickle=allow_pickle)
    with collector_paused():  # there may be 100,000 tensors
        return rule.decoded()
