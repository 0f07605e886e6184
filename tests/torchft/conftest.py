"""Transports for torchft, closed after the test, with nothing of them left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from aiockpt.torchft import HTTPTransport
from tests.support.transports import grouped

Make = Callable[..., HTTPTransport[Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make transports over loopback."""
    made: list[HTTPTransport[Any]] = []

    def make_one(timeout: float = 10, **options: Any) -> HTTPTransport[Any]:
        options = {"host": "127.0.0.1", **options}
        made.append(HTTPTransport(timedelta(seconds=timeout), **grouped(**options)))
        return made[-1]

    yield make_one
    for each in made:
        each.shutdown(wait=True)


@pytest.fixture
def pair(make: Make) -> tuple[HTTPTransport[Any], HTTPTransport[Any]]:
    """Make a source and an heir."""
    return make(), make()


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a program in an interpreter of its own."""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run
