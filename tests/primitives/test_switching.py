"""Blocks in which the switch interval of the process is short."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from aiockpt.runtime.switching import python_is_busy, switching_often

PROGRAMS = 0.0041  # seconds; not the interpreter's own, and not exact in binary
SHORT = 0.0005


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PROGRAMS + 5e-7)  # it is rounded down
    yield
    sys.setswitchinterval(before + 5e-7)  # it is rounded down


def now() -> float:
    """Return the interval in whole microseconds."""
    return round(sys.getswitchinterval(), 6)


def test_it_stays_beside_no_python() -> None:
    """A busy host can make an idle interpreter look busy, but not each time."""
    assert not all(python_is_busy() for _ in range(200))
    assert now() == PROGRAMS


def test_the_last_of_overlapping_blocks_restores_it() -> None:
    """Saves, loads and transfers may overlap, and the last one restores it."""
    first, second = switching_often(), switching_often()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now() == SHORT
    second.__exit__(None, None, None)
    assert now() == PROGRAMS


def test_an_interval_that_the_program_has_set_meanwhile_stays() -> None:
    """No block overwrites an interval that the program has set."""
    with switching_often():
        sys.setswitchinterval(0.002)
        with switching_often():
            assert now() == 0.002
    assert now() == 0.002


def test_a_shorter_interval_of_the_program_stays() -> None:
    """A block does not lengthen the program's shorter interval."""
    sys.setswitchinterval(0.0002)
    with switching_often():
        assert now() == 0.0002
    assert now() == 0.0002


def test_a_forked_child_has_the_interval_of_the_program() -> None:
    """No thread of the parent goes on there."""
    with switching_often():
        child = os.fork()
        if not child:
            os._exit(now() != PROGRAMS)
        _, status = os.waitpid(child, 0)
        assert now() == SHORT
    assert os.waitstatus_to_exitcode(status) == 0
