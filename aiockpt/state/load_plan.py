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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from operator import itemgetter, lt
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.entries import Entries
from aiockpt.format.limits import Limits
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
from aiockpt.state.distributed import has_version
from aiockpt.state.flatten import ODD, Wanted, wanted
from aiockpt.state.leaves import kind_of
from aiockpt.state.mesh import merged
from aiockpt.state.nodes import decoders_for
from aiockpt.state.rebuild import (
    Frame,
    assemble,
    parts_over,
    tensors_over,
)
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Select

__all__ = [
    "LoadPlan",
    "Matching",
    "Ranges",
    "Template",
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

    def __repr__(self) -> str:
        return f"<Template tensors={len(self.wanted.tensors)}>"


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
        missing: The wanted paths that the checkpoint or the template lacks.
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
        self._segments, self._device, self._rule = segments, device, rule
        self._limits, self._allow_pickle = limits, allow_pickle
        manifests = [each.manifest for each in segments]
        odd = self._odd = [*chain.from_iterable(each.odd for each in segments)]
        self._catalogue = Catalogue(manifests, limits=limits, odd=odd, tree=tree)
        own = self._own = None if template is None else template.wanted
        if callable(select):
            select = cache(select)  # the matcher may ask for a path again
        with collector_paused():
            found = match.match(self._catalogue, own, rule, select=select, name=name)
            found.check_meshes(self._catalogue)
        for warning in found.warnings:
            logger.warning("%s: %s", name, warning)
        self.missing, self._found = found.missing, found
        self._nodes = {} if template is None else template.nodes
        self._late = [*zip(*found.copied, strict=True)]  # pieces, and tensors
        is_own = any(each.tensors is not None for each in segments)
        if is_own:  # nothing of these segments is read
            fills = zip(*found.straight, strict=True)
            self._late += (fill for fill in fills if self._is_made(fill[0]))
        self._result: object = None
        self._adoption: Adoption | None = None
        self._contents: Contents | None = None
        self._changed: Sequence[torch.Tensor] = ()
        self._moved = self._new_for_device()
        self._straight_there = self._alone(self._moved)
        self._bases: list[dict[int, torch.Tensor]] = [{} for _ in segments]
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: list[tuple[int, torch.Tensor]] = []  # to a tensor of the template
        nbytes = sys.maxsize if is_own else sum(each.total_bytes for each in manifests)
        count = len(self._catalogue)
        self._frame = Frame(found.tree, self._catalogue.entries(), count, nbytes)
        if template is not None:
            self._note(template, every=select is None)
        if rule.is_whole and own is not None:
            self.backings, late = _by_entry(self._catalogue, own, found)
            self._late += late
        if own is not None:  # the rest is large
            self._own = replace(own, tree=None, codes=(), shapes=(), sizes=array("Q"))

    def __repr__(self) -> str:
        return f"<Matching tensors={self._frame.tensors}>"

    def _is_made(self, piece: int) -> bool:
        """Say whether a program has made the tensor of a piece already."""
        source = self._catalogue.source_of(piece)
        return self._segments[source].tensors is not None

    def _note(self, template: Template, *, every: bool) -> None:
        """Note what is filled of the template, and what it has now."""
        own, found = template.wanted, self._found
        numbers = [*found.straight.tensors, *found.copied.tensors]
        self._changed = changed_of(own, numbers)
        self._contents = template.contents
        if self._contents is None:
            filled = ids_of(own, numbers)
            every = every and self._rule is not match.NEAR
            entries = entries_with(template.state_dict, filled, every=every)
            self._contents = Contents(entries)
        if self._rule is match.NEAR:  # the result is another state dict
            self._report_new()
        else:
            filled = ids_of(own, self._doubtful())
            self._adoption = Adoption(template.state_dict, filled)

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

    def _doubtful(self) -> Iterator[int]:
        """Yield the tensors for which the result may have another one.

        Their pieces are also those of other tensors, or of what is made anew.
        """
        found = self._found
        made = {*found.new, *found.values}
        pieces = array("q", found.straight.pieces)
        pieces.extend(found.copied.pieces)
        if _has_repeated(pieces) or not made.isdisjoint(pieces):
            count = Counter(pieces)
            for piece, number in self._fills():
                if count[piece] > 1 or piece in made:
                    yield number

    def _fills(self) -> Iterator[tuple[int, int]]:
        """Yield the pieces that go to the template, and the tensors that they fill."""
        yield from zip(*self._found.straight, strict=True)
        yield from zip(*self._found.copied, strict=True)

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
        if self._own is None:
            self._ready, entries = self._tensors(), Entries()
        else:
            others = chain(found.new, found.values)
            stay.update(map(self._catalogue.whole_entry, others))
        if self._own is None or not (self._late or stay):
            self._segments = ()  # nothing more is made of it, and it is large
            del self._catalogue
        kept = bytes(entry in stay for entry in range(len(entries)))
        return LoadPlan([(0, manifest.segment_bytes)], entries, self.backings, kept)

    def decoded(self) -> object:
        """Return what is taken, made of the template's tensors and of new ones."""
        state = assemble(
            self._frame,
            self._tensors() if self._ready is None else self._ready,
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            wholes={} if self._own is None else self._own.wholes,
            nodes={**self._nodes, ODD: self._odd_decoder()},
        )
        made = dict(self._made({piece for piece, _ in self._late}))
        self._copies = [(number, made[piece]) for piece, number in self._late]
        return state if self._adoption is None else self._adoption.plan(state)

    def _odd_decoder(self) -> Callable[[object], object]:
        """Return the decoder of values without an encoding, and of `HOLE`.

        Tensors of the state dict go to the device.

        Raises:
            UnsupportedLeafError: torch cannot move one there.
        """
        odd: dict[object, Any] = dict(enumerate(self._odd))
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
            else match.decode_hole(payload)
        )

    def _tensors(self) -> Sequence[torch.Tensor]:
        """Return a tensor for each number that the tree mentions."""
        found, segments = self._found, self._segments
        is_most = self._rule.is_whole or 2 * len(found.new) >= self._frame.tensors
        if self._own is None and self._device is None and is_most:
            return [*chain.from_iterable(map(_all_of, segments))]
        tensors = [_UNUSED] * self._frame.tensors
        if self._own is not None:
            for piece, number in self._fills():
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
                    segment.buffer,
                    fresh=own[0],
                    parts=own[1],
                    blobs=own[2],
                    on_device=self._bases[source] if moved else segment.on_device,
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
        for piece, number in zip(*self._found.straight, strict=True):
            source, start, stop = self._catalogue.reach(piece)
            if start < stop and self._segments[source].tensors is None:
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
        for piece in chain(arrive, map(itemgetter(0), self._late)):
            source, start, stop = self._catalogue.reach(piece)
            kept[source].append((start, stop))
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
        stay = ((start, stop, -1) for start, stop in merged(kept))
        every = sorted([*_merged(rows), *stay])
        starts, stops = (array("q", [row[at] for row in every]) for at in (0, 1))
        order = [row[2] for row in every]
        home = held.taken(order)
        sizes = array("q", [(e[1] - e[0]) * (e[2] >= 0) for e in every])
        return LoadPlan(
            merged((start, stop) for start, stop, _ in every),
            Spans(_LazyPaths(home.tensors, self._contents), starts, stops),
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
        bases = (base for base, _ in self._replicas.values())
        devices = {base.device for base in bases if not base.is_meta}
        for base, raw in self._replicas.values():
            base.copy_(raw)
        own = self._own
        names = _LazyPaths(() if own is None else own.tensors, self._contents)
        for number, source in self._copies:
            assert own is not None
            own.held.check(names.__getitem__, number, number + 1)
            _copy_elements(own.tensors[number], source)
            devices.add(own.tensors[number].device)
        self._copies = []  # they keep the arena
        if self._contents is not None:
            self._contents.check_filled()
        if self._adoption is not None:
            self._adoption.finish()
        return devices


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
    return tensors_over(segment.manifest, segment.buffer, on_device=segment.on_device)


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
) -> tuple[Backings, list[tuple[int, int]]]:
    """Return the memory of each entry, and the fills that are copied in the end.

    An entry has memory if all of it goes straight there. Then its tensors overlap or
    meet in the same way on both sides.
    """
    entries, straight = catalogue.sources[0].entries, found.straight
    order, sizes = array("q", [-1]) * len(entries), array("Q", [0]) * len(entries)
    late: list[tuple[int, int]] = []
    if not (catalogue.has_views or _has_repeated(straight.pieces)):  # most have none
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
                late += ((each.piece, each.number) for each in fills)
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


def _has_repeated(pieces: Sequence[int]) -> bool:
    """Say whether a piece is there twice; a set of all of them takes much memory."""
    return not all(map(lt, pieces, islice(pieces, 1, None))) and (
        len({*pieces}) < len(pieces)
    )


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
