"""Plans which bytes of a checkpoint go into which memory.

A `LoadPlan` is the plan for one data segment. One of three rules makes it:

* `EverythingNew` makes new tensors over an arena.
* `IntoTemplate` fills a template that the checkpoint must fit, tensor by tensor.
* `Selected` loads selected paths, or the keys of a template, or both.

`IntoTemplate` needs no values for its plan, and no object for each tensor. `Selected`
needs both. `ValueWalk` walks the values of a checkpoint beside the template and decides
what to load, and where to. `LoadPlanner` records that, tensor by tensor. A dense tensor
of a template, in host memory or on a device, gets its bytes directly from the source if
no other tensor shares its entry. All other bytes arrive in the arena of the data
segment. The template's part of them is copied after everything has been read.

Nothing is read here, and nothing is changed before `Rule.finish`.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, zip_longest
from operator import add, attrgetter, mul
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from aiockpt.errors import (
    MissingKeysError,
    StateDictError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.format.entries import Entries
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Node
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.memory.arena import Arena
from aiockpt.memory.copies import Backings, CopyPlan, once
from aiockpt.memory.device import PortFor
from aiockpt.memory.held import HeldMemory, changed_error
from aiockpt.runtime.system import collector_paused
from aiockpt.state.containers import DICTS, Containers, apart, children, left_empty
from aiockpt.state.contents import PLAIN, Contents, Entry, is_noted
from aiockpt.state.distributed import has_version, take_apart
from aiockpt.state.nodes import decoders_for, opened
from aiockpt.state.overlaps import (
    Member,
    overlapping,
    repeats,
    runs,
    share_elements,
    span,
)
from aiockpt.state.rebuild import (
    Frame,
    OnDevice,
    assemble,
    parts_over,
    tensors_over,
)
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Select, Selection, below, item, pruned
from aiockpt.state.template import Match

__all__ = [
    "EverythingNew",
    "IntoTemplate",
    "LoadPlan",
    "LoadPlanner",
    "Ranges",
    "Rule",
    "Selected",
    "ValueWalk",
    "state_over",
]

logger = logging.getLogger("aiockpt")

_NOTHING: Final = object()
_PARAMETER: Final = re.compile(r"param_groups\[[0-9]+\]\.params\[[0-9]+\]$")
_NAMED: Final = (
    "optimizer.state_dict() numbers the parameters, and get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict names them: make the template by the one "
    "that made the saved state"
)


Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Half-open byte ranges of a data segment, in ascending order, without overlap."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where the bytes of one data segment go.

    Attributes:
        ranges: The bytes to read; adjacent ranges are joined.
        entries: The entries of the segment.
        backings: The memory that each entry's bytes go to directly; zero bytes for an
            entry that has none. None: all entries stay in the arena.
        kept: For each entry, whether its bytes stay in the arena.
        allocated: Whether the plan has allocated memory on a device, so that copies to
            it must wait for this thread's current stream.
    """

    ranges: Ranges
    entries: Entries
    backings: Backings | None = None
    kept: Sequence[int] = ()
    allocated: bool = False

    def copies(self, arena: Arena, ports: PortFor) -> CopyPlan | None:
        """Return the copies between the arena and the backings, or None."""
        if self.backings is None:
            return None
        return CopyPlan(self.backings, self.entries, arena=arena, port_for=ports)


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
        self._whole = (0, manifest.segment_bytes)
        self._entries = manifest.entries
        # Only a rule that makes tensors needs the rest of the manifest.
        makes = match.parts or match.blobs or match.fresh
        self._manifest = manifest if makes else None
        self.uses_arena = bool(match.fresh)

    def plan(self) -> LoadPlan:
        """Return a plan that reads everything, mostly into the template. Call once."""
        entries, self._entries = self._entries, Entries()  # frees much memory
        return LoadPlan([self._whole], entries, self._match.backings)

    def changed(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the template."""
        return self._match.changed()

    def check(self) -> None:
        """Check that the template is as it was."""
        if self._match.contents is not None:
            self._match.contents.check()

    def assemble(self) -> object:
        """Return the template, once `finish` has put the values into it."""
        match, values = self._match, dict[int, torch.Tensor]()
        if self._manifest is not None:
            values = parts_over(
                self._manifest,
                self._buffer,
                parts=match.parts,
                blobs=match.blobs,
                fresh=match.fresh,
                on_device=self._on_device,
            )
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
        """Put the values into the template."""
        if self._match.contents is not None:
            self._match.contents.check_filled()
        if self._match.adoption is not None:
            self._match.adoption.finish()


class Selected:
    """The rule for selected paths, for the keys of a template, or for both.

    The plan needs values, so their bytes are read first. A value that is not selected
    costs nothing. Its bytes are not read, and its type need not be registered.

    Args:
        segments: The data segments; several are shards of flat dicts.
        state: The state dict itself, if there are no segments.
        select: The selected paths.
        template: The state dict to fill; None: the result is new.
        device: The device for tensors that the template lacks; None: they stay in the
            memory of their segment.
        strict: Whether the checkpoint must have every wanted path, the template every
            selected one, and no container may be empty here and full there. Keys that
            only the checkpoint has never count.
        name: The name of the checkpoint, for errors.

    Attributes:
        missing: The wanted paths that the checkpoint or the template lacks.
    """

    uses_arena = True

    def __init__(
        self,
        segments: Sequence[Segment],
        state: object | None = None,
        *,
        select: Select | None,
        template: object | None,
        device: torch.device | None = None,
        strict: bool = False,
        name: str = "",
    ) -> None:
        if callable(select):
            select = cache(select)  # called here, and again by the walk
        self._segments, self._state = segments, state
        self._template, self._strict, self._name = template, strict, name
        self.missing: Sequence[str] = ()
        self._there, self._selection = Selection(select), Selection(select)
        self._trees = [
            each.manifest.tree
            if select is None
            else pruned(each.manifest.tree, self._there)
            for each in segments
        ]
        self._planner = LoadPlanner(segments, device=device)
        self._walk = ValueWalk(self._selection, self._planner)
        self._result: object = None
        self._contents: Contents | None = None

    def __repr__(self) -> str:
        return f"<Selected {self._planner}>"

    @property
    def values(self) -> Ranges:
        """The byte ranges of the values, if there is one segment."""
        (found,) = self.value_ranges()
        return found

    def value_ranges(self) -> list[Ranges]:
        """Return the byte ranges of each segment's values that are not tensors."""
        pairs = zip(self._segments, self._trees, strict=True)
        return [segment.value_ranges(tree) for segment, tree in pairs]

    def plan(self) -> LoadPlan:
        """Return where the bytes of the only segment go; see `plans`."""
        (found,) = self.plans()
        return found

    def plans(self) -> list[LoadPlan]:
        """Return where the bytes of each segment go.

        Raises:
            TemplateMismatchError: a value of the template has another type, shape or
                dtype; or the rule is strict and the template lacks a selected path, or
                has an empty container for a full one.
            MissingKeysError: the checkpoint lacks every key of the template; or the
                rule is strict and it lacks a selected path, or a key of the template.
            UnsupportedLeafError: a tensor of the template is not dense.
        """
        with collector_paused():  # there may be 100,000 tensors
            found = self._state
            if self._segments:
                found = state_over(self._segments, self._trees, self._template)
            self._result = self._walk.plan(self._template, found)
            self._contents = Contents(self._walk.entries)
            plans = self._planner.plans()
        unmet = self._selection.unmet()
        self.missing = [*dict.fromkeys([*self._walk.missing, *unmet])]
        if self.missing and (self._strict or self._walk.found_none):
            self._refuse(unmet)
        if detail := self._walk.apart():
            logger.warning("%s: %s", self._name, detail)
        for error in self._walk.empty:
            if self._strict:
                raise error
            logger.warning("%s: %s", self._name, error)
        return plans

    def _refuse(self, unmet: Sequence[str]) -> NoReturn:
        """Raise the error for unmet paths or missing keys of the template."""
        nowhere = {*unmet}
        if self._segments:
            nowhere.intersection_update(self._there.unmet())
        if missing := {*self._walk.missing, *nowhere}:
            none, detail = self._walk.found_none, self._walk.apart()
            raise MissingKeysError(
                self._name, sorted(missing), none=none, detail=detail
            )
        raise TemplateMismatchError(unmet[0], expected="a value", actual="nothing")

    def changed(self) -> Sequence[torch.Tensor]:
        """Return the tensors of the template that have other elements once filled."""
        return self._planner.changed

    def check(self) -> None:
        """Check that what is filled of the template is as it was."""
        assert self._contents is not None
        self._contents.check()

    def assemble(self) -> object:
        """Return the state dict, which `plans` has made."""
        return self._result

    def finish(self) -> None:
        """Copy the tensors that arrived elsewhere; put values into the template."""
        assert self._contents is not None
        self._contents.check()
        if self._planner.finish():
            self._contents.check_filled()
        self._walk.finish()


def state_over(
    segments: Sequence[Segment], trees: Sequence[Node], template: object = None
) -> object:
    """Return the state dict over some segments, which may not be filled yet.

    Named tuples and pytree nodes are of the template's types.
    """
    nodes = decoders_for(template)
    pairs = zip(segments, trees, strict=True)
    first, *others = (segment.assemble(tree, nodes) for segment, tree in pairs)
    for other in others:  # shards of another tool: flat dicts of tensors
        assert isinstance(first, dict)
        assert isinstance(other, dict)
        first.update(other)
    return first


@dataclass(frozen=True, slots=True)
class _Want:
    """The bytes of one entry, and a dense target with the same elements in order.

    Without a target the bytes stay in the segment's memory. ``number`` is that of the
    target in the planner.
    """

    start: int
    stop: int
    source: torch.Tensor
    target: torch.Tensor | None
    number: int

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for two wants of the same (tied) tensor."""
        target = self.target
        home = None if target is None else (target.device, target.data_ptr())
        return self.start, self.stop, home


class _Fill(NamedTuple):
    """A tensor of a template, and the tensor of the checkpoint that it gets."""

    path: str
    target: torch.Tensor
    source: torch.Tensor

    @property
    def shift(self) -> tuple[object, ...]:
        """A key that is equal for two fills that agree on the bytes they share."""
        target, source = self.target, self.source
        if target.stride() == source.stride():
            return (target.data_ptr() - source.data_ptr(),)
        ends = ((each.data_ptr(), each.stride()) for each in (target, source))
        return (*ends, target.shape)

    def check(self) -> None:
        """Check that no two elements of the target have the same memory.

        Raises:
            TemplateMismatchError: two have; one of their values would be lost.
        """
        path, target, source = self
        if repeats(target) and _steps(target) != _steps(source):
            raise TemplateMismatchError(
                path,
                expected=f"{_words(source)}, all elements apart",
                actual=f"elements that share memory: stride {[*target.stride()]}",
                detail="put a copy by contiguous() there",
            )


def _check_apart(
    fills: Mapping[int, _Fill], held: HeldMemory, sizes: array[int]
) -> None:
    """Refuse two tensors of a checkpoint for the same memory: one would be lost.

    Raises:
        TemplateMismatchError: there are two, which is no matter of their values.
    """
    by_device: dict[torch.device, list[Member]] = {}
    for number in sorted(overlapping(held.addresses, sizes)):
        path, target, _ = fills[number]
        member = Member(target, path, number)
        by_device.setdefault(target.device, []).append(member)
    for run in chain.from_iterable(map(runs, by_device.values())):
        shifts = {each.number: fills[each.number].shift for each in run}
        if len({*shifts.values()}) == 1:
            continue
        for at, one in enumerate(run):
            for other in run[:at]:
                differ = shifts[one.number] != shifts[other.number]
                if differ and share_elements([other], one):
                    first, second = sorted((one, other), key=attrgetter("number"))
                    raise TemplateMismatchError(
                        second.name,
                        expected="memory of its own",
                        actual=f"memory shared with {first.name}",
                    )


class LoadPlanner:
    """Records which tensors of some data segments a load needs, and where.

    Args:
        segments: The segments to read from.
        device: The device for tensors that the template lacks; None: they stay in the
            memory of their segment.

    Attributes:
        changed: The tensors of the template that have other elements once filled.
    """

    def __init__(
        self, segments: Sequence[Segment], *, device: torch.device | None
    ) -> None:
        self.changed: list[torch.Tensor] = []
        self._device = device
        self._segments = segments
        self._wants: list[dict[int, list[_Want]]] = [{} for _ in segments]
        self._targets: list[torch.Tensor] = []
        self._fills: dict[int, _Fill] = {}  # by the numbers of their targets
        self._held = HeldMemory.of(())  # the memory of the targets, as of `plans`
        self._copies: list[tuple[int, torch.Tensor]] = []  # to the numbered target
        self._bases: dict[int, torch.Tensor] = {}
        self._replicas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"<LoadPlanner entries={sum(map(len, self._wants))}>"

    def keep(self, tensor: torch.Tensor) -> None:
        """Load a segment's tensor into the segment's own memory."""
        self._want(tensor)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Load a segment's tensor to the load's device; return the tensor there."""
        if self._device is None:
            self.keep(tensor)
            return tensor
        if not is_dense(tensor) or self._device.type == "meta" or not tensor.numel():
            return tensor.to(self._device)
        known = self._replicas.get(id(tensor))
        if known is None:
            known = self._replicas[id(tensor)] = (self._replica(tensor), tensor)
        return known[0]

    def fill(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        path: str,
        *,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Load the elements of a segment's tensor into one of the template's."""
        if not source.numel():
            return
        self._fills[len(self._targets)] = _Fill(path, target, source)
        self._targets.append(target)
        self.changed.append(target)
        if whole is not None and has_version(whole):
            self.changed.append(whole)

    def plans(self) -> list[LoadPlan]:
        """Return the plan of each segment.

        The memory of the targets is held first. What is decided here is true of it.

        Raises:
            TemplateMismatchError: two tensors, or two elements, go to the same memory
                of the template.
            UnsupportedLeafError: a tensor of the template has no memory.
        """
        self._held = HeldMemory.of(self._targets)
        sizes = array("Q", map(span, self._targets))
        self._check_memory(sizes)
        _check_apart(self._fills, self._held, sizes)
        for number, (path, target, source) in self._fills.items():
            alike = is_dense(target) and is_dense(source) and _are_alike(target, source)
            if alike and sizes[number] != span(source):
                raise changed_error(path, "got another shape")
            if not (alike and self._want(source, number)):
                self.keep(source)
                self._copies.append((number, source))
        return [*map(self._plan, self._segments, self._wants)]

    def _check_memory(self, sizes: array[int]) -> None:
        """Check that each element of a target has memory, and of its own."""
        storage_sizes = self._held.storage_sizes
        offsets = map(torch.Tensor.storage_offset, self._targets)
        starts = map(mul, offsets, map(attrgetter("itemsize"), self._targets))
        for number, stop in enumerate(map(add, starts, sizes)):
            # A sharded module frees the storage of a parameter that it has gathered.
            if stop > storage_sizes[number]:
                why = "its memory has been freed"
                raise UnsupportedLeafError(self._path_of(number), "tensor", why)
        for number, dense in enumerate(map(torch.Tensor.is_contiguous, self._targets)):
            if not dense:
                self._fills[number].check()

    def finish(self) -> bool:
        """Copy the tensors that arrived elsewhere; return whether there were some.

        Raises:
            LocalProtocolError: a target has other memory.
        """
        for number, source in self._copies:
            target = self._targets[number]
            self._held.check(self._path_of, number, number + 1)
            destination, origin = once(target, source)
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                destination.copy_(origin)
        return bool(self._copies)

    def _path_of(self, number: int) -> str:
        return self._fills[number].path if number in self._fills else ""

    def _want(self, source: torch.Tensor, number: int | None = None) -> bool:
        """Record a want of a target; return False if no segment has the bytes."""
        if not is_dense(source) or not source.numel():
            return False
        target = None if number is None else self._targets[number]
        address, nbytes = source.data_ptr(), span(source)
        for segment, wants in zip(self._segments, self._wants, strict=True):
            start = segment.offset_of(address)
            if start is not None:
                at = -1 if number is None else number
                want = _Want(start, start + nbytes, source, target, at)
                wants.setdefault(segment.entry_at(start), []).append(want)
                return True
        return False

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, whose storage will be loaded.

        Tensors that share a storage also share it on the device.
        """
        storage = tensor.untyped_storage()
        base = self._bases.get(storage.data_ptr())
        if base is None:
            nbytes = storage.nbytes()
            base = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._bases[storage.data_ptr()] = base
            raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            number = len(self._targets)
            self._targets.append(base)
            if not self._want(raw, number):
                self._copies.append((number, raw))
        return _like(tensor, base)

    def _plan(self, segment: Segment, entries: dict[int, list[_Want]]) -> LoadPlan:
        starts = segment.manifest.entries.starts
        straight: dict[int, _Want] = {}
        for entry, wants in entries.items():
            first = wants[0]
            whole = first.target is not None and first.start == starts[entry]
            alone = len(wants) == 1 or len({want.identity for want in wants}) == 1
            if whole and alone:
                straight[entry] = first
        for entry in [*_sharing(straight)]:
            del straight[entry]
        kept = bytearray(len(starts))
        ranges: list[tuple[int, int]] = []
        for entry, wants in entries.items():
            ranges += ((want.start, want.stop) for want in wants)
            if entry not in straight:
                kept[entry] = True
                distinct = {want.identity: want for want in wants}.values()
                self._copies += (
                    (want.number, want.source)
                    for want in distinct
                    if want.target is not None
                )
        return LoadPlan(
            _joined(ranges),
            segment.manifest.entries,
            self._backings(len(starts), straight),
            kept,
            allocated=self._device is not None,
        )

    def _backings(self, count: int, straight: dict[int, _Want]) -> Backings:
        order, sizes = [-1] * count, array("q", [0]) * count
        for entry, want in straight.items():
            order[entry], sizes[entry] = want.number, want.stop - want.start
        held = self._held.taken(order)
        return Backings(held, held.addresses, sizes, {}, {})


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _sharing(straight: dict[int, _Want]) -> Iterator[int]:
    """Yield the entries whose targets overlap others in memory."""
    homes: dict[torch.device, list[tuple[int, int, int]]] = {}
    for entry, want in straight.items():
        assert want.target is not None
        address = want.target.data_ptr()
        reach = address, address + want.stop - want.start, entry
        homes.setdefault(want.target.device, []).append(reach)
    for reaches in homes.values():
        cluster: list[int] = []
        end = 0
        for address, stop, entry in sorted(reaches):
            if address >= end:
                if len(cluster) > 1:
                    yield from cluster
                cluster = []
            cluster.append(entry)
            end = max(end, stop)
        if len(cluster) > 1:
            yield from cluster


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is an ordinary strided one."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _are_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Say whether two tensors have the same bytes in the same order, without gaps."""
    if (target.is_conj(), target.is_neg()) != (source.is_conj(), source.is_neg()):
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    dense = target.permute(order).is_contiguous()
    return dense and target.stride() == source.stride()


def _steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that have any."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


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


class ValueWalk(Containers):
    """Walks a checkpoint's values beside a template, and tells the planner its needs.

    Args:
        selection: The selected paths.
        planner: Records the tensors to load.

    Attributes:
        missing: The keys of the template that the checkpoint lacks.
        empty: An error for each container that is empty here and full there. It stays
            empty.
        entries: What is filled of the template.
    """

    def __init__(self, selection: Selection, planner: LoadPlanner) -> None:
        super().__init__()
        self.missing: list[str] = []
        self.empty: list[TemplateMismatchError] = []
        self._found = False
        self._apart: Callable[[], str] | None = None
        self._optimizers: set[str] = set()  # the paths of their states
        self.entries: list[Entry] = []
        self._selection = selection
        self._planner = planner
        self._in_leaf = 0  # the depth inside a value that is selected as a whole

    def __repr__(self) -> str:
        return f"<ValueWalk missing={len(self.missing)}>"

    def plan(self, template: object | None, found: object) -> object:
        """Return the result of the load; it is complete after `finish`.

        Raises:
            TemplateMismatchError: a value of the template is of another type, or a
                tensor of another shape or dtype, than the checkpoint's.
            UnsupportedLeafError: a tensor of the template is not dense.
        """
        if template is not None:
            self._selection.takes("")  # the root always matches
            return self._into(template, found, "")
        chosen = self._chosen(found, "")
        return {} if chosen is _NOTHING else chosen

    @property
    def found_none(self) -> bool:
        """Whether the checkpoint has nothing of what the template wants."""
        return bool(self.missing) and not self._found

    def apart(self) -> str:
        """Return how the keys of the first dict with missing keys differ."""
        return "" if self._apart is None else self._apart()

    def _chosen(self, value: object, path: str) -> object:
        """Return the selected part of a value, or `_NOTHING`."""
        if self._selection.takes(path):
            return self._taken(value)
        if type(value) in DICTS:
            return self._chosen_of_dict(value, path)
        if type(value) is list:
            items = [self._chosen(v, item(path, i)) for i, v in enumerate(value)]
            if all(each is _NOTHING for each in items):
                return _NOTHING
            return [None if each is _NOTHING else each for each in items]
        return self._taken(value) if self._selection.takes_leaf(path) else _NOTHING

    def _chosen_of_dict(self, value: Any, path: str) -> object:
        if not self._selection.enters(path):
            return _NOTHING
        for key in [*value]:
            chosen = self._chosen(value[key], below(path, key))
            if chosen is _NOTHING:
                del value[key]
            else:
                value[key] = chosen
        return value or _NOTHING

    def _taken(self, value: object) -> object:
        """Return a value of the checkpoint, and load all of its tensors."""
        return _mapped(value, self._wanted)

    def _wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = _parts(tensor)
        if parts is None:
            return self._planner.take(tensor)
        for part in parts.tensors:
            self._planner.keep(part)
        return tensor

    def _into(self, target: object, value: object, path: str) -> object:
        if self._is_left_empty(target, value, path):
            return target
        if not (isinstance(target, dict | list) and target):
            self._found = True
        if target is None or (isinstance(target, torch.Tensor) and _is_meta(target)):
            if target is not None:
                _check_tensor(target, value, path)
            return self._anew(value, path)
        if isinstance(value, torch.Tensor):
            return self._into_tensor(target, value, path)
        if not isinstance(target, dict if type(value) in DICTS else type(value)):
            raise _mismatch(path, value, target)
        if isinstance(target, dict):
            return self._into_dict(target, value, path)
        if isinstance(target, list):
            return self._into_list(target, value, path)
        if type(target) is type(value):
            old, new = children(target), children(value)
            if old is not None and new is not None and len(old) == len(new):
                items = self._items(old, new, path)
                self._note(target, path, _kept(children(target) or (), items))
                return self._rebuilt(target, value, items)
        return self._taken(value)

    def _is_left_empty(self, target: object, value: Any, path: str) -> bool:
        """Say whether a container is empty here, and has selected items there."""
        kind = dict if isinstance(target, dict) else type(target)
        if kind not in (dict, list, tuple, deque) or target:
            return False
        if not (isinstance(value, kind) and value and self._selects(value, path)):
            return False
        optimizer = path in self._optimizers
        self.empty.append(
            left_empty(path, kind, value, optimizer=optimizer, whole=False)
        )
        return True

    def _selects(self, value: Any, path: str) -> bool:
        """Say whether something at or below a path is selected."""
        if self._in_leaf or self._selection.takes(path):
            return True
        if type(value) in DICTS:
            return any(self._selects(value[key], below(path, key)) for key in value)
        if type(value) is list:
            items = enumerate(value)
            return any(self._selects(each, item(path, at)) for at, each in items)
        return self._selection.takes_leaf(path)

    def _into_dict(self, target: dict[Any, Any], value: Any, path: str) -> object:
        if "param_groups" in value:
            self._optimizers.add(below(path, "state"))
        filled: dict[Any, Any] = {}
        for key, old in target.items():
            where = below(path, key)
            if key not in value:
                if lacking := [*self._lacking(old, where)]:
                    self.missing += lacking
                    self._apart = self._apart or partial(apart, target, value, path)
            elif self._is_selected(value[key], where):
                new = filled[key] = self._into(old, value[key], where)
                self._put(target, key, old, new)
                if new is not old:
                    del filled[key]
        self._note(target, path, filled)
        return target

    def _lacking(self, value: Any, path: str) -> Iterator[str]:
        """Yield the selected paths at and below one that the checkpoint lacks."""
        if self._in_leaf or self._selection.takes(path):
            yield path
        elif isinstance(value, dict):
            for key, each in value.items():
                yield from self._lacking(each, below(path, key))
        elif isinstance(value, list):
            for at, each in enumerate(value):
                yield from self._lacking(each, item(path, at))
        elif self._selection.takes_leaf(path):
            yield path

    def _note(self, container: Any, path: str, filled: dict[Any, Any]) -> None:
        """Note the tensors and containers of a template that will be filled."""
        noted = {key: value for key, value in filled.items() if is_noted(value)}
        if noted:
            above = (path,) if path else ()
            self.entries.append(Entry(above, container, [*noted], [*noted.values()]))

    def _items(self, old: Sequence[Any], new: Sequence[Any], path: str) -> list[Any]:
        self._in_leaf += 1
        pairs = enumerate(zip(old, new, strict=True))
        found = [self._into(*pair, item(path, at)) for at, pair in pairs]
        self._in_leaf -= 1
        return found

    def _anew(self, value: object, path: str) -> object:
        """Return the selected part of a value that the template lacks."""
        if self._in_leaf or type(value) not in (*DICTS, list):
            return self._taken(value)
        chosen = self._chosen(value, path)
        return None if chosen is _NOTHING else chosen

    def _into_list(self, target: list[Any], value: Any, path: str) -> object:
        if len(target) > len(value):
            expected, actual = (f"a list of {len(at)}" for at in (value, target))
            raise TemplateMismatchError(path, expected=expected, actual=actual)
        found = [*target]
        for at, (mine, theirs) in enumerate(zip_longest(target, value)):
            where = item(path, at)
            if self._is_selected(theirs, where):
                # The list grows up to its last selected item only.
                found += [None] * (at + 1 - len(found))
                found[at] = self._into(mine, theirs, where)
        self._note(target, path, _kept(target, found))
        self._assign_items(target, found)
        return target

    def _is_selected(self, value: object, path: str) -> bool:
        if self._in_leaf or self._selection.everything or self._selection.takes(path):
            return True
        if type(value) in (*DICTS, list):
            return self._selection.enters(path)
        return self._selection.takes_leaf(path)

    def _into_tensor(
        self, target: object, value: torch.Tensor, path: str
    ) -> torch.Tensor:
        if not isinstance(target, torch.Tensor):
            raise _mismatch(path, value, target)
        mine, theirs = _parts(target), _parts(value)
        # Torch does not know the dtype of a distributed tensor without local parts.
        if all(parts is None or parts.tensors for parts in (mine, theirs)):
            _check_tensor(target, value, path)
        if mine is None and theirs is None:
            _check_layout(target, path)
            self._planner.fill(target, value, path)
            return target
        if mine is None or theirs is None or not _same_layout(mine, theirs):
            kinds = [
                "a tensor" if each is None else each.layout.tag
                for each in (theirs, mine)
            ]
            layouts = [f"{kind} of another layout" for kind in kinds]
            expected, actual = layouts if kinds[0] == kinds[1] else kinds
            raise TemplateMismatchError(path, expected=expected, actual=actual)
        for own, part in zip(mine.tensors, theirs.tensors, strict=True):
            _check_tensor(own, part, path)
            self._planner.fill(own, part, path, whole=target)
        return target


def _kept(old: Sequence[Any], new: Sequence[Any]) -> dict[int, Any]:
    """Return the items that stay, by their positions."""
    pairs = enumerate(zip(old, new, strict=False))
    return {at: mine for at, (mine, theirs) in pairs if mine is theirs}


def _parts(tensor: torch.Tensor) -> Any:
    """Return the parts of a distributed tensor; None for other tensors."""
    return None if type(tensor) in PLAIN else take_apart(tensor, ())


def _is_meta(target: torch.Tensor) -> bool:
    parts = _parts(target)
    if parts is None:
        return target.is_meta
    return bool(parts.tensors) and all(part.is_meta for part in parts.tensors)


def _same_layout(mine: Any, theirs: Any) -> bool:
    """Say whether the parts of one can replace the parts of the other."""
    if len(mine.tensors) != len(theirs.tensors):
        return False
    return bool(mine.layout.comparable() == theirs.layout.comparable())


def _check_layout(target: torch.Tensor, path: str) -> None:
    """Refuse tensors made of other tensors, such as sparse ones: sizes may differ."""
    if target.layout is not torch.strided:
        remedy = "what it is made of cannot be filled; put None in its place"
        raise UnsupportedLeafError(path, f"{target.layout} tensor", remedy)


def _check_tensor(target: torch.Tensor, value: object, path: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise _mismatch(path, value, target)
    if target.shape != value.shape or target.dtype != value.dtype:
        raise _mismatch(path, value, target)


def _mismatch(path: str, value: object, target: object) -> StateDictError:
    if remedy := remedy_for(target):
        return unsupported(target, path, remedy)
    expected, actual = _words(value), _words(target)
    one_is_named = {type(value), type(target)} == {int, str}
    detail = _NAMED if one_is_named and _PARAMETER.search(path) else ""
    return TemplateMismatchError(path, expected=expected, actual=actual, detail=detail)


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return f"an {kind}" if kind == "OrderedDict" else f"a {kind}"
    return f"a value of type {kind}"


def _mapped(value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors replaced; its own containers are changed."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return put(value)
    if kind in DICTS:
        for key in value:
            value[key] = _mapped(value[key], put)
        if kind is OrderedDict:
            _mapped(vars(value), put)
    elif kind is list:
        value[:] = _each(value, put)
    elif kind in (tuple, set, frozenset):
        return kind(_each(value, put))
    elif kind is deque:
        return deque(_each(value, put), value.maxlen)
    elif (inside := opened(value)) is not None:
        return inside.make(_each(inside.children, put))
    return value


def _each(
    values: Iterable[Any], put: Callable[[torch.Tensor], torch.Tensor]
) -> Sequence[Any]:
    return [_mapped(value, put) for value in values]
