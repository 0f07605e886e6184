"""The control messages of two ranks, and the failures that break their group.

The messages of a conversation, in order::

    sender                                receiver
    OFFER step, bytes of the header   →
                                      ←   ACCEPT: the step is the expected one
    header                            →
                                      ←   ACCEPT: the checkpoint fits into memory
    data segment, message by message  →
    digests of its chunks             →
                                      ←   DONE: every digest matched
    FAILED why                        →   (in place of the OFFER)
                                      ←   FAILED why (in place of ACCEPT or DONE)

The receiver ignores the digests in the header. For host memory they are zeros,
because the header is sent before they are computed.

An end that fails tells the other end, so no message is under way when a conversation
ends. There is one exception. A sender in host memory that has nothing to offer posts
FAILED and BYE for a receiver that may come later, and continues. A receiver skips such
a conversation if it is about an earlier step than its own.

Gloo has no future and no poll. The only way to learn that a message has moved is to
block in ``Work.wait``. So every wait has its own thread (:meth:`.Bridge.run_apart`) and
the remaining time as its timeout. A caller that stops waiting leaves the thread behind,
and the group becomes unusable.

A wait usually ends when the peer dies, but not always. Gloo wakes the waits for
messages that it has not begun to transfer. The others last until the timeout. So each
end also waits for a *last frame* during the whole conversation. The peer sends it at
the end (BYE), or when it gives up the conversation and the group (FAILED).
"""

from __future__ import annotations

import asyncio
import enum
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from mmap import mmap
from typing import Final, TypeVar, TypeVarTuple

from aiockpt.errors import (
    AiockptError,
    PeerFailedError,
    ProcessGroupError,
    RemoteProtocolError,
)
from aiockpt.memory.arena import Memory
from aiockpt.pg.messages import (
    Digests,
    GroupLike,
    Medium,
    RankChannel,
    compare,
    rank_in,
)
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline
from aiockpt.runtime.tasks import beside

T = TypeVar("T")
Args = TypeVarTuple("Args")

FRAME_BYTES: Final = 1024

_MAGIC: Final = b"aiockpt\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sHHqqI")
_TEXT_BYTES: Final = FRAME_BYTES - _HEAD.size
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_MAX_STEP: Final = 2**63 - 1

_WAIT_BEYOND_S: Final = 0.1
"""A wait outlasts the deadline by so much, so that the deadline fires first."""


# ------------------------------------------------------------------------- frames


class Kind(enum.IntEnum):
    """The kind of a frame."""

    OFFER = 1
    ACCEPT = 2
    DONE = 3
    FAILED = 4
    BYE = 5


_KINDS: Final = frozenset(Kind)
_FINAL: Final = (Kind.DONE, Kind.FAILED)


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A control message: 1 KiB, little endian, padded with zeros.

    Its fields are magic, version, kind, step, bytes, length of the text, and text. In
    an OFFER, ``nbytes`` is the length of the header.
    """

    kind: Kind
    step: int
    nbytes: int = 0
    text: str = ""

    def encode(self) -> bytearray:
        """Return the frame's bytes; a text that is too long is cut."""
        text = self.text.encode("utf-8", "replace")[:_TEXT_BYTES]
        step = self.step if 0 <= self.step <= _MAX_STEP else -1
        frame = bytearray(FRAME_BYTES)
        head = (_MAGIC, _VERSION, self.kind, step, self.nbytes, len(text))
        _HEAD.pack_into(frame, 0, *head)
        frame[_HEAD.size : _HEAD.size + len(text)] = text
        return frame

    @classmethod
    def decode(cls, data: bytes | bytearray) -> ControlMessage:
        """Return the frame of a peer.

        Raises:
            RemoteProtocolError: the bytes are not a frame of this version.
        """
        magic, version, kind, step, nbytes, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise RemoteProtocolError("the peer is not an aiockpt.PGTransport")
        if version != _VERSION:
            raise RemoteProtocolError(
                f"the peer speaks version {version}; this side knows {_VERSION}"
            )
        if kind not in _KINDS or length > _TEXT_BYTES or nbytes < 0:
            raise RemoteProtocolError(
                f"malformed frame: kind {kind}, {nbytes} bytes, a text of {length}"
            )
        text = data[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace")
        return cls(Kind(kind), step, nbytes, _CONTROL.sub(" ", text))


# ------------------------------------------------------------------- the group


class GroupRanks:
    """The ranks of a group: orders the conversations, and knows if the group broke.

    A broken group stays broken. ``remains`` keeps messages alive that are under way
    without a waiter.

    Args:
        group: The group.
        medium: The memory of the messages.
        bridge: Provides the threads.
    """

    def __init__(self, group: GroupLike, medium: Medium, bridge: Bridge) -> None:
        self.remains: list[object] = []
        self.medium, self.bridge = medium, bridge
        self._group = group
        self._turns: dict[tuple[bool, int], asyncio.Lock] = {}
        self._told = set[tuple[bool, int]]()  # peers that know that it is broken
        self._why = ""
        self._rank: int | None = None

    @property
    def broken(self) -> bool:
        """Whether the group can no longer send or receive."""
        return bool(self._why)

    def check(self) -> None:
        """Raise ``ProcessGroupError`` if the group is broken."""
        if self._why:
            raise ProcessGroupError(self._why, rank=self._rank)

    def tell(self, channel: RankChannel, why: str = "") -> None:
        """Tell a peer that the group is broken, once and without waiting for it."""
        peer = (channel.sending, channel.rank)
        if channel.tagged and peer not in self._told:
            self._told.add(peer)
            text = f"the other end gave up: {why or self._why}"
            frame = ControlMessage(Kind.FAILED, 0, text=text).encode()
            self.bridge.post(self._give_up, channel, frame)

    def _give_up(self, channel: RankChannel, frame: bytearray) -> None:
        self.remains.append(channel.give_up(frame))

    def break_off(self, rank: int, error: BaseException) -> None:
        """Mark the group as broken, and tell all ranks; remember the first error.

        A rank that had no part in it may be waiting for this one already. A
        conversation that is under way comes to its end first; see `turn`.
        """
        if self._why:
            return
        why = str(error)
        if isinstance(error, asyncio.CancelledError):
            why = "it was cut short by a cancel or a deadline"
        elif isinstance(error, ProcessGroupError):
            why = error.detail
        self._rank, self._why = rank, f"an earlier one was the last: {why}"
        for other, sending in product(self._others(), (True, False)):
            turn = self._turns.get((sending, other))
            if turn is None or not turn.locked():
                self.tell(self.medium.channel(self._group, other, sending=sending))

    def _others(self) -> list[int]:
        try:
            own = rank_in(self._group)
            return [rank for rank in range(self._group.size()) if rank != own]
        except Exception:  # noqa: BLE001 - torchft's group, while it is made anew
            return []

    @asynccontextmanager
    async def turn(
        self, rank: int, *, sending: bool, deadline: Deadline
    ) -> AsyncIterator[Conversation]:
        """Wait until no other call talks to ``rank``; yield this end of conversations.

        Messages of host memory have tags. A device's communicator has only an order, so
        both ends hold one conversation at a time. At the end of the turn, a peer is
        told if the group has broken meanwhile.
        """
        channel = self.medium.channel(self._group, rank, sending=sending)
        key = (sending, rank) if channel.tagged else (True, -1)
        async with self._turns.setdefault(key, asyncio.Lock()):
            self.check()
            try:
                yield Conversation(channel, self, deadline)
            finally:
                if self.broken:
                    self.tell(channel)


# ------------------------------------------------------------- one conversation


class OutdatedError(PeerFailedError):
    """The peer gave up an earlier step, which was never received."""


@asynccontextmanager
async def telling(
    error: Exception, whom: str, deadline: Deadline
) -> AsyncIterator[None]:
    """Tell a peer of an error of a block; add a note to the error if that fails.

    The error is raised even if the deadline passes meanwhile.
    """
    try:
        yield
    except AiockptError as lost:
        error.add_note(f"{whom} could not be told: {lost}")
    except asyncio.CancelledError:
        if not deadline.expired:
            raise
        error.add_note(f"{whom} could not be told in time")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Conversation:
    """One end of a conversation with a rank, which `opened` begins.

    Every coroutine raises ``ProcessGroupError`` if an operation fails. That, or a
    cancellation, breaks the group.
    """

    def __init__(
        self, channel: RankChannel, ranks: GroupRanks, deadline: Deadline
    ) -> None:
        self._channel, self._ranks, self._deadline = channel, ranks, deadline
        self._is_over = True  # both ends expect no further message
        self._has_ended = False  # the block has ended

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Hold one conversation for the length of a block.

        If the peer dies or gives up, the block is cancelled and this raises the error.
        If the block fails after one end has reported its failure, the group stays
        usable. If it fails otherwise, or is cancelled, the group breaks, and the peer
        is told.
        """
        self._is_over, self._has_ended = True, False
        tagged = self._channel.tagged
        failed: Exception | None = None
        try:
            async with beside(self._watch_peer) if tagged else nullcontext():
                try:
                    yield
                except Exception as error:
                    if not self._is_over:
                        raise
                    failed = error
                self._has_ended = True
                if tagged:
                    bye = ControlMessage(Kind.BYE, 0).encode()
                    await self._in_thread(self._channel.send_last, bye)
        except BaseException as error:
            self._break_off(error)
            raise
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # its traceback has this frame

    async def post_refusal(self, step: int, error: Exception) -> None:
        """Tell a receiver why ``step`` is not sent, in a conversation of its own.

        If messages have tags, the refusal is posted without waiting, because the
        receiver may come later, for this step or for another one.
        """
        if not self._channel.tagged:
            async with self.opened():
                await self.refuse(step, error)
            return
        only = ControlMessage(Kind.FAILED, step, text=_reason(error)).encode()
        last = ControlMessage(Kind.BYE, 0).encode()
        await self._ranks.bridge.run(self._channel.leave_word, only, last)

    async def say(self, kind: Kind, step: int, nbytes: int = 0, text: str = "") -> None:
        """Send a frame."""
        await self.send(ControlMessage(kind, step, nbytes, text).encode())
        self._is_over = kind in _FINAL

    async def hear(self, expected: Kind, *, step: int = 0) -> ControlMessage:
        """Receive a frame.

        Args:
            expected: The expected kind.
            step: The step of this conversation.

        Raises:
            OutdatedError: the peer gave up an earlier step than ``step``; the
                conversation is over, and another one may follow.
            PeerFailedError: the peer gave up; the conversation is over.
            RemoteProtocolError: the peer sent another kind; the group is broken.
        """
        self._is_over = False
        data = bytearray(FRAME_BYTES)
        await self.fill(data)
        frame = ControlMessage.decode(data)
        if frame.kind not in (expected, Kind.FAILED):
            raise RemoteProtocolError(
                f"rank {self._channel.rank} sent {frame.kind.name}, expected "
                f"{expected.name}"
            )
        self._is_over = frame.kind in _FINAL
        if frame.kind is Kind.FAILED:
            failure = OutdatedError if frame.step < step else PeerFailedError
            raise failure(self._channel.rank, frame.text)
        return frame

    @asynccontextmanager
    async def answering(self, kind: Kind, step: int) -> AsyncIterator[None]:
        """Send ``kind`` when the block ends, or the reason of its failure.

        In a broken group, this sends nothing.
        """
        try:
            yield
        except Exception as error:
            if not self._ranks.broken:
                async with telling(error, "the sender", self._deadline):
                    await self.refuse(step, error)
            raise
        await self.say(kind, step)

    async def refuse(self, step: int, error: Exception) -> None:
        """Send the reason why this end fails, which ends the conversation."""
        await self.say(Kind.FAILED, step, text=_reason(error))

    async def send(self, data: bytearray) -> None:
        """Send bytes in one message."""
        await self._in_thread(self._channel.send, data)

    async def fill(self, data: bytearray | mmap) -> None:
        """Receive ``len(data)`` bytes in one message."""
        await self._in_thread(self._channel.receive, data)

    async def send_segment(
        self, memory: Memory, messages: Iterable[tuple[int, int]], digests: Digests
    ) -> None:
        """Send the data segment, and the digests of its chunks."""
        send = self._channel.send_segment
        await self._in_thread(send, memory, messages, digests)
        if digits := await digests.digits():
            await self.send(digits)

    async def receive_segment(
        self, memory: Memory, messages: Iterable[tuple[int, int]], digests: Digests
    ) -> None:
        """Receive the data segment, and the sender's digests.

        Raises:
            IntegrityError: a chunk has another digest; the group stays usable.
        """
        receive = self._channel.receive_segment
        await self._in_thread(receive, memory, messages, digests)
        if found := await digests.digits():
            sent = bytearray(len(found))
            await self.fill(sent)
            compare(sent, found)

    async def _in_thread(self, move: Callable[[float, *Args], T], *args: *Args) -> T:
        """Call a method of the channel in a thread of its own, until the deadline."""
        rank = self._channel.rank
        remaining = self._deadline.when - asyncio.get_running_loop().time()
        until = time.monotonic() + max(remaining, 0) + _WAIT_BEYOND_S
        try:
            return await self._ranks.bridge.run_apart(move, until, *args)
        except BaseException as error:
            self._is_over = False  # the peer may have received it
            if isinstance(error, asyncio.CancelledError):
                self._deadline.last_error = f"rank {rank} was still waited for"
            self._ranks.break_off(rank, error)
            raise

    async def _watch_peer(self) -> None:
        """Wait for the peer's last frame; raise if it is dead or has given up."""
        try:
            data = await self._in_thread(self._channel.receive_last, FRAME_BYTES)
            frame = ControlMessage.decode(data)
            if frame.kind is not Kind.BYE:
                error = ProcessGroupError(frame.text, rank=self._channel.rank)
                self._ranks.break_off(self._channel.rank, error)
                raise error
        except ProcessGroupError:
            if not self._has_ended:
                raise  # otherwise the conversation was complete

    def _break_off(self, error: BaseException) -> None:
        """Break the group, and tell the peer, which might wait long otherwise."""
        self._ranks.break_off(self._channel.rank, error)
        self._channel.abandon()
        if not self._channel.tagged:
            self._ranks.remains.append(self._channel)
            return
        cut = isinstance(error, asyncio.CancelledError)
        self._ranks.tell(self._channel, "it was cut short" if cut else str(error))
