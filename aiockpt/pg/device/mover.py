"""Moves bytes of a device between this rank and another one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from mmap import mmap
from typing import Final

import torch

from aiockpt.errors import ProcessGroupError
from aiockpt.memory.device import Event
from aiockpt.pg.device.board import Board
from aiockpt.pg.device.segment import Segment
from aiockpt.pg.group import Group, Pending
from aiockpt.pg.messages import Memory
from aiockpt.pg.mover import Lands, Leaves, Message, Mover
from aiockpt.pg.sealing import Sealing

__all__ = ["DeviceMover"]

_FIRST_POLL: Final = 50e-6
_LAST_POLL: Final = 1e-3


class DeviceMover(Mover):
    """A `Mover` whose messages are on a device, and on its side stream."""

    tagged = False
    message_bytes = 4 << 20
    ahead = window = 16  # of them, where a message is no tensor's own memory

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

    def receive(self, until: float, into: bytearray | mmap) -> None:
        """Do so by way of the device."""
        with self._board.line.aside():
            super().receive(until, into)

    def send_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Do so behind what staged the segment."""
        with self._board.line.aside():
            super().send_segment(until, memory, messages, sealing)

    def receive_segment(
        self,
        until: float,
        memory: Memory,
        messages: Iterable[tuple[int, int]],
        sealing: Sealing,
    ) -> None:
        """Do so behind what still uses the memory, until all of it has arrived."""
        with self._board.line.aside(_aboard(memory).after):
            super().receive_segment(until, memory, messages, sealing)
            self._reach(self._board.line.mark(), until)

    def _leavings(self, memory: Memory) -> Leaves:
        return _Leavings(_aboard(memory))

    def _landings(self, memory: Memory) -> Lands:
        return _Landings(_aboard(memory))

    def _room(self, here: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(here, device=self._board.device)

    def _post_send(self, tensor: torch.Tensor, lane: int = 0) -> Message:
        return self._kept(super()._post_send(tensor.to(self._board.device), lane))

    def _post_receive(self, tensor: torch.Tensor, lane: int = 0) -> Message:
        return self._kept(super()._post_receive(tensor, lane))

    def _kept(self, message: Message) -> Message:
        self._under_way[id(message)] = message
        return message

    def _wait(self, message: Message, until: float) -> None:
        super()._wait(message, until)
        del self._under_way[id(message)]

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


class _Leavings:
    """Messages that leave the device."""

    crowded = False

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return these bytes of the segment: the memory itself, or a copy."""
        return self._segment.gather(start, stop)

    def gone(self, start: int) -> None:
        """Do nothing: the memory of a copy goes with it."""


class _Landings:
    """Where messages arrive on the device: in their places, or beside them."""

    crowded = False

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._beside: dict[int, tuple[int, torch.Tensor]] = {}

    def expect(self, start: int, stop: int) -> torch.Tensor:
        """Return what these bytes of the segment are received into."""
        if (whole := self._segment.whole(start, stop)) is not None:
            return whole
        room = self._segment.room(stop - start)
        self._beside[start] = stop, room
        return room

    def settle(self, start: int) -> None:
        """Bring what has arrived to its place."""
        if start in self._beside:
            stop, room = self._beside.pop(start)
            self._segment.scatter(start, stop, room)


def _aboard(memory: Memory) -> Segment:
    if not isinstance(memory, Segment):
        raise TypeError(f"{memory} is not on the device")
    return memory
