"""Count the lines of Python that a call runs: its cost, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Steps:
    """How many lines ran, those of comprehensions each time."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        """Count one event of the interpreter."""
        self.count += event == "line"
        return self.trace


@contextmanager
def counted_steps() -> Iterator[Steps]:
    """Count the lines that this thread runs in the functions called by the block."""
    steps, before = Steps(), sys.gettrace()
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
