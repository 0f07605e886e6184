"""A training loop of plain Python, and how far it got."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Event
from typing import TypedDict

from aiockpt.runtime.bridge import start_daemon

__all__ = ["Moment", "Progress", "Training", "progress", "train_beside"]

_OPERATIONS = 2000  # of a step, which takes a tenth of a millisecond then


class Progress(TypedDict):
    """How far a loop got in some time.

    ``speed`` is in steps per second, ``stall`` the longest time, in seconds, in which
    no step ended, and ``waited`` the share of the time in which its thread did not run:
    others had its core, or its interpreter's lock. On a machine whose cores are faster
    at one moment than at the next, that is known better than the speed.
    """

    speed: float
    stall: float
    waited: float


Moment = tuple[float, float]
"""When a step ended: on the clock of the system, and of its thread, in seconds."""


class _Round:
    """One time of training: when each step ended."""

    def __init__(self) -> None:
        self.going = True
        self.ends: list[Moment] = []

    def train(self) -> None:
        ends = self.ends
        while self.going:
            _step()
            ends.append((time.monotonic(), time.thread_time()))


class Training:
    """Steps between `begin` and `end`, made by the thread that is in `run`."""

    def __init__(self) -> None:
        self._wanted = Event()
        self._round: _Round | None = None
        self._closed = False

    def run(self) -> None:
        """Make steps whenever they are wanted, until `close`."""
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            if (wanted := self._round) is not None:
                wanted.train()

    def begin(self) -> None:
        """Train from now on."""
        self.end()
        self._round = _Round()
        self._wanted.set()

    def end(self) -> Sequence[Moment]:
        """Train no more; return when each step ended."""
        ended, self._round = self._round, None
        if ended is None:
            return ()
        ended.going = False
        return ended.ends

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self.end()
        self._wanted.set()


def _step() -> int:
    total = 0
    for number in range(_OPERATIONS):
        total += number * number
    return total


def progress(ends: Sequence[Moment], began: float, ended: float) -> Progress:
    """Return how far a loop got between two times of the system's clock."""
    inside = [end for end in ends if began <= end[0] <= ended]
    at = [began, *(end[0] for end in inside), ended]
    return {
        "speed": len(inside) / (ended - began),
        "stall": max(after - before for before, after in pairwise(at)),
        "waited": _waited(inside),
    }


def _waited(ends: Sequence[Moment]) -> float:
    if len(ends) < 2:
        return 1.0
    passed, ran = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
    return max(1 - ran / passed, 0.0)


def train_beside(serve: Callable[[Training], object]) -> None:
    """Call ``serve`` in a thread, and make the steps that it wants in this one.

    So trains who uses torchft, whose transports work in threads. It returns when
    ``serve`` has.
    """
    training = Training()

    def work() -> None:
        try:
            serve(training)
        finally:
            training.close()

    thread = start_daemon("bench-serving", work)
    training.run()
    thread.join()
