"""Moves bytes of a device between this rank and another one."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import Final

import torch

from aiockpt._device import Event
from aiockpt.errors import ProcessGroupError
from aiockpt.pg.device.board import Board
from aiockpt.pg.device.segment import Segment
from aiockpt.pg.group import Group, Pending
from aiockpt.pg.messages import Memory
from aiockpt.pg.mover import Lands, Message, Mover

__all__ = ["DeviceMover"]

_FIRST_POLL: Final = 50e-6
_LAST_POLL: Final = 1e-3


class DeviceMover(Mover):
    """A `Mover` whose messages are on a device, and on its side stream."""

    tagged = False
    window = 4  # a message that is no tensor's own memory takes 16 MiB of the device

    def __init__(self, group: Group, rank: int, board: Board, *, sending: bool) -> None:
        super().__init__(group, rank, sending=sending)
        self._board = board
        # Nobody waits any more for what a failure leaves here, but its memory must not
        # become somebody else's: the device may still read it, or write to it.
        self._under_way: dict[int, Message] = {}

    def send(self, until: float, data: bytearray) -> None:
        """Do so by way of the device."""
        with self._board.line.aside():
            super().send(until, data)

    def receive(self, until: float, nbytes: int) -> bytearray:
        """Do so by way of the device."""
        with self._board.line.aside():
            return super().receive(until, nbytes)

    def send_segment(
        self, until: float, memory: Memory, messages: Iterable[tuple[int, int]]
    ) -> None:
        """Do so behind what staged the segment."""
        with self._board.line.aside():
            super().send_segment(until, memory, messages)

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        on_arrived: Callable[[int], None],
    ) -> None:
        """Do so behind what still uses the memory."""
        with self._board.line.aside(self._aboard(memory, 0, 0).after):
            super().receive_segment(until, memory, messages, on_arrived)

    def _outgoing(self, memory: Memory, start: int, stop: int) -> torch.Tensor:
        return self._aboard(memory, start, stop).gather(start, stop)

    def _landing(self, memory: Memory, start: int, stop: int) -> Lands:
        return _Landing(self._aboard(memory, start, stop), start, stop)

    def _aboard(self, memory: Memory, start: int, stop: int) -> Segment:
        if isinstance(memory, Segment):
            return memory
        bounds = array("q", [start]), array("q", [stop])
        return Segment(self._board.device, memory, bounds, {})

    def _post_send(self, tensor: torch.Tensor, stop: int, lane: int = 0) -> Message:
        there = tensor.to(self._board.device)
        return self._kept(super()._post_send(there, stop, lane))

    def _post_receive(
        self, memory: Memory, start: int, stop: int, lane: int = 0
    ) -> Message:
        return self._kept(super()._post_receive(memory, start, stop, lane))

    def _kept(self, message: Message) -> Message:
        self._under_way[id(message)] = message
        return message

    def _wait(self, message: Message, until: float) -> int:
        stop = super()._wait(message, until)
        if message.landing is not None:  # which may have copied what has arrived
            self._reach(self._board.line.mark(), until)
        del self._under_way[id(message)]
        return stop

    def _ended(self, work: Pending, until: float) -> bool:
        # With a timeout NCCL's wait blocks, and aborts the communicator at its end.
        # Without one only the side stream waits.
        ended = work.wait()
        self._reach(self._board.line.mark(), until)
        return ended

    def _reach(self, event: Event, until: float) -> None:
        pause = _FIRST_POLL
        while not event.query():
            self._go_on()
            if time.monotonic() >= until:
                raise ProcessGroupError("the wait for it timed out", rank=self.rank)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)


class _Landing:
    """Where a message arrives on the device: in its place, or beside it."""

    __slots__ = ("_beside", "_segment", "_start", "_stop", "tensor")

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        whole = segment.whole(start, stop)
        self._segment, self._start, self._stop = segment, start, stop
        self._beside = whole is None
        self.tensor = segment.room(stop - start) if whole is None else whole

    def settle(self) -> None:
        """Bring what has arrived to its place."""
        if self._beside:
            self._segment.scatter(self._start, self._stop, self.tensor)
