"""Two ranks save over a TCP store, after a save of the same path that one left out.

What is left in the store of an earlier save must not be taken for the next one's.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiockpt import StorageError
from aiockpt.checkpointers.barriers import Barrier, Meeting
from tests.support.rankthreads import (
    LONG,
    SHORT,
    Dying,
    barrier,
    free_port,
    job,
    save_by_both,
)
from tests.support.saved import load

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_save_after_one_that_a_rank_left_out(
    tmp_path: Path, first: int, *, restarted: bool
) -> None:
    """It is committed, whichever rank begins it."""
    with job(tmp_path / "step") as ranks:
        save_by_both(ranks, 1, 0)
        with pytest.raises(StorageError, match="timed out"):
            ranks.save(0, 2, SHORT).result(LONG)
        if restarted:
            ranks.restart(1)
        save_by_both(ranks, 3, first)
    assert load(tmp_path / "step", rank=0)["value"] == 3
    assert load(tmp_path / "step", rank=1)["value"] == 3


@pytest.mark.parametrize("first", [0, 1])
def test_the_save_after_one_whose_commit_a_rank_missed(
    tmp_path: Path, first: int
) -> None:
    """It is committed, and neither rank takes the earlier meeting for its own."""
    with job(tmp_path / "step") as ranks:
        committing = ranks.save(0, 1, SHORT)
        dying = ranks.save(1, 1, wrap=Dying)
        committing.result(LONG)  # with a warning
        assert dying.exception(LONG) is not None or load(tmp_path / "step", rank=1)
        ranks.restart(1)
        save_by_both(ranks, 2, first)
    assert load(tmp_path / "step", rank=0)["value"] == 2
    assert load(tmp_path / "step", rank=1)["value"] == 2


def test_the_same_path_and_step_again_and_again(tmp_path: Path) -> None:
    """Whatever of the last save is removed from the store while this one meets."""
    with job(tmp_path / "step") as ranks:
        for value in range(20):
            both = [ranks.save(rank, value) for rank in (1, 0)]
            for each in both:
                each.result(LONG)
    assert load(tmp_path / "step", rank=1)["value"] == 19


def test_a_rank_that_is_late_is_told_at_once(tmp_path: Path) -> None:
    """It began before the other one gave up, so this is no new save for it."""
    with job(tmp_path / "step") as ranks:
        begun, proceed = threading.Event(), threading.Event()

        class Slow(Barrier):
            """Another barrier, which is reached late."""

            def __init__(self, real: Barrier) -> None:
                self._real = real

            def execute_barrier(self) -> None:
                raise NotImplementedError

            def expect(self, meeting: Meeting) -> None:
                self._real.expect(meeting)

            def meet(self, meeting: Meeting, *, failure: str | None = None) -> None:
                begun.set()
                proceed.wait(LONG)
                self._real.meet(meeting, failure=failure)

        slow = ranks.save(1, 1, wrap=Slow)
        assert begun.wait(LONG)
        with pytest.raises(StorageError, match="timed out"):
            ranks.save(0, 1, SHORT).result(LONG)
        proceed.set()
        since = time.monotonic()
        with pytest.raises(StorageError, match="rank 0 gave up"):
            slow.result(LONG)
        assert time.monotonic() - since < LONG / 2


def test_a_dead_ranks_successor_does_not_disturb_the_next_save(tmp_path: Path) -> None:
    """The other rank has begun it already when it hears of the death."""
    with job(tmp_path / "step") as ranks:
        committing = ranks.save(0, 1, SHORT)
        ranks.save(1, 1, wrap=Dying).exception(LONG)
        committing.result(LONG)  # with a warning
        ranks.restart(1)
        early = ranks.save(0, 2)
        time.sleep(0.5)
        ranks.mourn(1)
        ranks.save(1, 2).result(LONG)
        early.result(LONG)
    assert load(tmp_path / "step", rank=1)["value"] == 2


def test_a_dead_ranks_successor_tells_those_that_wait_already(tmp_path: Path) -> None:
    """The rank had come to the meeting before it died: it is about the same save."""
    meeting = Meeting(name="s", step=7, phase="written", place=tmp_path, timeout=LONG)
    port = free_port()
    first, second, successor = (barrier(rank, 3, port) for rank in (0, 1, 1))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.meet, meeting)
        dead = pool.submit(second.meet, meeting)
        time.sleep(0.5)
        since = time.monotonic()
        successor.meet(meeting, failure="it died")
        for each in (waiting, dead):
            assert "rank 1 gave up: it died" in str(each.exception(LONG))
        assert time.monotonic() - since < LONG / 2
    for made in (successor, second, first):
        made.close()
