"""A sender whose process trains: in its main thread, while it serves in another one."""

from __future__ import annotations

from collections.abc import Sequence

from aiockpt.bench.sender import Sender
from aiockpt.bench.training import Moment, Progress, Training, progress
from aiockpt.runtime.bridge import Bridge

__all__ = ["Trainer"]


class Trainer(Sender):
    """The commands that it obeys in a thread; see `aiockpt.bench.worker`."""

    def __init__(self, training: Training, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._training = training
        self._ends: Sequence[Moment] = ()

    async def train(self) -> None:
        """Train from now on."""
        self._training.begin()

    async def rest(self) -> None:
        """Train no more."""
        self._ends = self._training.end()

    async def trained(self, began: float, ended: float) -> Progress:
        """Return how far the last training got between two moments."""
        return progress(self._ends, began, ended)
