"""One rank of a process group as the source of a receive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from mmap import mmap
from types import TracebackType
from typing import TypeVar

from aiockpt.errors import RemoteProtocolError, StepNotFoundError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.limits import Limits, enforce
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.memory.arena import Arena
from aiockpt.pg.conversation import (
    ControlMessage,
    Conversation,
    GroupRanks,
    Kind,
    OutdatedError,
    telling,
)
from aiockpt.pg.messages import Medium, RankChannel, messages_of
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import beside
from aiockpt.state.load_plan import Template
from aiockpt.transfer.destination import Destination, Terms
from aiockpt.transfer.source import OnProgress, Target

V = TypeVar("V")

logger = logging.getLogger("aiockpt")


class GroupSource:
    """The checkpoint of one rank, as a `aiockpt.transfer.source.Source`.

    The whole checkpoint arrives in one go, without messages to the sender meanwhile.

    Args:
        step: The step to receive.
        rank: The sender.
        ranks: The ranks of the group.
        medium: The memory that messages are received into.
        limits: The bounds of the checkpoint.
        deadline: The deadline of the whole call.
    """

    medium = remark = ""
    arena: Arena | None = None
    sends_deltas = False

    def __init__(
        self,
        step: int,
        rank: int,
        ranks: GroupRanks,
        medium: Medium,
        limits: Limits,
        deadline: Deadline,
    ) -> None:
        self.name = f"rank {rank}"
        self._rank, self._ranks = rank, ranks
        self._memory, self._bridge = medium, ranks.bridge
        self._limits, self._deadline = limits, deadline
        self._step, self._asked = step, False
        self._talk = AsyncExitStack()  # the turn, and the conversation in it
        self._channel: RankChannel | None = None
        self._peer: Conversation | None = None
        self._messages: Sequence[tuple[int, int]] = ()
        self._placement: Sequence[int] = ()

    async def __aenter__(self) -> GroupSource:
        """Wait for the turn: receives from one rank keep the order of their calls."""
        turn = self._ranks.turn(self._rank, sending=False)
        self._channel = await self._talk.enter_async_context(turn)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the sender of a failure; wait for a sender that has not begun."""
        try:
            # Once there is an offer, `Conversation.answering` says why it fails.
            if isinstance(error, Exception) and not self._asked:
                await self._decline_unasked(error)
        finally:
            await self._talk.__aexit__(kind, error, trace)

    async def manifest(self, step: int) -> Manifest:
        """Begin the conversation that offers ``step``; return the manifest.

        The header may be long, so it is freed before the peak of memory use.
        """
        self._asked = True
        peer, offer = await self._talk.enter_async_context(self._offer())
        await self._talk.enter_async_context(peer.answering(Kind.DONE, step))
        self._peer = peer
        if offer.step != step:
            raise StepNotFoundError(step, serving=offer.step)
        if not offer.nbytes:
            raise RemoteProtocolError("the offer has no header")
        enforce(
            "the header's length",
            offer.nbytes,
            self._limits.max_header_bytes,
            "max_header_bytes",
        )
        header = await self._bridge.run(_allocate_header, offer.nbytes)
        await peer.say(Kind.ACCEPT, step)
        await peer.fill(header)
        return await self._bridge.run(self._read, header)

    async def map(self, outline: Outline, *, most: int | None) -> None:
        """Do nothing: a rank shares no memory."""

    def destination(
        self, manifest: Manifest, template: Template | None, terms: Terms
    ) -> Destination:
        """Return the destination, on a device or in host memory."""
        return self._memory.destination(manifest, self._placement, template, terms)

    async def accept(self, step: int) -> None:
        """Tell the sender to begin."""
        assert self._peer is not None
        await self._peer.say(Kind.ACCEPT, step)

    async def read(
        self,
        outline: Outline,
        target: Target,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Receive all chunks, and compare their digests at the end.

        ``chunks`` must be all chunks. The digests arrive last, so ``target.complete``
        is not called.

        Raises:
            IntegrityError: a digest differs.
            ProcessGroupError: the group is broken.
        """
        assert self._peer is not None
        grid, loop = outline.grid, asyncio.get_running_loop()

        def tell(nbytes: int) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_progress, nbytes, 1)

        digests = self._memory.digests(target.memory, grid, tell)
        async with beside(partial(self._prepare, target, grid)):
            # The transfer cannot be stopped, so damaged bytes arrive as well.
            await self._peer.receive_segment(target.memory, self._messages, digests)

    async def end(self, step: int) -> None:
        """Tell the sender of the success, which ends the conversation."""
        await self._talk.aclose()

    def give_back(self) -> None:
        """Do nothing: there is no mapped memory."""

    async def _decline_unasked(self, error: Exception) -> None:
        """Wait for the sender, and tell it why this receive fails."""
        async with (
            telling(error, "the sender", self._deadline),
            self._offer() as (peer, _),
        ):
            await peer.refuse(self._step, error)

    @asynccontextmanager
    async def _offer(self) -> AsyncIterator[tuple[Conversation, ControlMessage]]:
        """Hold the conversation that begins with an offer, for a block.

        Conversations about earlier steps, which the sender gave up, are skipped.
        """
        assert self._channel is not None
        while True:
            talk = Conversation(self._channel, self._ranks, self._deadline)
            try:
                async with talk.held() as peer:
                    yield peer, await peer.hear(Kind.OFFER, step=self._step)
                return
            except OutdatedError as error:
                logger.info("waiting for step %d: %s", self._step, error)

    async def _prepare(self, target: Target, grid: ChunkGrid) -> None:
        """Map memory ahead of the bytes, because gloo has one thread for both."""
        if (prepare := target.prepare) is not None:
            for chunk in range(len(grid)):
                await self._bridge.run(prepare, *grid.range(chunk))

    def _read(self, header: mmap) -> Manifest:
        manifest, self._placement = self._memory.read(header, self._limits)
        if not isinstance(manifest, Manifest) or manifest.step != self._step:
            raise RemoteProtocolError("the header is not that of the offer")
        self._messages = messages_of(manifest, self._memory.message_bytes)
        return manifest


def _allocate_header(nbytes: int) -> mmap:
    with allocating("a header", nbytes):
        return mmap(-1, nbytes)
