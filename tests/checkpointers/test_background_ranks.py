"""Two ranks save in the background: their processes commit together (C8)."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.storage.directory import find_checkpoint, latest
from tests.support.checkpointing import wait_until
from tests.support.proofs import proves
from tests.support.rankprocesses import SUPPORT, process

pytestmark = pytest.mark.timeout(150)

WELL = ["1 saved", "2 saved"]


def free_port() -> str:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


async def run_ranks(directory: Path, kind: str, *lives: str) -> list[list[str]]:
    """Run two ranks to their ends; return what each said."""
    command, port = str(SUPPORT / "background_rank.py"), free_port()
    async with (
        process(command, "0", port, str(directory), kind, lives[0]) as first,
        process(command, "1", port, str(directory), kind, lives[1]) as second,
    ):
        said = await asyncio.gather(first.communicate(), second.communicate())
    return [out.decode().splitlines() for out, _ in said]


def run(directory: Path, kind: str, *lives: str) -> list[list[str]]:
    """Do so from a plain test: the loops that count are the ranks'."""
    return asyncio.run(run_ranks(directory, kind, *lives))


def check_whole(directory: Path, step: int) -> None:
    """Check that a step is there, from both ranks."""
    for rank in (0, 1):
        reader = CheckpointReader(RankInfo(rank, 2))
        state, _ = reader.read(directory / f"step-{step}")
        assert state["r"] == rank
        assert state["w"].eq(step).all()


@pytest.mark.parametrize("kind", ["tcp_store", "default"])
def test_both_save(tmp_path: Path, kind: str) -> None:
    """Where they meet is found, or said; either way it reaches the processes."""
    assert run(tmp_path / "c", kind, "well", "well") == [WELL, WELL]
    newest = latest(tmp_path / "c")
    assert newest is not None
    assert (newest.step, newest.world_size) == (2, 2)
    check_whole(tmp_path / "c", 1)
    check_whole(tmp_path / "c", 2)


@proves("cell AsyncCheckpointer.save: error", "cell CheckpointProcess.forsake: success")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_stage_tells_the_other(tmp_path: Path, failing: int) -> None:
    """Which fails at once, and does not wait for its file."""
    lives = ["well", "well"]
    lives[failing] = "unsavable"
    began = time.monotonic()
    said = run(tmp_path / "c", "tcp_store", *lives)
    assert said[failing][1].startswith("2 UnsupportedLeafError")
    assert said[1 - failing][1].startswith("2 StorageError")
    assert f"rank {failing} gave up" in said[1 - failing][1]
    assert time.monotonic() - began < 100  # it did not wait for its timeout
    assert find_checkpoint(tmp_path / "c" / "step-2") is None
    check_whole(tmp_path / "c", 1)


@proves("cell AsyncCheckpointer.save: cancel")
def test_a_rank_that_is_cancelled_tells_the_other(tmp_path: Path) -> None:
    """It has handed nothing over, and the other one would wait for it."""
    began = time.monotonic()
    said = run(tmp_path / "c", "tcp_store", "well", "hasty")
    assert said[1][1] == "2 cancelled"
    assert said[0][1].startswith("2 StorageError")
    assert "rank 1 gave up: it was cancelled" in said[0][1]
    assert time.monotonic() - began < 100  # it did not wait for its timeout
    assert find_checkpoint(tmp_path / "c" / "step-2") is None


def test_a_rank_whose_process_is_killed_fails_the_save(tmp_path: Path) -> None:
    """On both sides, and at once: its successor tells; nothing torn is there."""
    began = time.monotonic()
    said = run(tmp_path / "c", "tcp_store", "well", "child-dies")
    assert said[1][1].startswith("2 WorkerError")
    assert "signal 9" in said[1][1]
    assert said[0][1].startswith("2 StorageError")
    assert "rank 1 gave up: the checkpoint process ended" in said[0][1]
    assert time.monotonic() - began < 100  # it did not wait for its timeout
    assert find_checkpoint(tmp_path / "c" / "step-2") is None
    check_whole(tmp_path / "c", 1)


def test_a_rank_whose_process_is_killed_late_does_not_undo_the_commit(
    tmp_path: Path,
) -> None:
    """The other rank has committed: it warns, as soon as the successor tells it why."""
    began = time.monotonic()
    said = run(tmp_path / "c", "tcp_store", "well", "child-dies-late")
    assert said[1][1].startswith("2 WorkerError")
    assert said[0][1].startswith("2 warning: step-2 is committed, but")
    assert "rank 1 gave up: the checkpoint process ended by signal 9" in said[0][1]
    assert said[0][2:] == ["2 saved"]
    assert time.monotonic() - began < 100  # it did not wait for its timeout
    check_whole(tmp_path / "c", 2)


def test_a_trainer_that_dies_does_not_take_the_save_with_it(
    tmp_path: Path,
) -> None:
    """Its process has it, and commits it with the other rank's."""
    said = run(tmp_path / "c", "tcp_store", "well", "dies")
    assert said == [WELL, ["1 saved"]]
    wait_until(lambda: find_checkpoint(tmp_path / "c" / "step-2"), "the commit")
    check_whole(tmp_path / "c", 2)
