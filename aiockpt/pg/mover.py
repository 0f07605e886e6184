"""Moves bytes between this rank and another one: blocking, in threads.

Messages keep their order, up to 16 are under way at once, and a thread that was left
behind begins no other one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Final, NamedTuple

import torch

from aiockpt.errors import ProcessGroupError
from aiockpt.pg.group import Group, Pending
from aiockpt.pg.messages import Expected, Landing, Memory, outgoing
from aiockpt.pg.sealing import Sealing

__all__ = ["Mover"]

# A group that is not ours alone may use small tags.
_FORWARD: Final = 0x61696F00  # from a sender to a receiver
_BACKWARD: Final = 0x61696F01
_VIGIL: Final = 2  # more, for the last frame

_WINDOW: Final = 16
"""Messages under way at once, so that none waits for a round trip."""


class _Message(NamedTuple):
    """A message under way: on the device it may have other memory than here."""

    work: Pending
    here: torch.Tensor
    there: torch.Tensor


class Mover:
    """Sends to and receives from one rank, as the sender of a checkpoint or not.

    Everything raises ``ProcessGroupError`` when an operation failed, or had not ended
    at ``until``, a moment of ``time.monotonic``.
    """

    def __init__(
        self, group: Group, rank: int, device: torch.device, *, sending: bool
    ) -> None:
        self.rank = rank
        self._group = group
        self._device = device
        self._out, self._in = _FORWARD, _BACKWARD
        if not sending:
            self._out, self._in = _BACKWARD, _FORWARD
        self._left_behind = False

    @property
    def tagged(self) -> bool:
        """Whether messages find their receiver by tag, and need no order."""
        return self._device.type == "cpu"

    def send(self, until: float, data: bytearray) -> None:
        """Send bytes in one message."""
        self._wait(self._post_send(memoryview(data)), until)

    def receive(self, until: float, nbytes: int) -> bytearray:
        """Receive that many bytes (one at least) in one message."""
        data = bytearray(nbytes)
        self._wait(self._post_receive(memoryview(data)), until)
        return data

    def say_last(self, until: float, frame: bytearray) -> None:
        """Send the frame that the peer keeps vigil for."""
        self._wait(self._post_send(memoryview(frame), lane=_VIGIL), until)

    def hear_last(self, until: float, nbytes: int) -> bytearray:
        """Keep vigil: receive that frame, or fail when the peer dies."""
        data = bytearray(nbytes)
        self._wait(self._post_receive(memoryview(data), lane=_VIGIL), until)
        return data

    def leave_behind(self) -> None:
        """Let threads that still move something begin nothing else."""
        self._left_behind = True

    def give_up(self, frame: bytearray) -> object:
        """Begin to send that frame; return what must be kept, for nobody waits."""
        with suppress(ProcessGroupError):
            return self._post_send(memoryview(frame), lane=_VIGIL)
        return None

    def send_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Send these ranges of a segment, a message for each."""
        window: deque[_Message] = deque()
        for start, stop in messages:
            if len(window) == _WINDOW:
                self._wait(window.popleft(), until)
            self._go_on()
            data = outgoing(memory, start, stop)
            sealing.add(start, data)
            window.append(self._post_send(data))
        while window:
            self._wait(window.popleft(), until)

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Receive them."""
        landing = Landing(memory)
        window: deque[tuple[_Message, Expected]] = deque()

        def land() -> None:
            message, arrived = window.popleft()
            self._wait(message, until)
            sealing.add(arrived.start, arrived.data)
            landing.settle(arrived)
            self._go_on()

        for start, stop in messages:
            while len(window) == _WINDOW or landing.crowded:
                land()
            expected = landing.expect(start, stop)
            window.append((self._post_receive(expected.data), expected))
        while window:
            land()

    def _go_on(self) -> None:
        if self._left_behind:
            raise ProcessGroupError("it was given up", rank=self.rank)

    def _post_send(self, data: memoryview, lane: int = 0) -> _Message:
        here = torch.frombuffer(data, dtype=torch.uint8)
        there = here.to(self._device)
        try:
            work = self._group.send([there], self.rank, lane + self._out)
        except Exception as error:
            raise self._failed(error) from error
        return _Message(work, there, there)

    def _post_receive(self, data: memoryview, lane: int = 0) -> _Message:
        here = there = torch.frombuffer(data, dtype=torch.uint8)
        if here.device != self._device:
            there = torch.empty_like(here, device=self._device)
        try:
            work = self._group.recv([there], self.rank, lane + self._in)
        except Exception as error:
            raise self._failed(error) from error
        return _Message(work, here, there)

    def _wait(self, message: _Message, until: float) -> None:
        """Block until a message has moved."""
        remaining = max(until - time.monotonic(), 0.001)  # 0 means something else
        try:
            if not message.work.wait(timedelta(seconds=remaining)):
                raise ProcessGroupError("it did not end well", rank=self.rank)
        except ProcessGroupError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        if message.here is not message.there:
            message.here.copy_(message.there)

    def _failed(self, error: Exception) -> ProcessGroupError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ProcessGroupError(first, rank=self.rank)
