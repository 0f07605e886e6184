"""One rank of a process group as the source of a receive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from mmap import mmap
from types import TracebackType

from aiockpt.errors import RemoteProtocolError, StepNotFoundError
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.limits import Limits, enforce
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.pg.conversation import (
    ControlMessage,
    Conversation,
    GroupRanks,
    Kind,
    OutdatedError,
    telling,
)
from aiockpt.pg.messages import messages_of
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.system import allocating
from aiockpt.runtime.tasks import beside
from aiockpt.state.load_plan import Matching
from aiockpt.transfer.source import (
    ChunkDestination,
    DeviceEntries,
    OnProgress,
    Source,
)

logger = logging.getLogger("aiockpt")


class GroupSource(Source):
    """The checkpoint of one rank of a process group.

    The whole checkpoint arrives in one go, without messages to the sender meanwhile.

    Args:
        step: The step to receive.
        rank: The sender.
        ranks: The ranks of the group.
        limits: The bounds of the checkpoint.
        deadline: The deadline of the whole call.
    """

    medium = remark = ""
    _peer: Conversation  # from the turn on

    def __init__(
        self,
        step: int,
        rank: int,
        ranks: GroupRanks,
        limits: Limits,
        deadline: Deadline,
    ) -> None:
        self.name = f"rank {rank}"
        self._step, self._rank, self._ranks = step, rank, ranks
        self._limits, self._deadline = limits, deadline
        self._talk = AsyncExitStack()  # the turn, and the conversation in it
        self._has_asked = False
        self._messages: Sequence[tuple[int, int]] = ()
        self._placement: Sequence[int] = ()

    async def __aenter__(self) -> GroupSource:
        """Wait for the turn: receives from one rank keep the order of their calls."""
        turn = self._ranks.turn(self._rank, sending=False, deadline=self._deadline)
        self._peer = await self._talk.enter_async_context(turn)
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
            if isinstance(error, Exception) and not self._has_asked:
                async with telling(error, "the sender", self._deadline), self._offer():
                    await self._peer.refuse(self._step, error)
        finally:
            await self._talk.__aexit__(kind, error, trace)

    async def manifest(self, step: int) -> Manifest:
        """Begin the conversation that offers ``step``; return the manifest.

        The header may be long, so it is freed before the peak of memory use.
        """
        self._has_asked = True
        peer, most = self._peer, self._limits.max_header_bytes
        offer = await self._talk.enter_async_context(self._offer())
        await self._talk.enter_async_context(peer.answering(Kind.DONE, step))
        if offer.step != step:
            raise StepNotFoundError(step, serving=offer.step)
        if not offer.nbytes:
            raise RemoteProtocolError("the offer has no header")
        enforce("the header's length", offer.nbytes, most, "max_header_bytes")
        header = await self._ranks.bridge.run(_allocate_header, offer.nbytes)
        await peer.say(Kind.ACCEPT, step)
        await peer.fill(header)
        return await self._ranks.bridge.run(self._read, header)

    def device_entries(
        self, manifest: Manifest, rule: Matching, *, direct: bool
    ) -> DeviceEntries | None:
        """Return what goes to the memory of the group's device."""
        medium, placement = self._ranks.medium, self._placement
        return medium.device_entries(manifest, placement, rule, direct=direct)

    async def accept(self, step: int) -> None:
        """Tell the sender to begin."""
        await self._peer.say(Kind.ACCEPT, step)

    async def read(
        self,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Receive all chunks, and compare their digests at the end.

        ``chunks`` must be all chunks. The digests arrive last, so
        ``destination.complete`` is not called.

        Raises:
            IntegrityError: a digest differs.
            ProcessGroupError: the group is broken.
        """
        grid, loop = outline.grid, asyncio.get_running_loop()

        def tell(nbytes: int) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_progress, nbytes, 1)

        memory = destination.memory
        digests = self._ranks.medium.digests(memory, grid, tell)
        async with beside(partial(self._prepare, destination, grid)):
            # The transfer cannot be stopped, so damaged bytes arrive as well.
            await self._peer.receive_segment(memory, self._messages, digests)

    async def end(self, step: int) -> None:
        """Tell the sender of the success, which ends the conversation."""
        await self._talk.aclose()

    @asynccontextmanager
    async def _offer(self) -> AsyncIterator[ControlMessage]:
        """Hold the conversation that begins with an offer, for a block.

        Conversations about earlier steps, which the sender gave up, are skipped.
        """
        while True:
            try:
                async with self._peer.opened():
                    yield await self._peer.hear(Kind.OFFER, step=self._step)
                return
            except OutdatedError as error:
                logger.info("waiting for step %d: %s", self._step, error)

    async def _prepare(self, destination: ChunkDestination, grid: ChunkGrid) -> None:
        """Map memory ahead of the bytes, because gloo has one thread for both."""
        if (prepare := destination.prepare) is not None:
            for chunk in range(len(grid)):
                await self._ranks.bridge.run(prepare, *grid.range(chunk))

    def _read(self, header: mmap) -> Manifest:
        medium = self._ranks.medium
        manifest, self._placement = medium.read(header, self._limits)
        if not isinstance(manifest, Manifest) or manifest.step != self._step:
            raise RemoteProtocolError("the header is not that of the offer")
        self._messages = messages_of(manifest, medium.message_bytes)
        return manifest


def _allocate_header(nbytes: int) -> mmap:
    with allocating("a header", nbytes):
        return mmap(-1, nbytes)
