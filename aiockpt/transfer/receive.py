"""One receive, phase by phase, from a peer's manifest to a state dict.

Read `receive` first. Transports differ only in their `Source`, and calls only in their
`ReceiveOptions`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from aiockpt.errors import UnsupportedLeafError
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena, return_freed
from aiockpt.memory.device import Marks, completed
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.switching import python_is_busy, switching_often
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import run_all
from aiockpt.state.distributed import has_version
from aiockpt.state.flatten import Survey, survey
from aiockpt.state.load_plan import Template
from aiockpt.state.pairing import alike
from aiockpt.transfer.deltas import is_available
from aiockpt.transfer.destination import Destination
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.prepared import Prepared
from aiockpt.transfer.reuse import Held, HeldInTemplate, Reuse
from aiockpt.transfer.source import Source
from aiockpt.transport import exact_step

_LARGE_HEADER_BYTES: Final = 1 << 20  # thousands of tensors
_MODIFIED: Final = "the template was modified"
_NOT_MODIFIED: Final = "the template was not modified"
_SAMPLE_CHUNKS: Final = 8  # show whether many chunks are unchanged


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
    *,
    touched: bool = False,
) -> Received:
    """Return the state dict of ``step``.

    If this fails or is cancelled, a template is unchanged or complete, unless
    ``direct`` lets bytes into it as they arrive. A note of the error says whether the
    template was modified, perhaps by an earlier attempt (``touched``).
    """
    report = _Report(options.progress, deadline)
    destination: Destination | None = None
    state: object = None
    freed: list[object] = []
    into, asked = options.into, time.monotonic()
    try:
        step = exact_step(step)
        with failing_here(f"receiving step {step}"):
            async with source:
                if into is None and options.template is not None:
                    into = options.template()
                    # It may have enqueued work, on another task's stream.
                    await completed(*Marks.of(options.ports).events.values())
                inputs = _PlanInputs()
                if into is not None or options.have is not None:
                    report.at("allocate")
                    inputs = await bridge.run(_describe, options, into)
                report.at("fetch_manifest")
                inputs.manifest = await source.manifest(step)
                outline, started = inputs.manifest.outline, time.monotonic()

                report.at("allocate")
                # A selection may be within the limit: `Destination` looks at that.
                most = options.limits.max_bytes if options.is_whole else None
                inputs.arena = await source.map(outline, most=most)
                plan = partial(_plan, source, inputs, options, bridge, report)
                destination = await bridge.run(plan)
                # The plan of a selection looks at values, so their chunks come first.
                await _fetch(source, outline, destination, destination.values, report)
                report.at("allocate")
                rest = await bridge.run(_plan_rest, destination, options)
                # A rank cannot stop a send that it has begun, so the plan comes first.
                await source.accept(step)
                with switching_often() if rest.is_busy else nullcontext():
                    await _fetch(source, outline, destination, rest.chunks, report)

                report.at("rebuild")
                # Everything that a peer can cause to fail precedes the load.
                state = await destination.assemble()
                await source.end(step)

                if options.hold:
                    state = Prepared(step, state, destination, rest.writes)
                else:
                    report.at("load")
                    await destination.load()
                touched, missing = destination.touched or touched, destination.missing
                freed.append(destination)
                destination = None
                await bridge.run(_free, source, freed)
    except BaseException as error:
        if destination is not None:
            touched |= destination.touched
            destination.abandon()
            # If the loop was closed, threads of this receive may still run.
            if not isinstance(error, GeneratorExit):
                # A device may still copy from the receiver's own tensors.
                destination.discard(late=options.have is not None)
        # Tracebacks keep this frame until the collector runs.
        destination = state = None
        freed.clear()
        if into is not None:
            _note(error, _MODIFIED if touched else _NOT_MODIFIED)
        raise
    emit(
        TransferEvent(
            stop="recv",
            step=step,
            peer=source.name,
            nbytes=report.state.bytes_total - report.state.bytes_reused,
            reused=report.state.bytes_reused,
            seconds=time.monotonic() - started,
            detail=f"found after {started - asked:.3f} s"
            + (source.remark and f", {source.remark}"),
            level=logging.INFO,
            medium=source.medium,
        )
    )
    return Received(state, missing)


def was_modified(error: BaseException) -> bool:
    """Say whether the error of a receive says that the template was modified."""
    return _MODIFIED in getattr(error, "__notes__", ())


def _note(error: BaseException, note: str) -> None:
    """Add what became of the template; an error may be that of an earlier attempt."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [each for each in notes if each not in (_MODIFIED, _NOT_MODIFIED)]
    error.add_note(note)


class _Report(Meter):
    """Reports the phase of the receive to its caller and to its deadline's error."""

    def __init__(
        self, report: Callable[[Progress], None] | None, deadline: Deadline
    ) -> None:
        super().__init__(report)
        self._deadline = deadline

    def at(self, stop: str) -> None:
        """Report that the receive has reached a phase."""
        self._deadline.phase = stop
        super().at(stop)


@dataclass(slots=True)
class _PlanInputs:
    """The large inputs of a plan; `_plan` takes them out to free them."""

    template: Template | None = None
    held: Survey | None = None
    manifest: Manifest | None = None
    arena: Arena | None = None


def _describe(options: ReceiveOptions, into: object | None) -> _PlanInputs:
    """Describe the template and the state dict that the receiver has."""
    template, held = None, None
    if into is not None and options.is_whole:
        watched = options.into is not None
        template = Template(into, limits=options.limits, watched=watched)
    if options.have is not None:
        try:
            held = survey(
                options.have,
                limits=options.limits,
                allow_pickle=options.allow_pickle,
                writing=False,
                reading=True,
            )
        except UnsupportedLeafError:
            if options.have is not options.into:
                raise
            # A template is filled without a look at what it has.
    return _PlanInputs(template, held)


def _plan(
    source: Source,
    inputs: _PlanInputs,
    options: ReceiveOptions,
    bridge: Bridge,
    report: Meter,
) -> Destination:
    """Plan the destination of the checkpoint, and what the receiver may have of it."""
    # Free what is no longer needed before the peak of memory use.
    manifest, template, own = inputs.manifest, inputs.template, inputs.held
    arena, inputs.arena = inputs.arena, None
    inputs.manifest = inputs.template = inputs.held = None
    assert manifest is not None
    is_large = manifest.header_bytes > _LARGE_HEADER_BYTES
    manifest = manifest.without_header()
    if options.into is not None and not options.is_whole:
        template = Template(options.into, limits=options.limits)
    destination = Destination(source, arena, manifest, template, options, bridge)
    if own is not None:
        # Bytes may stay in the template if `Prepared` notices that they change. Torch
        # counts no write of an optimizer of FSDP to a DTensor.
        uncounted = any(each.is_inference() for each in own.tensors)
        uncounted = uncounted or any(map(has_version, own.wholes.values()))
        stay = options.is_whole and not (options.hold and uncounted)
        arena, ports = destination.arena, options.ports
        load = destination.template_load
        held: Held
        stay = stay and bool(manifest.digests)
        if options.have is options.into and stay and load and load.backings:
            memory = load.backings, load.copies, load.loaded
            held = HeldInTemplate(manifest, own, *memory, arena=arena, ports=ports)
        else:
            held = Held(manifest, alike(manifest, own), arena=arena, ports=ports)
        reuse = Reuse(held, options.marks, bridge, report.reuse)
        if not source.takes(reuse):
            destination.reuse = reuse
        is_available()  # asked here, since it imports libraries
    del manifest, template, own
    if is_large:
        return_freed()
    return destination


class _RestPlan(NamedTuple):
    """What is known once the values of a receive have arrived.

    Attributes:
        chunks: The chunks to receive.
        is_busy: Whether another thread computes in Python.
        writes: How often torch has written to the template, if it is filled later.
    """

    chunks: Sequence[int]
    is_busy: bool
    writes: Sequence[int]


def _plan_rest(destination: Destination, options: ReceiveOptions) -> _RestPlan:
    """Plan which chunks to receive beyond the values."""
    chunks = destination.plan()
    writes = destination.writes() if options.hold else ()
    return _RestPlan(chunks, python_is_busy(), writes)


async def _fetch(
    source: Source,
    outline: Outline,
    destination: Destination,
    chunks: Sequence[int],
    report: Meter,
) -> None:
    """Bring chunks to their destination: copy held ones, and read the others."""
    if not chunks:
        return
    nbytes = sum(stop - start for start, stop in map(outline.grid.range, chunks))
    report.expect(nbytes, len(chunks))
    # If no chunk of a sample is unchanged, deltas find the few that are. The first
    # chunk then shows whether the receiver holds their base.
    reuse, parts = destination.reuse, [chunks]
    if reuse is not None and source.sends_deltas:
        sample = chunks[:: len(chunks) // _SAMPLE_CHUNKS + 1]
        parts = parts if await reuse.plan(sample) else [chunks[:1], chunks[1:]]
    for part in filter(None, parts):
        there = list[int]()
        if reuse is not None and not reuse.has_base:
            report.at("plan")
            there = await reuse.plan(part)
        report.at("fetch_chunk")
        async with destination.receiving():
            missing = _without(part, there)
            read = partial(source.read, outline, destination)
            if reuse is None:
                await read(missing, report.add)
            else:
                copy = partial(reuse.copy, there, destination.memory)
                fetch = partial(read, missing, report.add)
                _, copied = await run_all([fetch, copy])
                # Chunks that have changed since their digests were computed.
                await read(_without(there, copied), report.add)
            if destination.is_early:
                report.at("load")  # only the copies to devices are left


def _free(source: Source, objects: list[object]) -> None:
    """Free the descriptions of up to 100,000 tensors in a thread, off the loop."""
    objects.clear()
    source.give_back()


def _without(chunks: Sequence[int], others: Sequence[int]) -> list[int]:
    known = {*others}
    return [chunk for chunk in chunks if chunk not in known]
