"""Few own frames lie between a public verb and the system call that moves its bytes.

A reader who follows one path holds each of them in the head. Beside the functions on
the way, the frames count that wait at the same time, for the peer's end or for pages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "call_frames.py"

BOUNDS = {
    "HTTP receive": 15,
    "served range": 11,
    "group send": 14,
    "group receive": 14,
    "save": 15,
    "load": 15,
}


@pytest.fixture(scope="module")
def ways() -> dict[str, list[str]]:
    """Follow all paths once, in processes of their own."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("path", BOUNDS)
def test_a_path_is_short(path: str, ways: dict[str, list[str]]) -> None:
    """The path reaches from the verb to the system call, and both ends are seen."""
    way = ways[path]
    assert len(way) > 3, "the spy saw no system call"
    assert len(way) <= BOUNDS[path], "\n".join(way)
