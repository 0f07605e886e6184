"""Timeouts and steps mean the same to every transport and checkpointer."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from aiockpt.transport import exact_step, seconds

pytestmark = pytest.mark.torch_free


class Whole:
    """An integer of another library."""

    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(0, 0.0), (1.5, 1.5), (math.inf, math.inf), (timedelta(minutes=1), 60.0)],
)
def test_a_timeout_is_seconds_or_a_timedelta(timeout: Any, expected: float) -> None:
    """As in torchft, and as everywhere else."""
    assert seconds(timeout) == expected
    assert type(seconds(timeout)) is float


@pytest.mark.parametrize("timeout", [-1, -0.1, math.nan, timedelta(seconds=-1)])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    """A nan would never pass, or at once."""
    with pytest.raises(ValueError, match="timeout must not be negative"):
        seconds(timeout)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (True, 1), (Whole(), 5)]
)
def test_a_step_is_any_integer(step: object, expected: int) -> None:
    """Those of other libraries become Python's."""
    assert exact_step(step) == expected
    assert type(exact_step(step)) is int


@pytest.mark.parametrize(
    ("step", "kind", "why"),
    [
        (-1, ValueError, "from 0 to"),
        (2**63, ValueError, "from 0 to"),
        (1.0, TypeError, r"got 1.0 \(float\); pass int\(step\)"),
        ("1", TypeError, r"got '1' \(str\)"),
        (None, TypeError, "must be an integer"),
    ],
)
def test_what_is_no_step_is_refused(
    step: object, kind: type[Exception], why: str
) -> None:
    """Before anything is staged, and with the way out."""
    with pytest.raises(kind, match=why):
        exact_step(step)
