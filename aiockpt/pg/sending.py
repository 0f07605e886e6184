"""One send, stop by stop: a snapshot, and one conversation for each destination."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial

from aiockpt.errors import AiockptError
from aiockpt.events import TransferEvent, emit
from aiockpt.pg.frames import Kind
from aiockpt.pg.line import Line
from aiockpt.pg.medium import Medium, Parcel
from aiockpt.pg.messages import messages_of
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.tasks import run_all

__all__ = ["OpenLine", "Send"]

OpenLine = Callable[[int], AbstractAsyncContextManager[Line]]
"""Waits for a rank's turn, and gives the line to it."""


class Send:
    """One call of ``send_checkpoint``."""

    def __init__(
        self,
        medium: Medium,
        turn: asyncio.Lock,
        bridge: Bridge,
        deadline: Deadline,
        open_line: OpenLine,
    ) -> None:
        self._medium = medium
        self._turn = turn
        self._bridge = bridge
        self._deadline = deadline
        self._open_line = open_line
        self._errors: dict[int, AiockptError] = {}

    async def run(self, ranks: Sequence[int], step: int, state_dict: object) -> None:
        """Send to every rank at once; the first one's error is raised at the end.

        What cannot be staged is told to all of them instead, now or when they come.
        If cancelled while it stages, nothing was sent; later, the group is broken.
        """
        started = time.monotonic()
        with ExitStack() as stack:
            try:
                async with self._turn:  # or two sends to a rank may change places
                    parcel = await self._medium.stage(state_dict, step=step)
                    stack.callback(parcel.release)
                    messages = await self._bridge.run(
                        messages_of, parcel.manifest, self._medium.message_bytes
                    )
            except Exception as error:
                try:
                    await self._tell(ranks, step, error)
                except asyncio.CancelledError:
                    if not self._deadline.expired:
                        raise
                    error.add_note("the receivers could not be told in time")
                raise
            await self._deliver_all(ranks, parcel, messages)
        nbytes, elapsed = parcel.manifest.segment_bytes, time.monotonic() - started
        emit(
            TransferEvent(
                stop="serve",
                step=step,
                peer=f"ranks {', '.join(map(str, ranks))}",
                nbytes=nbytes,
                seconds=elapsed,
                level=logging.INFO,
            )
        )

    async def _tell(self, ranks: Sequence[int], step: int, error: Exception) -> None:
        """Say why nothing comes."""
        why = f"{type(error).__name__}: {error}"

        async def tell(line: Line) -> None:
            await line.leave_word(step, why)

        await self._each(ranks, tell)
        for untold in self._errors.values():
            error.add_note(f"could not be told: {untold}")

    async def _deliver_all(
        self,
        ranks: Sequence[int],
        parcel: Parcel,
        messages: Sequence[tuple[int, int]],
    ) -> None:
        self._deadline.stop = "serve"
        deliver = partial(self._deliver, parcel=parcel, messages=messages)
        await self._each(ranks, lambda line: line.hold(deliver))
        if self._errors:
            first, *others = (error for _, error in sorted(self._errors.items()))
            for other in others:
                first.add_note(f"also failed: {other}")
            raise first

    async def _deliver(
        self, line: Line, parcel: Parcel, messages: Sequence[tuple[int, int]]
    ) -> None:
        await line.say(Kind.OFFER, parcel.manifest.step, len(parcel.offer))
        await line.hear(Kind.ACCEPT)
        await line.send(parcel.offer)
        await line.hear(Kind.ACCEPT)
        await line.send_segment(parcel.memory, messages, parcel.sealing)
        await line.hear(Kind.DONE)

    async def _each(
        self, ranks: Sequence[int], talk: Callable[[Line], Awaitable[None]]
    ) -> None:
        """Talk to all at once; a rank's failure is kept, and stops no other."""

        async def attempt(rank: int) -> None:
            try:
                async with self._open_line(rank) as line:
                    await talk(line)
            except AiockptError as error:
                self._errors[rank] = error

        await run_all([partial(attempt, rank) for rank in ranks])
