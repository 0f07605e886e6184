"""The process-group rooms block no event loop, and leave only threads that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.leakcheck import PATIENCE


@pytest.fixture(autouse=True)
def _never_blocks(no_blocking: object) -> None:
    """Guard every test of this directory."""


@pytest.fixture(autouse=True)
def _only_waits_left() -> Iterator[None]:
    """Look at the threads that a test may leave behind: the documented ones.

    Nothing ends a wait for gloo but its deadline; the thread that waits says so by its
    name, and keeps no interpreter from its exit.
    """
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + PATIENCE
    while others := _others(before):
        assert time.monotonic() < until, f"left behind: {others}"
        time.sleep(0.01)


def _others(before: set[threading.Thread]) -> list[threading.Thread]:
    left = set(threading.enumerate()) - before
    return [each for each in left if not (each.daemon and "-apart" in each.name)]
