"""One receive, stop by stop, from a peer's manifest to a state dict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiockpt.errors import AiockptError
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import return_freed
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.tasks import run_all
from aiockpt.state.flatten import Survey, survey
from aiockpt.state.selection import Select
from aiockpt.state.template import Template
from aiockpt.transfer.destination import Destination, InTemplate, Terms, destination_of
from aiockpt.transfer.reuse import Delta, Held, HeldInTemplate
from aiockpt.transfer.selected import Selected
from aiockpt.transfer.source import Source
from aiockpt.transport import exact_step

__all__ = ["Receive", "Request"]

_MANY = 1 << 20  # bytes of a header: thousands of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller wants of a checkpoint, and where.

    ``have`` may be the very object that ``into`` is.
    """

    into: object | None
    have: object | None
    select: Select | None
    progress: Callable[[Progress], None] | None
    terms: Terms


class Receive:
    """One call of ``recv_checkpoint``."""

    def __init__(
        self, source: Source, bridge: Bridge, request: Request, deadline: Deadline
    ) -> None:
        self._source = source
        self._bridge = bridge
        self._request = request
        self._deadline = deadline
        self._progress = Meter(request.progress)
        self._template: Template | None = None
        self._own: Survey | None = None
        self._manifest: Manifest | None = None
        self._goal: Destination | None = None
        self._delta: Delta | None = None
        self._received = self._reused = 0
        self._touched = False

    async def run(self, step: int) -> object:
        """Return the state dict.

        If it fails or is cancelled, a template is as it was or holds all that was asked
        for, unless ``direct`` lets bytes into it as they arrive.
        """
        step = exact_step(step)
        asked = time.monotonic()
        request, source = self._request, self._source
        try:
            if request.into is not None or request.have is not None:
                self._stop("allocate")
                await self._bridge.run(self._describe)
            self._stop("fetch_manifest")
            manifest = await source.manifest(step)
            outline, self._manifest = manifest.outline, manifest
            del manifest  # which weighs much, and goes as soon as there is a plan
            started = time.monotonic()

            self._stop("allocate")
            # A part may be less than the checkpoint: its plan looks at its own size.
            most = request.terms.limits.max_bytes if request.select is None else None
            await source.map(outline, most=most)
            goal = self._goal = await self._bridge.run(self._make_room)

            # The plan of a selection looks at values, so their chunks come first.
            await self._fetch(outline, goal, goal.values)
            self._stop("allocate")
            await self._fetch(outline, goal, await self._bridge.run(goal.plan))
            await source.end(step)

            self._stop("rebuild")
            # Whatever the peer can make fail comes before the first byte is written.
            state = await goal.assemble()
            self._stop("load")
            await goal.load()
            self._touched = goal.touched
            del goal
            await self._bridge.run(self._release)
        except BaseException as error:
            self._abandon(error)
            await source.refuse(step, error)
            raise
        finally:
            source.close()
        self._tell(step, asked, started)
        return state

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive into a template leaves behind."""
        if self._request.into is not None:
            done = "was modified" if self._touched else "was not modified"
            error.add_note(f"the template {done}")

    def _describe(self) -> None:
        """Look at the template, and at what there is already."""
        request, terms = self._request, self._request.terms
        if request.into is not None and request.select is None:
            self._template = Template(
                request.into, limits=terms.limits, allow_pickle=terms.allow_pickle
            )
        if request.have is None:
            return
        if request.have is request.into and self._template is not None:
            self._own = self._template.own
            return
        self._own = survey(
            request.have,
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            writing=False,
            reading=True,
        )

    def _make_room(self) -> Destination:
        """Plan where the checkpoint goes, and what of it is there already."""
        # What nobody needs any more goes before memory is at its fullest.
        manifest, self._manifest = self._manifest, None
        template, self._template = self._template, None
        own, self._own = self._own, None
        assert manifest is not None
        many = manifest.header_bytes > _MANY
        manifest = manifest.without_header()
        goal = self._destination(manifest, template)
        if own is not None:
            held = self._held(manifest, own, goal)
            self._delta = Delta(held, self._bridge, self._reuse)
        del manifest, template, own
        if many:
            return_freed()
        return goal

    def _destination(
        self, manifest: Manifest, template: Template | None
    ) -> Destination:
        request, arena = self._request, self._source.arena
        if request.select is None:
            return destination_of(
                manifest, template, request.terms, self._bridge, arena
            )
        return Selected(
            manifest,
            request.select,
            request.into,
            request.terms,
            self._bridge,
            name=self._source.name,
            arena=arena,
        )

    def _held(self, manifest: Manifest, own: Survey, goal: Destination) -> Held:
        request, ports = self._request, self._request.terms.ports
        if request.have is request.into and isinstance(goal, InTemplate):
            return HeldInTemplate(manifest, own, goal, ports=ports)
        return Held.of(manifest, own, arena=goal.arena, ports=ports)

    async def _fetch(
        self, outline: Outline, goal: Destination, chunks: Sequence[int]
    ) -> None:
        """Have chunks where they belong: those that are held, and those to be read."""
        if not chunks:
            return
        nbytes = sum(stop - start for start, stop in map(outline.grid.range, chunks))
        self._received += nbytes
        self._progress.expect(nbytes, len(chunks))
        delta, there = self._delta, list[int]()
        if delta is not None:
            self._stop("plan")
            there = await self._source.keep(outline.step, delta.plan(chunks))
        self._stop("fetch_chunk")
        read = partial(
            self._source.read,
            outline,
            goal.memory,
            on_progress=self._progress.add,
            prepare=goal.prepare,
            on_verified=goal.on_verified,
        )
        async with goal.receiving():
            if delta is None:
                await read(chunks)
            else:
                target = None if goal.memory is goal.arena else goal.memory
                missing = _without(chunks, there)
                jobs = partial(read, missing), partial(delta.copy, there, target)
                _, copied = await run_all(jobs)
                # What has changed since its digest was computed.
                await read(_without(there, copied))
            if goal.on_verified is not None:
                self._stop("load")  # only devices are still to be waited for

    def _abandon(self, error: BaseException) -> None:
        """Let go of the memory: tracebacks keep this until the collector runs."""
        goal, delta = self._goal, self._delta
        self._goal = self._delta = None
        if goal is None:
            return
        self._touched = goal.touched
        goal.abandon()
        # Where a loop has dropped this coroutine, threads go on.
        if not isinstance(error, GeneratorExit):
            # A device may still copy what the receiver had.
            goal.discard(late=delta is not None)

    def _release(self) -> None:
        """Free what 100,000 tensors were described with, where no loop waits for it."""
        self._goal = self._delta = None
        self._source.give_back()

    def _tell(self, step: int, asked: float, started: float) -> None:
        found = f"found after {started - asked:.3f} s"
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=self._source.name,
                nbytes=self._received - self._reused,
                reused=self._reused,
                seconds=time.monotonic() - started,
                detail=", ".join(filter(None, [found, self._source.remark])),
                level=logging.INFO,
                medium=self._source.medium,
            )
        )

    def _reuse(self, nbytes: int, chunks: int) -> None:
        self._reused += nbytes
        self._progress.reuse(nbytes, chunks)

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)


def _without(chunks: Sequence[int], others: Sequence[int]) -> list[int]:
    known = {*others}
    return [chunk for chunk in chunks if chunk not in known]
