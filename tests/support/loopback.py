"""A group of two ranks in one process, whose messages are copies on one device.

It stands for a communicator: messages have an order and no tags, ``wait`` lets the
current stream wait, and what is sent must not change before.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import Queue
from typing import Any, NamedTuple

import torch


class _Sent(NamedTuple):
    tensor: torch.Tensor
    ready: torch.cuda.Event
    done: Queue[torch.cuda.Event]


class Loopback:
    """One rank's end."""

    def __init__(self, out: Queue[_Sent], into: Queue[_Sent]) -> None:
        self._out, self._into = out, into
        self._last: _Receiving | None = None
        self.lengths: list[int] = []

    @classmethod
    def pair(cls) -> tuple[Loopback, Loopback]:
        """Return both ends."""
        one: Queue[_Sent] = Queue()
        other: Queue[_Sent] = Queue()
        return cls(one, other), cls(other, one)

    def size(self) -> int:
        """Return how many ranks there are."""
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Offer a tensor, as it will be when the current stream is here."""
        (tensor,) = tensors
        assert tensor.is_cuda
        self.lengths.append(tensor.nbytes)
        sent = _Sent(tensor, _here(), Queue())
        self._out.put(sent)
        return _Sending(sent)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Ask for the next one."""
        (tensor,) = tensors
        assert tensor.is_cuda
        self._last = _Receiving(tensor, _here(), self._into, self._last)
        return self._last


class _Sending:
    def __init__(self, sent: _Sent) -> None:
        self._sent = sent

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "NCCL would abort at its end"
        torch.cuda.current_stream().wait_event(self._sent.done.get(timeout=30))
        return True


class _Receiving:
    def __init__(
        self,
        tensor: torch.Tensor,
        ready: torch.cuda.Event,
        queue: Queue[_Sent],
        before: _Receiving | None,
    ) -> None:
        self._tensor, self._ready, self._queue = tensor, ready, queue
        self._before = before
        self._lock = threading.Lock()
        self._moved = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "NCCL would abort at its end"
        with self._lock:
            if not self._moved:
                if self._before is not None:
                    self._before.wait()
                self._before = None
                self._move()
        return True

    def _move(self) -> None:
        sent = self._queue.get(timeout=30)
        assert sent.tensor.nbytes == self._tensor.nbytes
        stream = torch.cuda.current_stream()
        for event in (sent.ready, self._ready):
            stream.wait_event(event)
        self._tensor.copy_(sent.tensor)
        sent.done.put(_here())
        self._moved = True


def _here() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event
