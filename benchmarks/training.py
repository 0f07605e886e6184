"""A training loop, and what others cost it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

Moment = tuple[float, float]
"""When a step ended: on the clock of the system, and of its thread, in seconds."""

_OPERATIONS = 2000  # of a step, which then takes a tenth of a millisecond


def _plain_python() -> None:
    total = 0
    for number in range(_OPERATIONS):
        total += number * number


class Training:
    """Steps between `begin` and `end`, in the thread of `run`.

    Attributes:
        work: What a step does; plain Python, unless somebody sets another.
    """

    def __init__(self) -> None:
        self.work: Callable[[], object] = _plain_python
        self._wanted = threading.Event()
        self._ends: list[Moment] | None = None
        self._closed = False

    def run(self) -> None:
        """Make steps whenever they are wanted, until `close`."""
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            ends = self._ends
            while ends is not None and self._ends is ends:
                self.work()
                ends.append((time.monotonic(), time.thread_time()))

    def begin(self) -> None:
        """Train from now on."""
        self._ends = []
        self._wanted.set()

    def end(self) -> Sequence[Moment]:
        """Train no more; return when each step ended."""
        ends, self._ends = self._ends, None
        return ends or ()

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self.end()
        self._wanted.set()


def progress(ends: Sequence[Moment], began: float, ended: float) -> dict[str, float]:
    """Return how far a loop got between two times of the system's clock.

    ``speed`` is in steps per second. ``stall`` is the longest time in which no step
    ended. ``waited`` is the share of the time in which the thread did not run, because
    others had its core or its interpreter's lock.
    """
    inside = [end for end in ends if began <= end[0] <= ended]
    at = [began, *(end[0] for end in inside), ended]
    waited = 1.0
    if len(inside) > 1:
        passed, ran = (b - a for a, b in zip(inside[0], inside[-1], strict=True))
        waited = max(1 - ran / passed, 0.0)
    return {
        "speed": len(inside) / (ended - began),
        "stall": max(after - before for before, after in pairwise(at)),
        "waited": waited,
    }


class Trainer:
    """Trains when it is told to: its methods are commands of a worker."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps: Sequence[Moment] = ()

    async def train(self) -> None:
        """Train from now on, in the main thread."""
        self._training.begin()

    async def rest(self) -> None:
        """Train no more."""
        self._steps = self._training.end()

    async def trained(self, *, began: float, ended: float) -> dict[str, float]:
        """Return how far the last training got between two moments."""
        return progress(self._steps, began, ended)

    async def release(self) -> None:
        """Have nothing to give back."""
