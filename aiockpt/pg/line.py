"""One rank's end of a conversation: the waits, and what breaks them.

Gloo has no future and no poll: the only way to learn that a message has moved is to
block in ``Work.wait``, and the only ends of that are the message, the peer's death (not
always: :meth:`Line.ask`) and a timeout, which closes the pair of ranks for good. So every wait has a thread of its
own (:meth:`.Bridge.run_apart`) and the time that remains; who stops waiting leaves the
thread behind, and a group that nobody may use any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar, TypeVarTuple

from aiockpt._bridge import Bridge
from aiockpt._deadline import Deadline
from aiockpt._tasks import together
from aiockpt.errors import PeerFailedError, RemoteProtocolError
from aiockpt.pg.frames import FRAME_BYTES, Frame, Kind
from aiockpt.pg.messages import Memory
from aiockpt.pg.mover import Mover

__all__ = ["Line"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

_AFTER: Final = 0.1
"""Seconds that a wait goes on after the deadline, so that only one of the two fires."""


_LAST: Final = (Kind.DONE, Kind.FAILED)


class Line:
    """One conversation with one rank, as the sender or as the receiver.

    Every coroutine here raises ``ProcessGroupError`` when an operation failed. If
    cancelled, or if it fails, the group is broken.
    """

    def __init__(self, mover: Mover, bridge: Bridge, deadline: Deadline) -> None:
        self.rank = mover.rank
        self._mover = mover
        self._bridge = bridge
        self._deadline = deadline
        self._over = True

    def __repr__(self) -> str:
        return f"<Line with rank {self.rank}>"

    def __enter__(self) -> Line:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if not self._over:
            # The other end expects more, and would take what comes next for it.
            assert error is not None, "a conversation was not held to its end"
            self._mover.health.break_off(self.rank, error)

    async def say(self, kind: Kind, step: int, nbytes: int = 0, text: str = "") -> None:
        """Send a frame."""
        await self.send(Frame(kind, step, nbytes, text).encode())
        self._over = kind in _LAST

    async def hear(self, expected: Kind) -> Frame:
        """Receive a frame.

        Raises:
            PeerFailedError: the peer gave up; the conversation is over.
            RemoteProtocolError: it is not what was expected, and the group is broken.
        """
        return self._judge(await self.receive(FRAME_BYTES), expected)

    async def ask(self, speak: Callable[[], Coroutine[Any, Any, None]], expected: Kind) -> Frame:
        """Send something, and receive the frame that answers it.

        Raises:
            PeerFailedError: the peer gave up; the conversation is over.
            RemoteProtocolError: it is not what was expected, and the group is broken.
        """
        if not self._mover.tagged:
            await speak()
            return await self.hear(expected)
        # A peer that dies half way through a message ends gloo's wait for what it was
        # to send, and not the one for what it was to receive: so wait for both.
        answers: list[bytearray] = []

        async def listen() -> None:
            answers.append(await self.receive(FRAME_BYTES))

        await together([speak, listen])
        return self._judge(answers[0], expected)

    def _judge(self, answer: bytearray, expected: Kind) -> Frame:
        try:
            frame = Frame.decode(answer)
            if frame.kind not in (expected, Kind.FAILED):
                raise RemoteProtocolError(f"rank {self.rank} said {frame.kind.name}")
        except RemoteProtocolError as error:
            self._mover.health.break_off(self.rank, error)
            raise
        self._over = frame.kind in _LAST
        if frame.kind is Kind.FAILED:
            raise PeerFailedError(self.rank, frame.text)
        return frame

    async def send(self, data: bytearray) -> None:
        """Send bytes in one message."""
        await self._apart(self._mover.send, data)

    async def receive(self, nbytes: int) -> bytearray:
        """Receive that many bytes in one message."""
        return await self._apart(self._mover.receive, nbytes)

    async def send_segment(
        self, memory: Memory, messages: Iterable[tuple[int, int]]
    ) -> None:
        """Send the data segment."""
        await self._apart(self._mover.send_segment, memory, messages)

    async def receive_segment(
        self,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        on_arrived: Callable[[int], None],
    ) -> None:
        """Receive the data segment; tell, from a thread, up to where it is there."""
        await self._apart(self._mover.receive_segment, memory, messages, on_arrived)

    async def _apart(self, move: Callable[[float, *Args], T], *args: *Args) -> T:
        self._mover.health.check()
        remaining = self._deadline.when - asyncio.get_running_loop().time()
        until = time.monotonic() + max(remaining, 0) + _AFTER
        try:
            return await self._bridge.run_apart(move, until, *args)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._deadline.last_error = f"rank {self.rank} was still waited for"
            self._mover.health.break_off(self.rank, error)
            raise
