"""No torn checkpoint is ever seen: the writer dies, or its calls fail, anywhere (C1).

``python tests/support/torn.py`` does the same hundreds of times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import torn

pytestmark = [pytest.mark.torch_free, pytest.mark.timeout(120)]

needs_strace = pytest.mark.skipif(not torn.can_trace(), reason="needs strace")


@needs_strace
@pytest.mark.parametrize("calls", torn.CALLS)
@pytest.mark.parametrize("what", ["KILL", "EIO"])
def test_at_each_call(tmp_path: Path, calls: str, what: str) -> None:
    """At the name is wholly the old one or wholly the new one; the next save cleans."""
    directory = tmp_path / "checkpoints"
    codes = []
    for code in torn.at_each_call(directory, calls, what):
        codes.append(code)
        seen = torn.outcome(directory)
        if not code:
            assert seen == "new 2"
        torn.recovers(directory)
    assert codes[-1] == 0
    assert len(codes) > 1


@needs_strace
@pytest.mark.parametrize("calls", ["openat", "read,pread64,preadv"])
def test_at_each_look(tmp_path: Path, calls: str) -> None:
    """Also if it cannot open or read what is there: it says so, or saves."""
    directory = tmp_path / "checkpoints"
    codes = []
    for code in torn.at_each_call(directory, calls, "EIO"):
        codes.append(code)
        seen = torn.outcome(directory)
        if not code:
            assert seen == "new 2"
        torn.recovers(directory)
    assert torn.FAILED in codes


@needs_strace
@pytest.mark.parametrize("calls", ["fallocate", "pwritev,pwritev2", "write", "fsync"])
def test_when_the_disk_fills(tmp_path: Path, calls: str) -> None:
    """The first time that there is no space left is the end of the save."""
    directory = tmp_path / "checkpoints"
    assert torn.at_call(directory, calls, "ENOSPC", 1) == torn.FAILED
    assert torn.outcome(directory) == "old -"
    assert [path.name for path in directory.iterdir()] == ["last"]
    torn.recovers(directory)


def test_at_any_moment(tmp_path: Path) -> None:
    """Killed from outside, a few times; both names are checked after each."""
    directory = tmp_path / "checkpoints"
    for _ in range(10):
        torn.at_a_moment(directory, random.uniform(0, 0.03))
        torn.outcome(directory)
        torn.recovers(directory)
