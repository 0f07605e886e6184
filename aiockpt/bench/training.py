"""A training loop of plain Python, and how far it got."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Event
from typing import TypedDict

from aiockpt._bridge import start_daemon

__all__ = ["Progress", "Training", "progress", "train_beside"]

_OPERATIONS = 2000  # of a step, which takes a tenth of a millisecond then


class Progress(TypedDict):
    """How far a loop got in some time.

    ``speed`` is in steps per second, ``stall`` the longest time, in seconds, in which
    no step ended.
    """

    speed: float
    stall: float


class _Round:
    """One time of training: the moment at which each step ended."""

    def __init__(self) -> None:
        self.going = True
        self.ends: list[float] = []

    def train(self) -> None:
        ends = self.ends
        while self.going:
            _step()
            ends.append(time.monotonic())


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

    def end(self) -> Sequence[float]:
        """Train no more; return when each step ended, on the clock of the system."""
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


def progress(ends: Sequence[float], began: float, ended: float) -> Progress:
    """Return how far a loop got between two moments."""
    inside = [end for end in ends if began <= end <= ended]
    stall = max(after - before for before, after in pairwise((began, *inside, ended)))
    return {"speed": len(inside) / (ended - began), "stall": stall}


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
