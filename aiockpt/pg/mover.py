"""Moves bytes of host memory between this rank and another one: blocking, in threads.

Messages keep their order, up to 16 are under way at once, and a thread that was left
behind begins no other one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

import torch

from aiockpt.errors import ProcessGroupError
from aiockpt.pg.group import Group, Pending
from aiockpt.pg.messages import Landing, Memory, outgoing

__all__ = ["Lands", "Message", "Mover"]

# A group that is not ours alone may use small tags.
_FORWARD: Final = 0x61696F00  # from a sender to a receiver
_BACKWARD: Final = 0x61696F01
_VIGIL: Final = 2  # more, for the last frame


class Lands(Protocol):
    """Where a message arrives."""

    @property
    def tensor(self) -> torch.Tensor:
        """What is received into."""

    def settle(self) -> None:
        """Bring what has arrived to its place."""


class Message(NamedTuple):
    """A message under way."""

    work: Pending
    landing: Lands | None
    tensor: torch.Tensor
    stop: int


class Mover:
    """Sends to and receives from one rank, as the sender of a checkpoint or not.

    Everything raises ``ProcessGroupError`` when an operation failed, or had not ended
    at ``until``, a moment of ``time.monotonic``.
    """

    tagged = True
    """Whether messages find their receiver by tag, and need no order."""

    window = 16
    """Messages under way at once, so that none waits for a round trip."""

    def __init__(self, group: Group, rank: int, *, sending: bool) -> None:
        self.rank = rank
        self._group = group
        self._out, self._in = _FORWARD, _BACKWARD
        if not sending:
            self._out, self._in = _BACKWARD, _FORWARD
        self._left_behind = False

    def send(self, until: float, data: bytearray) -> None:
        """Send bytes in one message."""
        self._wait(self._post_send(_tensor(data), 0), until)

    def receive(self, until: float, nbytes: int) -> bytearray:
        """Receive that many bytes (one at least) in one message."""
        data = bytearray(nbytes)
        self._wait(self._post_receive(_Bytes(data), 0, nbytes), until)
        return data

    def say_last(self, until: float, frame: bytearray) -> None:
        """Send the frame that the peer keeps vigil for."""
        self._wait(self._post_send(_tensor(frame), 0, lane=_VIGIL), until)

    def hear_last(self, until: float, nbytes: int) -> bytearray:
        """Keep vigil: receive that frame, or fail when the peer dies."""
        data = bytearray(nbytes)
        message = self._post_receive(_Bytes(data), 0, nbytes, lane=_VIGIL)
        self._wait(message, until)
        return data

    def leave_behind(self) -> None:
        """Let threads that still move something begin nothing else."""
        self._left_behind = True

    def give_up(self, frame: bytearray) -> object:
        """Begin to send that frame; return what must be kept, for nobody waits."""
        with suppress(ProcessGroupError):
            return self._post_send(_tensor(frame), 0, lane=_VIGIL)
        return None

    def send_segment(
        self, until: float, memory: Memory, messages: Iterable[tuple[int, int]]
    ) -> None:
        """Send these ranges of a segment, a message for each."""
        window: deque[Message] = deque()
        for start, stop in messages:
            if len(window) == self.window:
                self._wait(window.popleft(), until)
            self._go_on()
            tensor = self._outgoing(memory, start, stop)
            window.append(self._post_send(tensor, stop))
        while window:
            self._wait(window.popleft(), until)

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        on_arrived: Callable[[int], None],
    ) -> None:
        """Receive them; tell up to where the segment is there."""
        window: deque[Message] = deque()
        for start, stop in messages:
            if len(window) == self.window:
                on_arrived(self._wait(window.popleft(), until))
            self._go_on()
            window.append(self._post_receive(memory, start, stop))
        while window:
            on_arrived(self._wait(window.popleft(), until))
            self._go_on()

    def _go_on(self) -> None:
        if self._left_behind:
            raise ProcessGroupError("it was given up", rank=self.rank)

    # A device has its own way of doing what follows.

    def _outgoing(self, memory: Memory, start: int, stop: int) -> torch.Tensor:
        return outgoing(memory, start, stop)

    def _landing(self, memory: Memory, start: int, stop: int) -> Lands:
        return Landing(memory, start, stop)

    def _post_send(self, tensor: torch.Tensor, stop: int, lane: int = 0) -> Message:
        tag = lane + self._out
        try:
            work = self._group.send([tensor], self.rank, tag)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, None, tensor, stop)

    def _post_receive(
        self, memory: Memory, start: int, stop: int, lane: int = 0
    ) -> Message:
        tag = lane + self._in
        landing = self._landing(memory, start, stop)
        try:
            work = self._group.recv([landing.tensor], self.rank, tag)
        except Exception as error:
            raise self._failed(error) from error
        return Message(work, landing, landing.tensor, stop)

    def _ended(self, work: Pending, until: float) -> bool:
        remaining = max(until - time.monotonic(), 0.001)  # 0 means something else
        return work.wait(timedelta(seconds=remaining))

    def _wait(self, message: Message, until: float) -> int:
        """Block until a message has moved; return where it ends in the segment."""
        try:
            if not self._ended(message.work, until):
                raise ProcessGroupError("it did not end well", rank=self.rank)
        except ProcessGroupError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        if message.landing is not None:
            message.landing.settle()
        return message.stop

    def _failed(self, error: Exception) -> ProcessGroupError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ProcessGroupError(first, rank=self.rank)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Memory that is one run of bytes."""

    data: bytearray

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        return [memoryview(self.data)[start:stop]]


def _tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
