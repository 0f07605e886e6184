"""Copies of a staging that stop half way, until a test lets them go on."""

from __future__ import annotations

import threading

import pytest

from aiockpt._copy import CopyPlan

PATIENCE = 30.0


class Copies:
    """Holds the copies of host memory to a segment's bytes ``after`` some.

    Attributes:
        held: Whether it does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
        self.held = True
        self.failure: Exception | None = None
        self._go = threading.Event()
        copy = CopyPlan.stage_host

        def stage_host(plan: CopyPlan, start: int, stop: int) -> None:
            if self.held and start >= after:
                assert self._go.wait(PATIENCE)
                if self.failure is not None:
                    raise self.failure
            copy(plan, start, stop)

        monkeypatch.setattr(CopyPlan, "stage_host", stage_host)

    def go(self, failure: Exception | None = None) -> None:
        """Let them go on, or fail."""
        self.failure = failure
        self._go.set()
