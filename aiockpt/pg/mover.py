"""Moves bytes of host memory between this rank and another one: blocking, in threads.

Messages keep their order, many are under way at once, and a thread that was left behind
begins no other one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from mmap import mmap
from typing import Final, NamedTuple, Protocol

import torch

from aiockpt.errors import ProcessGroupError
from aiockpt.pg.group import Group, Pending, keep_with
from aiockpt.pg.messages import Landings, Leavings, Memory
from aiockpt.pg.sealing import Sealing

__all__ = ["Lands", "Leaves", "Message", "Mover"]

# A group that is not ours alone may use small tags.
_FORWARD: Final = 0x61696F00  # from a sender to a receiver
_BACKWARD: Final = 0x61696F01
_VIGIL: Final = 2  # more, for the last frame

_SHARE: Final = 32
"""Of the messages under way, one in how many is waited for at once."""

_LONGEST: Final = 365 * 86400.0
"""Seconds of one wait: gloo overflows where nobody has set a deadline."""


class Leaves(Protocol):
    """Where messages come from."""

    @property
    def crowded(self) -> bool:
        """Whether one must be gone before another one is taken."""

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return these bytes of the segment."""

    def gone(self, start: int) -> None:
        """Let go of what was taken."""


class Lands(Protocol):
    """Where messages arrive."""

    @property
    def crowded(self) -> bool:
        """Whether one must have come to its place before another one is expected."""

    def expect(self, start: int, stop: int) -> torch.Tensor:
        """Return what these bytes of the segment are received into."""

    def settle(self, start: int) -> None:
        """Bring what has arrived to its place."""


class Message(NamedTuple):
    """A message under way."""

    work: Pending
    tensor: torch.Tensor


class Mover:
    """Sends to and receives from one rank, as the sender of a checkpoint or not.

    Everything raises ``ProcessGroupError`` when an operation failed, or had not ended
    at ``until``, a moment of ``time.monotonic``.
    """

    tagged = True
    """Whether messages find their receiver by tag, and need no order."""

    ahead = 128
    """Messages that are sent at once: what moves them finds the next one there."""

    window = 32
    """Messages that are awaited at once, so that none waits for a round trip."""

    def __init__(self, group: Group, rank: int, *, sending: bool) -> None:
        self.rank = rank
        self._group = group
        self._out, self._in = _FORWARD, _BACKWARD
        if not sending:
            self._out, self._in = _BACKWARD, _FORWARD
        self._left_behind = False

    def send(self, until: float, data: bytearray) -> None:
        """Send bytes in one message."""
        self._wait(self._post_send(_tensor(data)), until)

    def receive(self, until: float, into: bytearray | mmap) -> None:
        """Receive as many bytes (one at least) as it holds, in one message."""
        self._receive(until, into)

    def say_last(self, until: float, frame: bytearray) -> None:
        """Send the frame that the peer keeps vigil for."""
        self._wait(self._post_send(_tensor(frame), lane=_VIGIL), until)

    def hear_last(self, until: float, nbytes: int) -> bytearray:
        """Keep vigil: receive that frame, or fail when the peer dies."""
        frame = bytearray(nbytes)
        self._receive(until, frame, lane=_VIGIL)
        return frame

    def leave_word(self, last: bytearray, bye: bytearray) -> None:
        """Say the only frame of a conversation, and end it, without waiting.

        A receiver that comes later hears both frames, and its own last one has a
        place to go to.
        """
        room = _tensor(bytearray(len(bye)))
        messages = (
            self._post_send(_tensor(last)),
            self._post_send(_tensor(bye), lane=_VIGIL),
            self._post_receive(room, lane=_VIGIL),
        )
        keep_with(self._group, messages)

    def leave_behind(self) -> None:
        """Let threads that still move something begin nothing else."""
        self._left_behind = True

    def give_up(self, frame: bytearray) -> object:
        """Begin to send that frame; return what must be kept, for nobody waits."""
        with suppress(ProcessGroupError):
            return self._post_send(_tensor(frame), lane=_VIGIL)
        return None

    def send_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Send these ranges of a segment, a message for each."""
        with _giving_way():
            self._send_segment(until, memory, messages, sealing)

    def _send_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        leavings = self._leavings(memory)
        window: deque[tuple[int, Message]] = deque()

        def leave(share: int = 1) -> None:
            for start, _ in self._moved(window, share, until):
                leavings.gone(start)

        for start, stop in messages:
            while len(window) == self.ahead or leavings.crowded:
                leave(_SHARE)
            self._go_on()
            data = leavings.take(start, stop)
            sealing.add(start, data)
            window.append((start, self._post_send(data)))
        leave()

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Receive them."""
        with _giving_way():
            self._receive_segment(until, memory, messages, sealing)

    def _receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        landings = self._landings(memory)
        window: deque[tuple[int, Message]] = deque()

        def land(share: int = 1) -> None:
            moved = self._moved(window, share, until)
            self._go_on()
            for start, message in moved:
                sealing.add(start, message.tensor)
                landings.settle(start)

        for start, stop in messages:
            while len(window) == self.window or landings.crowded:
                land(_SHARE)
            expected = landings.expect(start, stop)
            window.append((start, self._post_receive(expected)))
        while window:  # what has arrived is digested while the rest still comes
            land(_SHARE)

    def _moved(
        self, window: deque[tuple[int, Message]], share: int, until: float
    ) -> list[tuple[int, Message]]:
        """Take the oldest messages out of the window when they are through.

        ``share`` of 4 means a quarter. The last one is waited for first, so that this
        thread is woken only once.
        """
        oldest = [window.popleft() for _ in range(-(-len(window) // share))]
        for _, message in reversed(oldest):
            self._wait(message, until)
        return oldest

    def _receive(self, until: float, into: bytearray | mmap, lane: int = 0) -> None:
        here = _tensor(into)
        there = self._room(here)
        self._wait(self._post_receive(there, lane), until)
        if there is not here:
            here.copy_(there)

    def _go_on(self) -> None:
        if self._left_behind:
            raise ProcessGroupError("it was given up", rank=self.rank)

    # A device has its own way of doing what follows.

    def _leavings(self, memory: Memory) -> Leaves:
        return Leavings(memory)

    def _landings(self, memory: Memory) -> Lands:
        return Landings(memory)

    def _room(self, here: torch.Tensor) -> torch.Tensor:
        return here

    def _post_send(self, tensor: torch.Tensor, lane: int = 0) -> Message:
        try:
            work = self._group.send([tensor], self.rank, lane + self._out)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, tensor)

    def _post_receive(self, tensor: torch.Tensor, lane: int = 0) -> Message:
        try:
            work = self._group.recv([tensor], self.rank, lane + self._in)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, tensor)

    def _ended(self, work: Pending, until: float) -> bool:
        remaining = max(until - time.monotonic(), 0.001)  # 0 means something else
        return work.wait(timedelta(seconds=min(remaining, _LONGEST)))

    def _wait(self, message: Message, until: float) -> None:
        """Block until a message has moved."""
        try:
            if not self._ended(message.work, until):
                raise ProcessGroupError("it did not end well", rank=self.rank)
        except ProcessGroupError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ProcessGroupError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ProcessGroupError(first, rank=self.rank)


def _tensor(data: bytearray | mmap) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


@contextmanager
def _giving_way() -> Iterator[None]:
    """Let this thread preempt no other one when it is woken.

    The group's own threads need the processor at once, or the wire stands still; what
    is done here may follow a little later.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    # A sandbox may forbid it: then everything takes a little longer.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
