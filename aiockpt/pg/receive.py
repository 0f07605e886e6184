"""The path of a receive: from a rank's offer to a state dict."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap

from aiockpt.errors import (
    AiockptError,
    RemoteProtocolError,
    StepNotFoundError,
)
from aiockpt.events import Meter, Progress, TransferEvent, emit
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest
from aiockpt.pg.conversation import (
    Conversation,
    Frame,
    Kind,
    OutdatedError,
)
from aiockpt.pg.medium import Medium
from aiockpt.pg.messages import messages_of
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import beside
from aiockpt.state.template import Template
from aiockpt.transfer.destination import Destination, Terms

__all__ = ["Receive", "ReceiveOptions"]

logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """What one receive needs to know beside which rank to ask.

    Without ``into``, ``template`` returns a state dict to receive into as far as the
    checkpoint fits it.
    """

    into: object | None
    template: Callable[[], object] | None
    progress: Callable[[Progress], None] | None
    terms: Terms


@dataclass(frozen=True, slots=True)
class _Coming:
    """A checkpoint that has been accepted."""

    grid: ChunkGrid
    messages: Sequence[tuple[int, int]]
    destination: Destination


class Receive:
    """One call of ``recv_checkpoint``, for ``step``."""

    def __init__(
        self,
        step: int,
        medium: Medium,
        bridge: Bridge,
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

    async def run(
        self,
        rank: int,
        converse: Callable[[], AbstractAsyncContextManager[Conversation]],
    ) -> object:
        """Return the state dict that ``rank`` offers in a conversation.

        What is wrong with it is told to the sender, and raised. Conversations about
        earlier steps, which their sender gave up, are skipped.
        """
        started = time.monotonic()
        while True:
            try:
                async with converse() as peer:
                    offer = await self._hear_offer(peer)
                    async with peer.answering(Kind.ACCEPT, self._step):
                        header = [await self._consider(offer)]
                    await peer.fill(header[0])
                    async with peer.answering(Kind.ACCEPT, self._step):
                        coming = await self._accept(header)
                    destination, grid = coming.destination, coming.grid
                    memory = destination.memory
                    digests = self._medium.digests(memory, grid, self._on_chunk())
                    self._stop("fetch_chunk")
                    destination.begin()
                    async with beside(partial(_prepare, destination, grid)):
                        # It cannot be called off, so all of it comes, damaged or not.
                        damage = await peer.receive_segment(
                            memory, coming.messages, digests
                        )
                    self._stop("rebuild")
                    async with peer.answering(Kind.DONE, self._step):
                        if damage is not None:
                            raise damage
                        state = await destination.assemble()
                break
            except OutdatedError as error:
                logger.info("waiting for step %d: %s", self._step, error)
        self._stop("load")
        await destination.load()
        emit(
            TransferEvent(
                stop="recv",
                step=self._step,
                peer=f"rank {rank}",
                nbytes=grid.segment_bytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )
        return state

    def abandon(self, error: BaseException) -> None:
        """Let go of the memory; say in the error what is left in a template."""
        if self._destination is not None:
            self._destination.abandon()
        if self._into is not None and isinstance(error, AiockptError):
            touched = self._destination is not None and self._destination.touched
            done = "was modified" if touched else "was not modified"
            error.add_note(f"the template {done}")

    async def _hear_offer(self, peer: Conversation) -> Frame:
        """Wait for the sender, and describe the template meanwhile."""
        self._stop("fetch_manifest")
        async with beside(self._describe_template):
            return await peer.hear(Kind.OFFER, step=self._step)

    async def _describe_template(self) -> None:
        """Describe it, once; an error is raised when the sender has come, who is told.

        An earlier conversation may have done so.
        """
        if self._template is not None or self._unfit is not None:
            return
        try:
            if self._into is None and self._options.template is not None:
                self._into = self._options.template()
            if self._into is not None:
                terms = self._options.terms
                describe = partial(
                    Template,
                    self._into,
                    limits=terms.limits,
                    allow_pickle=terms.allow_pickle,
                    exact=self._options.into is not None,
                )
                self._template = await self._bridge.run(describe)
        except Exception as error:  # noqa: BLE001 - see above
            self._unfit = error

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
        return await self._bridge.run(_allocate_header, offer.nbytes)

    async def _accept(self, header: list[mmap]) -> _Coming:
        """Read the header, and allocate the memory of what it describes.

        It is taken out of the list: it may be long, and goes before memory is at its
        fullest.
        """
        limits = self._options.terms.limits
        offered = await self._bridge.run(self._medium.read, header.pop(), limits)
        found, placement = offered.manifest, offered.placement
        del offered
        if not isinstance(found, Manifest) or found.step != self._step:
            raise RemoteProtocolError("the header is not that of the offer")
        found = found.without_header()
        grid = found.outline.grid
        self._progress.expect(grid.segment_bytes, len(grid))
        self._stop("allocate")
        longest = self._medium.message_bytes
        messages = await self._bridge.run(messages_of, found, longest)
        template, self._template = self._template, None
        choose = partial(self._medium.destination, terms=self._options.terms)
        self._destination = await self._bridge.run(choose, found, placement, template)
        return _Coming(grid, messages, self._destination)

    def _on_chunk(self) -> Callable[[int], None] | None:
        """Return what a thread calls for each chunk that has arrived."""
        if self._options.progress is None:
            return None
        loop = asyncio.get_running_loop()

        def tell(nbytes: int) -> None:
            with suppress(RuntimeError):  # a closed loop has nobody to tell
                loop.call_soon_threadsafe(self._progress.add, nbytes, 1)

        return tell

    def _stop(self, name: str) -> None:
        self._deadline.stop = name
        self._progress.at(name)


async def _prepare(destination: Destination, grid: ChunkGrid) -> None:
    """Have memory ready ahead of the bytes: gloo has one thread for both."""
    for chunk in range(len(grid)):
        await destination.prepare(*grid.range(chunk))


def _allocate_header(nbytes: int) -> mmap:
    with allocating("a header", nbytes):
        return mmap(-1, nbytes)
