"""Copies of a staging that stop half way, until a test lets them go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from aiockpt.memory.copies import CopyPlan

PATIENCE = 30.0


class Copies:
    """Holds the copies of host memory to a segment's bytes ``after`` some.

    Attributes:
        waiting: Whether one of them is held now.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
        self.waiting = False
        self.failure: Exception | None = None
        self._go = threading.Event()
        copy = CopyPlan.staged

        def staged(plan: CopyPlan, start: int, stop: int, *block: int) -> Iterator[int]:
            if start >= after:
                self.waiting = True
                assert self._go.wait(PATIENCE)
                if self.failure is not None:
                    raise self.failure
            return copy(plan, start, stop, *block)

        monkeypatch.setattr(CopyPlan, "staged", staged)

    def go(self, failure: Exception | None = None) -> None:
        """Let them go on, or fail."""
        self.failure = failure
        self._go.set()
