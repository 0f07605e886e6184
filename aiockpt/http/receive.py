"""One receive, stop by stop, from a peer's manifest to a state dict."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    TransportError,
    UnavailableError,
)
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.sources import Sources
from aiockpt.http.supply import Sharing, Supply
from aiockpt.memory.arena import Memory, return_freed
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.deadline import Deadline
from aiockpt.state.flatten import Survey, survey
from aiockpt.state.selection import Select
from aiockpt.state.template import Template
from aiockpt.transfer.delta import Delta, Fetch
from aiockpt.transfer.destination import Destination, InTemplate, Terms, destination_of
from aiockpt.transfer.held import Held, HeldInTemplate
from aiockpt.transfer.loading import Bring
from aiockpt.transport import exact_step

__all__ = ["Receive", "ReceiveOptions"]

_BROKEN = (TransportError, UnavailableError, ClosedError)
"""After one of these the sender is not told that the receive has ended."""

_MANY = 1 << 20  # bytes of a header: thousands of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """What one receive needs to know beside whom to ask.

    ``have`` may be the very object that ``into`` is.
    """

    into: object | None
    have: object | None
    select: Select | None
    progress: Callable[[Progress], None] | None
    terms: Terms
    sharing: Sharing


class Receive:
    """One call of ``recv_checkpoint``."""

    def __init__(
        self,
        origin: Sources,
        bridge: Bridge,
        options: ReceiveOptions,
        deadline: Deadline,
    ) -> None:
        self._origin = origin
        self._supply = Supply(origin, bridge, options.sharing, self._remember)
        self._bridge = bridge
        self._options = options
        self._deadline = deadline
        self._progress = Meter(options.progress)
        self._template: Template | None = None
        self._manifest: Manifest | None = None
        self._goal: Destination | None = None
        self._own: Survey | None = None
        self._delta: Delta | None = None
        self._reused = 0
        self._touched = False
        self._found = False

    async def run(self, step: int) -> object:
        """Return the state dict.

        If it fails or is cancelled, a template is as it was or holds all that was asked
        for, unless ``direct`` lets bytes into it as they arrive.
        """
        step = exact_step(step)
        try:
            return await self._run(step)
        except BaseException as error:
            self._abandon(error)
            told = isinstance(error, AiockptError) and not isinstance(error, _BROKEN)
            if told and self._found:
                await self._supply.end(step)
            raise
        finally:
            self._supply.close()

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

    async def _run(self, step: int) -> object:
        asked = time.monotonic()
        outline = await self._find(step)
        started = time.monotonic()
        await self._borrow(outline, most=self._options.terms.limits.max_bytes)
        goal = await self._choose()
        await self._fetch(outline, goal)
        await self._supply.end(step)
        self._stop("rebuild")
        # Whatever the peer can make fail comes before the first byte is written.
        state = await goal.assemble()
        self._stop("load")
        await goal.load()
        self._touched = goal.touched
        del goal
        await self._bridge.run(self._release)
        self._tell(step, outline.grid.segment_bytes, asked, started)
        return state

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive into a template leaves behind."""
        if self._options.into is not None:
            done = "was modified" if self._touched else "was not modified"
            error.add_note(f"the template {done}")

    async def _find(self, step: int) -> Outline:
        """Look at the template, then for the checkpoint."""
        options = self._options
        if options.into is not None or options.have is not None:
            self._stop("allocate")
            await self._bridge.run(self._describe)
        manifest = await self._ask(step)
        self._manifest = manifest.without_header()
        outline = manifest.outline
        self._progress.expect(outline.grid.segment_bytes, len(outline.grid))
        return outline

    async def _ask(self, step: int) -> Manifest:
        self._stop("fetch_manifest")
        manifest = await self._supply.ask(step, self._deadline.when)
        self._found = True
        return manifest

    async def _borrow(self, outline: Outline, *, most: int | None) -> None:
        self._stop("allocate")
        await self._supply.open(outline, most=most)

    def _describe(self) -> None:
        """Look at the template, and at what there is already."""
        options, terms = self._options, self._options.terms
        if options.into is not None:
            self._template = Template(
                options.into, limits=terms.limits, allow_pickle=terms.allow_pickle
            )
        if options.have is not None:
            self._own = self._survey()

    def _survey(self) -> Survey:
        options, terms = self._options, self._options.terms
        if options.have is options.into and self._template is not None:
            return self._template.own
        return survey(
            options.have,
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            writing=False,
            reading=True,
        )

    async def _choose(self) -> Destination:
        self._stop("allocate")
        self._goal = await self._bridge.run(self._make_room)
        return self._goal

    def _make_room(self) -> Destination:
        # What nobody needs any more goes before memory is at its fullest.
        manifest, self._manifest = self._manifest, None
        assert manifest is not None
        terms = self._options.terms
        template, self._template = self._template, None
        arena = self._supply.arena
        goal = destination_of(manifest, template, terms, self._bridge, arena)
        own, self._own = self._own, None
        if own is not None:
            self._begin_delta(self._held(manifest, own, goal))
        many = manifest.header_bytes > _MANY
        del manifest, template, own
        if many:
            return_freed()
        return goal

    def _held(self, manifest: Manifest, own: Survey, goal: Destination) -> Held:
        options, ports = self._options, self._options.terms.ports
        if options.have is options.into and isinstance(goal, InTemplate):
            return HeldInTemplate(manifest, own, goal, ports=ports)
        return Held.of(manifest, own, arena=goal.arena, ports=ports)

    def _begin_delta(self, held: Held) -> None:
        self._delta = Delta(held, self._bridge, self._reuse)

    async def _fetch(self, outline: Outline, goal: Destination) -> None:
        fetch = partial(self._fetch_chunks, outline, goal)
        target = None if goal.memory is goal.arena else goal.memory
        fill = partial(self._fill_goal, goal)
        await self._fill(outline.step, range(len(outline.grid)), target, fetch, fill)

    async def _fill(
        self,
        step: int,
        chunks: Sequence[int],
        target: Memory | None,
        fetch: Fetch,
        fill: Callable[[Bring], Awaitable[None]],
    ) -> None:
        """Fetch chunks, but those that are there; in ``fill`` they are written.

        Without a target they belong to the arena.
        """
        delta, there = self._delta, list[int]()
        if delta is not None:
            self._stop("plan")
            there = await self._supply.keep(step, delta.plan(chunks))
        self._stop("fetch_chunk")
        if delta is None:
            await fill(partial(fetch, chunks))
        else:
            await fill(partial(delta.bring, chunks, there, target, fetch))

    async def _fill_goal(self, goal: Destination, bring: Bring) -> None:
        async def bring_all() -> None:
            await bring()
            if goal.on_verified is not None:
                self._stop("load")  # only devices are still to be waited for

        await goal.fill(bring_all)

    async def _fetch_chunks(
        self, outline: Outline, goal: Destination, chunks: Sequence[int]
    ) -> None:
        await self._supply.bring(
            outline,
            goal.memory,
            chunks,
            on_progress=self._progress.add,
            prepare=goal.prepare,
            on_verified=goal.on_verified,
        )

    def _tell(self, step: int, nbytes: int, asked: float, started: float) -> None:
        found = f"found after {started - asked:.3f} s"
        emit(
            TransferEvent(
                stop="recv",
                step=step,
                peer=self._origin.name,
                nbytes=nbytes - self._reused,
                reused=self._reused,
                seconds=time.monotonic() - started,
                detail=", ".join(filter(None, [found, self._supply.remark])),
                level=logging.INFO,
                medium=self._supply.medium,
            )
        )

    def _release(self) -> None:
        """Free what 100,000 tensors were described with, where no loop waits for it."""
        self._goal = self._delta = None
        self._supply.give_back()

    def _reuse(self, nbytes: int, chunks: int) -> None:
        self._reused += nbytes
        self._progress.reuse(nbytes, chunks)

    def _remember(self, error: AiockptError) -> None:
        self._deadline.last_error = str(error)

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)
