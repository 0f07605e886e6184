"""One receive, stage by stage, from a peer's manifest to a state dict.

Read `receive` first. Transports differ only in their `Source`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import return_freed
from aiockpt.memory.device import Marks, completed
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import run_all
from aiockpt.state.distributed import has_version
from aiockpt.state.flatten import Survey, survey
from aiockpt.state.load_plan import Matching, Template
from aiockpt.state.match import LAX, LOAD
from aiockpt.state.segment import Segment
from aiockpt.state.selection import Select
from aiockpt.transfer.deltas import is_available
from aiockpt.transfer.destination import Destination, Terms, selected
from aiockpt.transfer.prepared import Prepared
from aiockpt.transfer.reuse import Delta, Held, HeldInTemplate
from aiockpt.transfer.source import Source
from aiockpt.transport import exact_step

_MANY = 1 << 20  # bytes of a header: thousands of tensors
_SAMPLE = 8  # chunks that show whether many are unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """The options of one receive.

    Attributes:
        into: A state dict to fill.
        terms: Bounds of the receive, and its memory.
        have: A state dict that may hold some of the bytes already. It may be ``into``.
        select: The paths to receive; None: everything.
        progress: Called as bytes arrive.
        template: Called on the loop if there is no ``into``. The result is filled as
            far as the checkpoint fits it.
        keys: Whether to receive only the keys of ``into``, which may have more or fewer
            keys than the checkpoint.
        strict: Whether every selected path must exist.
        device: The device for tensors that ``into`` lacks; None: host memory.
        hold: Whether to stop before ``into`` is filled, and return a `Prepared`.
    """

    into: object | None
    terms: Terms
    have: object | None = None
    select: Select | None = None
    progress: Callable[[Progress], None] | None = None
    template: Callable[[], object] | None = None
    keys: bool = False
    strict: bool = True
    device: torch.device | None = None
    hold: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the whole checkpoint is received, without ``keys`` or ``device``."""
        return self.select is None and self.device is None and not self.keys


class Received(NamedTuple):
    """A state dict, and the wanted paths that the checkpoint lacks.

    With ``hold``, the state dict is a `Prepared`.
    """

    state_dict: object
    missing: Sequence[str]


async def receive(
    source: Source,
    step: int,
    options: ReceiveOptions,
    bridge: Bridge,
    deadline: Deadline,
) -> Received:
    """Return the state dict of ``step``.

    If this fails or is cancelled, a template is unchanged or complete, unless
    ``direct`` lets bytes into it as they arrive. A note of the error says whether the
    template was modified.
    """
    report = _Report(options.progress, deadline)
    room: _Room | None = None
    made: list[_Room] = []
    state: object = None
    into, touched, asked = options.into, False, time.monotonic()
    try:
        step = exact_step(step)
        with failing_here(f"receiving step {step}"):
            async with source:
                known = _PlanInputs()
                if into is None and options.template is not None:
                    into = options.template()
                    # It may have enqueued work, on another task's stream.
                    await completed(*Marks.of(options.terms.ports).events.values())
                if into is not None or options.have is not None:
                    report.at("allocate")
                    known = await bridge.run(_describe, options, into)
                report.at("fetch_manifest")
                known.manifest = await source.manifest(step)
                outline, started = known.manifest.outline, time.monotonic()

                report.at("allocate")
                # A part may be less than the checkpoint: its plan looks at its size.
                most = options.terms.limits.max_bytes if options.is_whole else None
                await source.map(outline, most=most)
                make = partial(_make_room, source, options, bridge, report)
                room = await bridge.run(make, known)
                # The plan of a selection looks at values, so their chunks come first.
                await _fetch(source, outline, room, room.goal.values, report)
                report.at("allocate")
                rest = await bridge.run(_place, room.goal, options)
                # A rank cannot stop a send that it has begun, so the plan comes first.
                await source.accept(step)
                await _fetch(source, outline, room, rest, report)

                report.at("rebuild")
                # Everything that a peer can cause to fail precedes the load.
                state = await room.goal.assemble()
                await source.end(step)

                if options.hold:
                    state = Prepared(step, state, room.goal)
                else:
                    report.at("load")
                    await room.goal.load()
                touched, missing = room.goal.touched, room.goal.missing
                made.append(room)
                room = None
                await bridge.run(_release, source, made)
    except BaseException as error:
        if room is not None:
            touched = room.goal.touched
            room.goal.abandon()
            # If the loop was closed, threads of this receive may still run.
            if not isinstance(error, GeneratorExit):
                # A device may still copy from the receiver's own tensors.
                room.goal.discard(late=room.delta is not None)
        # Tracebacks keep this frame until the collector runs.
        room = state = None
        made.clear()
        if into is not None:
            error.add_note(f"the template was {'' if touched else 'not '}modified")
        raise
    counts, waited = report.state, f"found after {started - asked:.3f} s"
    emit(
        TransferEvent(
            stop="recv",
            step=step,
            peer=source.name,
            nbytes=counts.bytes_total - counts.bytes_reused,
            reused=counts.bytes_reused,
            seconds=time.monotonic() - started,
            detail=", ".join(filter(None, [waited, source.remark])),
            level=logging.INFO,
            medium=source.medium,
        )
    )
    return Received(state, missing)


class _Report(Meter):
    """Reports the stage of the receive to its caller and to its deadline's error."""

    def __init__(
        self, report: Callable[[Progress], None] | None, deadline: Deadline
    ) -> None:
        super().__init__(report)
        self._deadline = deadline

    def at(self, stop: str) -> None:
        """Report that the receive has reached a stage."""
        self._deadline.stop = stop
        super().at(stop)


@dataclass(slots=True)
class _PlanInputs:
    """The large inputs of a plan; `_make_room` takes them out to free them."""

    template: Template | None = None
    held: Survey | None = None
    manifest: Manifest | None = None


class _Room(NamedTuple):
    """The destination of a checkpoint, and the chunks that the receiver has."""

    goal: Destination
    delta: Delta | None


def _describe(options: ReceiveOptions, into: object | None) -> _PlanInputs:
    """Describe the template and the state dict that the receiver has."""
    terms, template = options.terms, None
    if into is not None and options.is_whole:
        watched = options.into is not None
        template = Template(into, limits=terms.limits, watched=watched)
    if options.have is None:
        return _PlanInputs(template)
    try:
        held = survey(
            options.have,
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            writing=False,
            reading=True,
        )
    except UnsupportedLeafError:
        if options.have is not options.into:
            raise
        return _PlanInputs(template)  # it is filled, and what it has is not looked at
    return _PlanInputs(template, held)


def _make_room(
    source: Source,
    options: ReceiveOptions,
    bridge: Bridge,
    report: Meter,
    known: _PlanInputs,
) -> _Room:
    """Plan the destination of the checkpoint, and what the receiver may have of it."""
    # Free what is no longer needed before the peak of memory use.
    manifest, template, own = known.manifest, known.template, known.held
    known.manifest = known.template = known.held = None
    assert manifest is not None
    many = manifest.header_bytes > _MANY
    manifest = manifest.without_header()
    if options.is_whole:
        goal = source.destination(manifest, template, options.terms)
    else:
        terms, arena = options.terms, source.arena
        segment = Segment(manifest, arena=arena)
        into, limits = options.into, terms.limits
        rule = Matching(
            [segment],
            LOAD if options.strict else LAX,
            limits=limits,
            allow_pickle=terms.allow_pickle,
            select=options.select,
            template=None if into is None else Template(into, limits=limits),
            device=options.device,
            name=source.name,
        )
        goal = selected(segment, rule, terms, bridge, owns=arena is None)
    delta = None
    if own is not None:
        ports = options.terms.ports
        # Bytes may stay in the template if `Prepared` notices that they change. Torch
        # counts no write of an optimizer of FSDP to a DTensor.
        uncounted = any(each.is_inference() for each in own.tensors)
        uncounted = uncounted or any(map(has_version, own.wholes.values()))
        stay = not (options.hold and uncounted)
        if options.have is options.into and template is not None and stay:
            held: Held = HeldInTemplate(manifest, own, goal, ports=ports)
        else:
            held = Held.of(manifest, own, arena=goal.arena, ports=ports)
        delta = Delta(held, options.terms.marks, bridge, report.reuse)
        if is_available():  # asked here, since it imports libraries
            goal.patch = delta.patch
    del manifest, template, own
    if many:
        return_freed()
    return _Room(goal, delta)


def _place(goal: Destination, options: ReceiveOptions) -> Sequence[int]:
    """Plan which chunks to receive; notice later changes of a template."""
    chunks = goal.place()
    if options.hold:
        goal.watch_template()
    return chunks


async def _fetch(
    source: Source,
    outline: Outline,
    room: _Room,
    chunks: Sequence[int],
    report: Meter,
) -> None:
    """Bring chunks to their destination: copy held ones, and read the others."""
    if not chunks:
        return
    goal, delta = room
    nbytes = sum(stop - start for start, stop in map(outline.grid.range, chunks))
    report.expect(nbytes, len(chunks))
    # If no chunk of a sample is unchanged, deltas find the few that are. The first
    # chunk then shows whether the receiver holds their base.
    first = delta is not None and source.sends_deltas
    if first and delta is not None:
        sample = chunks[:: len(chunks) // _SAMPLE + 1]
        first = not await delta.plan(sample)
    for part in filter(None, (chunks[:first], chunks[first:])):
        there = list[int]()
        if delta is not None and not delta.has_base:
            report.at("plan")
            there = await delta.plan(part)
        report.at("fetch_chunk")
        async with goal.receiving():
            missing = _without(part, there)
            read = partial(source.read, outline, goal, missing, report.add)
            if delta is None:
                await read()
            else:
                copy = partial(delta.copy, there, goal.memory)
                _, copied = await run_all([read, copy])
                # Chunks that have changed since their digests were computed.
                changed = _without(there, copied)
                await source.read(outline, goal, changed, report.add)
            if goal.is_early:
                report.at("load")  # only the copies to devices are left


def _release(source: Source, made: list[_Room]) -> None:
    """Free the descriptions of up to 100,000 tensors in a thread, off the loop."""
    made.clear()
    source.give_back()


def _without(chunks: Sequence[int], others: Sequence[int]) -> list[int]:
    known = {*others}
    return [chunk for chunk in chunks if chunk not in known]
