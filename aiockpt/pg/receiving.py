"""One receive, stop by stop: from a rank's offer to a state dict."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from typing import TypeVar

from aiockpt.errors import (
    AiockptError,
    IntegrityError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.pg.frames import Frame, Kind
from aiockpt.pg.line import Line, OutdatedError
from aiockpt.pg.medium import Medium
from aiockpt.pg.messages import messages_of
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import run_all
from aiockpt.state.template import Template
from aiockpt.transfer.destination import Destination, Terms

__all__ = ["Receive", "ReceiveOptions"]

T = TypeVar("T")

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """What one receive needs to know beside whom to ask.

    Without ``into``, ``template`` returns a state dict to receive into as far as the
    checkpoint fits it.
    """

    into: object | None
    template: Callable[[], object] | None
    progress: Callable[[Progress], None] | None
    terms: Terms


@dataclass(frozen=True, slots=True)
class _Coming:
    """A checkpoint that has been accepted: its chunks, its messages, where it goes."""

    outline: Outline
    messages: Sequence[tuple[int, int]]
    goal: Destination


class Receive:
    """One call of ``recv_checkpoint``, for ``step``."""

    def __init__(
        self,
        step: int,
        bridge: Bridge,
        medium: Medium,
        options: ReceiveOptions,
        deadline: Deadline,
    ) -> None:
        self._step = step
        self._medium = medium
        self._bridge = bridge
        self._options = options
        self._deadline = deadline
        self._progress = Meter(options.progress)
        self._into = options.into
        self._template: Template | None = None
        self._unfit: Exception | None = None
        self._destination: Destination | None = None

    async def run(self, line: Line) -> object:
        """Return the state dict that the other end of ``line`` offers.

        What is wrong with it is told to the sender, and raised.
        """
        started = time.monotonic()
        try:
            coming, state = await self._hold(line)
            self._stop("load")
            await coming.goal.load()
        except BaseException:
            if self._destination is not None:
                self._destination.abandon()
            raise
        emit(
            TransferEvent(
                stop="recv",
                step=self._step,
                peer=f"rank {line.rank}",
                nbytes=coming.outline.grid.segment_bytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
        return state

    async def _hold(self, line: Line) -> tuple[_Coming, object]:
        """Hold conversations until one is about this step, or a later one."""
        while True:
            try:
                return await line.hold(self._receive)
            except OutdatedError as error:
                logger.info("waiting for step %d: %s", self._step, error)

    def annotate(self, error: AiockptError) -> None:
        """Say in the error what a receive into a template leaves behind."""
        if self._into is not None:
            touched = self._destination is not None and self._destination.touched
            done = "was modified" if touched else "was not modified"
            error.add_note(f"the template {done}")

    async def _receive(self, line: Line) -> tuple[_Coming, object]:
        offer = await self._hear_offer(line)
        told = [await self._answer(line, Kind.ACCEPT, self._consider(offer))]
        await line.fill(told[0])
        coming = await self._answer(line, Kind.ACCEPT, self._make_room(told))
        self._stop("fetch_chunk")
        damage = await self._fetch(line, coming)
        self._stop("rebuild")
        state = await self._answer(line, Kind.DONE, _whole(coming.goal, damage))
        return coming, state

    async def _hear_offer(self, line: Line) -> Frame:
        """Wait for the sender, and look at the template meanwhile."""
        self._stop("fetch_manifest")
        offers: list[Frame] = []

        async def hear() -> None:
            offers.append(await line.hear(Kind.OFFER, step=self._step))

        await run_all([hear, self._look])
        return offers[0]

    async def _look(self) -> None:
        if self._template is not None or self._unfit is not None:
            return  # an earlier conversation was outdated
        try:
            if self._into is None and self._options.template is not None:
                self._into = self._options.template()
            if self._into is not None:
                self._template = await self._bridge.run(self._describe)
        except Exception as error:  # noqa: BLE001 - raised when the sender has come
            self._unfit = error  # and is told

    async def _answer(self, line: Line, kind: Kind, doing: Awaitable[T]) -> T:
        """Do what the sender waits for, and tell it how that went."""
        try:
            done = await doing
        except Exception as error:
            await self._refuse(line, error)
            raise
        await line.say(kind, self._step)
        return done

    async def _refuse(self, line: Line, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        try:
            await line.say(Kind.FAILED, self._step, text=why)
        except AiockptError as lost:
            error.add_note(f"the sender could not be told: {lost}")

    async def _consider(self, offer: Frame) -> mmap:
        """Return memory for the header of what is offered."""
        if self._unfit is not None:
            raise self._unfit
        if offer.step != self._step:
            raise StepNotFoundError(self._step, serving=offer.step)
        if not offer.nbytes:
            raise RemoteProtocolError("the offer has no header")
        limit = self._options.terms.limits.max_header_bytes
        enforce("the header's length", offer.nbytes, limit)
        return await self._bridge.run(_room, offer.nbytes)

    async def _make_room(self, told: list[mmap]) -> _Coming:
        limits = self._options.terms.limits
        # Taken out of the list: it weighs much, and nobody needs it any more.
        offered = await self._bridge.run(self._medium.read, told.pop(), limits)
        found, placement = offered.manifest, offered.placement
        del offered
        if not isinstance(found, Manifest) or found.step != self._step:
            raise RemoteProtocolError("the header is not that of the offer")
        outline, found = found.outline, found.without_header()
        self._progress.expect(outline.grid.segment_bytes, len(outline.grid))
        self._stop("allocate")
        longest = self._medium.message_bytes
        messages = await self._bridge.run(messages_of, found, longest)
        self._destination = await self._bridge.run(self._choose, found, placement)
        return _Coming(outline, messages, self._destination)

    def _describe(self) -> Template:
        terms = self._options.terms
        return Template(
            self._into,
            limits=terms.limits,
            allow_pickle=terms.allow_pickle,
            exact=self._options.into is not None,
        )

    def _choose(self, manifest: Manifest, placement: Sequence[int]) -> Destination:
        template, self._template = self._template, None
        terms = self._options.terms
        return self._medium.destination(manifest, placement, template, terms)

    async def _fetch(self, line: Line, coming: _Coming) -> IntegrityError | None:
        """Receive and verify everything; return what was damaged on the way.

        The rest comes in any case: what is under way cannot be called off.
        """
        coming.goal.begin()
        damage: list[IntegrityError | None] = []

        async def receive() -> None:
            memory, messages = coming.goal.memory, coming.messages
            grid = coming.outline.grid
            sealing = self._medium.sealing(memory, grid, self._teller())
            damage.append(await line.receive_segment(memory, messages, sealing))

        await run_all([partial(self._prepare, coming), receive])
        return damage[0]

    def _teller(self) -> Callable[[int], None] | None:
        """Return what a thread calls for each chunk that has arrived."""
        if self._options.progress is None:
            return None
        loop = asyncio.get_running_loop()

        def tell(nbytes: int) -> None:
            with suppress(RuntimeError):  # a closed loop has nobody to tell
                loop.call_soon_threadsafe(self._progress.add, nbytes, 1)

        return tell

    async def _prepare(self, coming: _Coming) -> None:
        """Have memory ready ahead of the bytes: gloo has one thread for both."""
        grid = coming.outline.grid
        for chunk in range(len(grid)):
            await coming.goal.prepare(*grid.range(chunk))

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)


def _room(nbytes: int) -> mmap:
    with allocating("a header", nbytes):
        return mmap(-1, nbytes)


async def _whole(goal: Destination, damage: IntegrityError | None) -> object:
    if damage is not None:
        raise damage
    return await goal.assemble()
