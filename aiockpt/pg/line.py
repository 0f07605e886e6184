"""One rank's end of a conversation: the waits, and what breaks them.

Gloo has no future and no poll: the only way to learn that a message has moved is to
block in ``Work.wait``. So every wait has a thread of its own
(:meth:`.Bridge.run_apart`) and the time that remains; who stops waiting leaves the
thread behind, and a group that nobody may use any more.

A wait also ends with the peer's death, but not always: what gloo has begun to write or
read then stays until the timeout, and only what has not begun is woken. So during a
conversation each end keeps *vigil*: it waits for a last frame, which the other one
sends at the end, or when it gives up in the middle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from mmap import mmap
from typing import Final, TypeVar, TypeVarTuple

from aiockpt.errors import (
    IntegrityError,
    PeerFailedError,
    ProcessGroupError,
    RemoteProtocolError,
)
from aiockpt.pg.frames import FRAME_BYTES, Frame, Kind
from aiockpt.pg.group import Health
from aiockpt.pg.messages import Memory
from aiockpt.pg.mover import Mover
from aiockpt.pg.sealing import Sealing, damage
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.tasks import run_all

__all__ = ["Line", "OutdatedError"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

_AFTER: Final = 0.1
"""Seconds that a wait goes on after the deadline, so that only one of the two fires."""

_LAST: Final = (Kind.DONE, Kind.FAILED)


class OutdatedError(PeerFailedError):
    """The peer gave up an earlier step, which nobody received."""


class Line:
    """One conversation with one rank, as the sender or as the receiver.

    Every coroutine here raises ``ProcessGroupError`` when an operation failed. If
    cancelled, or if it fails, the group is broken.
    """

    def __init__(
        self, mover: Mover, health: Health, bridge: Bridge, deadline: Deadline
    ) -> None:
        self.rank = mover.rank
        self._mover = mover
        self._health = health
        self._bridge = bridge
        self._deadline = deadline
        self._over = True

    def __repr__(self) -> str:
        return f"<Line with rank {self.rank}>"

    async def hold(self, talk: Callable[[Line], Awaitable[T]]) -> T:
        """Hold a conversation: what ``talk`` returns or raises comes back.

        It ends at once when the peer dies or gives up. Where one end has said why it
        ends early, the group is well; otherwise it is broken, and the peer is told.
        """
        talked: list[T] = []
        failed: list[Exception] = []

        async def hold() -> None:
            try:
                talked.append(await talk(self))
            except Exception as error:
                if not self._over:
                    raise
                failed.append(error)
            if self._mover.tagged:
                await self._apart(self._mover.say_last, Frame(Kind.BYE, 0).encode())

        async def keep_vigil() -> None:
            try:
                await self._hear_last()
            except ProcessGroupError:
                if not talked and not failed:
                    raise  # else nothing is missing

        try:
            vigil = [keep_vigil] if self._mover.tagged else []
            await run_all([hold, *vigil])
        except BaseException as error:
            self._break_off(error)
            raise
        if failed:
            raise failed[0]
        return talked[0]

    async def say(self, kind: Kind, step: int, nbytes: int = 0, text: str = "") -> None:
        """Send a frame."""
        await self.send(Frame(kind, step, nbytes, text).encode())
        self._over = kind in _LAST

    async def leave_word(self, step: int, text: str) -> None:
        """Hold a conversation that only says why ``step`` is not sent.

        Where messages have tags, it does not wait: the receiver may come later, for
        this step or for another one. Otherwise it waits until the receiver has come.
        """
        if not self._mover.tagged:
            await self.hold(lambda line: line.say(Kind.FAILED, step, text=text))
            return
        last, bye = Frame(Kind.FAILED, step, text=text), Frame(Kind.BYE, 0)
        leave = self._mover.leave_word
        await self._bridge.run(leave, last.encode(), bye.encode())

    async def hear(self, expected: Kind, *, step: int = 0) -> Frame:
        """Receive a frame.

        Args:
            expected: What the peer should say.
            step: The step that this conversation is about.

        Raises:
            OutdatedError: the peer gave up an earlier step than ``step``; the
                conversation is over, and another one may follow.
            PeerFailedError: the peer gave up; the conversation is over.
            RemoteProtocolError: it is not what was expected, and the group is broken.
        """
        self._over = False
        frame = Frame.decode(await self.receive(FRAME_BYTES))
        if frame.kind not in (expected, Kind.FAILED):
            raise RemoteProtocolError(f"rank {self.rank} said {frame.kind.name}")
        self._over = frame.kind in _LAST
        if frame.kind is Kind.FAILED:
            failure = OutdatedError if frame.step < step else PeerFailedError
            raise failure(self.rank, frame.text)
        return frame

    async def send(self, data: bytearray) -> None:
        """Send bytes in one message."""
        await self._apart(self._mover.send, data)

    async def receive(self, nbytes: int) -> bytearray:
        """Receive that many bytes in one message."""
        data = bytearray(nbytes)
        await self.fill(data)
        return data

    async def fill(self, data: bytearray | mmap) -> None:
        """Receive as many bytes as it holds in one message."""
        await self._apart(self._mover.receive, data)

    async def send_segment(
        self, memory: Memory, messages: Iterable[tuple[int, int]], sealing: Sealing
    ) -> None:
        """Send the data segment, and the digests of its chunks."""
        await self._apart(self._mover.send_segment, memory, messages, sealing)
        if digits := await sealing.digits():
            await self.send(digits)

    async def receive_segment(
        self, memory: Memory, messages: Iterable[tuple[int, int]], sealing: Sealing
    ) -> IntegrityError | None:
        """Receive the data segment; return what was damaged on the way."""
        await self._apart(self._mover.receive_segment, memory, messages, sealing)
        if not (found := await sealing.digits()):
            return None
        return damage(await self.receive(len(found)), found)

    async def _apart(self, move: Callable[[float, *Args], T], *args: *Args) -> T:
        remaining = self._deadline.when - asyncio.get_running_loop().time()
        until = time.monotonic() + max(remaining, 0) + _AFTER
        try:
            return await self._bridge.run_apart(move, until, *args)
        except BaseException as error:
            self._over = False  # also if it was the first word: the peer may have it
            if _is_cut(error):
                self._deadline.last_error = f"rank {self.rank} was still waited for"
            self._health.break_off(self.rank, error)
            raise

    async def _hear_last(self) -> None:
        frame = Frame.decode(await self._apart(self._mover.hear_last, FRAME_BYTES))
        if frame.kind is not Kind.BYE:
            error = ProcessGroupError(frame.text, rank=self.rank)
            self._health.break_off(self.rank, error)
            raise error

    def _break_off(self, error: BaseException) -> None:
        """Let nobody use the group any more, and tell the peer, who may wait long."""
        self._health.break_off(self.rank, error)
        self._mover.leave_behind()
        if self._mover.tagged:
            what = "it was cut short" if _is_cut(error) else f"{error}"
            frame = Frame(Kind.FAILED, 0, text=f"the other end gave up: {what}")
            self._bridge.post(self._give_up, frame.encode())
        else:
            self._health.remains.append(self._mover)

    def _give_up(self, frame: bytearray) -> None:
        self._health.remains.append(self._mover.give_up(frame))


def _is_cut(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError)
