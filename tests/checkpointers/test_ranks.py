"""Two ranks save together: both barriers, and what becomes of it when one fails."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiockpt.checkpointers.barriers import (
    Barrier,
    Meeting,
    barrier_config_for,
    create_barrier_from_config,
    default_rank_info,
    register_barrier,
)
from aiockpt.checkpointers.config import BarrierConfig, RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.errors import PeerFailedError
from aiockpt.storage.directory import find_checkpoint, latest
from tests.support.proofs import proves
from tests.support.rankprocesses import SUPPORT, process
from tests.support.saved import ALONE, config, load, names

pytestmark = pytest.mark.timeout(120)  # two processes import torch

KINDS = ["tcp_store", "dist_barrier", "default_store"]
WELL = ["1 saved", "2 saved"]


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def run_ranks(directory: Path, kind: str, *lives: str) -> list[list[str]]:
    """Run two ranks to their ends; return what each said."""
    command = (str(SUPPORT / "saving_rank.py"),)
    port = str(free_port())
    async with (
        process(*command, "0", port, str(directory), kind, lives[0]) as first,
        process(*command, "1", port, str(directory), kind, lives[1]) as second,
    ):
        said = await asyncio.gather(first.communicate(), second.communicate())
        codes = [first.returncode, second.returncode]
    for life, code in zip(lives, codes, strict=True):
        killed = life in ("before", "at", "after", "committed")
        assert code == (-signal.SIGKILL if killed else 0)
    return [out.decode().splitlines() for out, _ in said]


def ranks(directory: Path, kind: str, *lives: str) -> list[list[str]]:
    """Do so from a plain test."""
    return asyncio.run(run_ranks(directory, kind, *lives))


def check_whole(directory: Path, steps: Sequence[int]) -> None:
    """Check that just these checkpoints are there, with what each rank has saved."""
    found = [step for step in (1, 2) if find_checkpoint(directory / f"step-{step}")]
    assert found == [*steps]
    for step in steps:
        for rank in (0, 1):
            reader = CheckpointReader(RankInfo(rank, 2))
            state, _ = reader.read(directory / f"step-{step}")
            assert (state["rank"], state["step"]) == (rank, step)
            assert set(state["w"].tolist()) == {float(step)}
    newest = latest(directory)
    assert newest is not None
    assert (newest.step, newest.world_size) == (steps[-1], 2)


@pytest.mark.parametrize("kind", KINDS)
class TestTogether:
    """Both commit, or neither does (C8)."""

    @proves("cell TCPStoreBarrier.meet: success", "cell DistBarrier.meet: success")
    def test_both_save(self, tmp_path: Path, kind: str) -> None:
        """One directory, a file for each, one marker; nothing else is left."""
        assert ranks(tmp_path, kind, "well", "well") == [WELL, WELL]
        check_whole(tmp_path, [1, 2])
        assert names(tmp_path) == ["step-1", "step-2"]
        files = ["checkpoint_0.safetensors", "checkpoint_1.safetensors", "commit.json"]
        assert names(tmp_path / "step-2") == files

    @proves("cell TCPStoreBarrier.meet: error", "cell DistBarrier.meet: error")
    @pytest.mark.parametrize("failing", [0, 1])
    def test_one_fails(self, tmp_path: Path, kind: str, failing: int) -> None:
        """The other one is told at once, and both clean up."""
        lives = ["well", "well"]
        lives[failing] = "fails"
        said = ranks(tmp_path, kind, *lives)
        assert said[failing][1].startswith("2 UnsupportedLeafError")
        other = said[1 - failing][1]
        assert f"not committed: rank {failing} gave up" in other
        check_whole(tmp_path, [1])
        assert names(tmp_path) == ["step-1"]

    @proves("cell TCPStoreBarrier.meet: error")
    @pytest.mark.parametrize("failing", [0, 1])
    def test_one_cannot_resolve_its_path(
        self, tmp_path: Path, kind: str, failing: int
    ) -> None:
        """The other one is told at once, and does not wait for its timeout."""
        lives = ["well", "well"]
        lives[failing] = "lost"
        said = ranks(tmp_path, kind, *lives)
        assert said[failing][1].startswith("2 StorageError")
        assert "name too long" in said[failing][1]
        other = said[1 - failing][1]
        assert f"not committed: rank {failing} gave up" in other
        check_whole(tmp_path, [1])
        assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("kind", ["tcp_store", "dist_barrier"])
@pytest.mark.parametrize("victim", [0, 1])
class TestKilled:
    """A rank that is killed takes the save with it, or it does not."""

    @proves(
        "cell SyncCheckpointer.save: the other one dies",
        "cell TCPStoreBarrier.meet: this process dies",
        "cell DistBarrier.meet: this process dies",
        "cell DistBarrier.meet: the other one dies",
    )
    @pytest.mark.parametrize("moment", ["before", "at", "after"])
    def test_at_any_moment(
        self, tmp_path: Path, kind: str, victim: int, moment: str
    ) -> None:
        """What can be loaded is whole, and the other rank does not wait for ever."""
        lives = ["well", "well"]
        lives[victim] = moment
        said = ranks(tmp_path, kind, *lives)
        assert said[victim] == ["1 saved"]
        assert said[1 - victim][0] == "1 saved"
        outcome = said[1 - victim][1]
        if victim == 0:
            # It is rank 0 that commits, and it did not come that far. The other rank
            # cannot know that, unless all were told.
            assert outcome.startswith("2 StorageError")
            assert "not committed" in outcome or "not known" in outcome
            check_whole(tmp_path, [1])
        elif outcome == "2 saved":
            check_whole(tmp_path, [1, 2])
        else:
            assert moment != "after"
            assert "it was not committed" in outcome
            check_whole(tmp_path, [1])


@pytest.mark.parametrize("kind", ["tcp_store", "dist_barrier"])
class TestCommitted:
    """A rank that dies after the commit does not make the others deny it."""

    @proves("cell SyncCheckpointer.save: the other one dies")
    def test_the_rank_that_committed_warns(self, tmp_path: Path, kind: str) -> None:
        """It calls its hook, retires older checkpoints and says which rank is gone."""
        said, died = ranks(tmp_path, kind, "tells", "after")
        assert died == ["1 saved"]
        assert said[:2] == ["1 post_commit", "1 saved"]
        warning, *rest = sorted(said[2:], reverse=True, key=lambda line: "warn" in line)
        assert warning.startswith("2 warning: step-2 is committed, but")
        assert rest == ["2 post_commit", "2 saved"]
        check_whole(tmp_path, [2])
        assert names(tmp_path) == ["step-2"]

    @proves("cell SyncCheckpointer.save: the other one dies")
    def test_another_rank_looks_at_the_marker(self, tmp_path: Path, kind: str) -> None:
        """Rank 0 has committed, and died before it could say so."""
        died, said = ranks(tmp_path, kind, "committed", "tells")
        assert died == ["1 saved"]
        assert said[:2] == ["1 post_commit", "1 saved"]
        assert "2 post_commit" in said
        assert said[-1] == "2 saved"
        assert any(line.startswith("2 warning: step-2 is committed") for line in said)
        check_whole(tmp_path, [1, 2])

    @proves("cell SyncCheckpointer.save: the other one dies")
    def test_another_rank_says_that_it_is_not_known(
        self, tmp_path: Path, kind: str
    ) -> None:
        """Rank 0 died between the first meeting and its commit; there is no marker."""
        died, said = ranks(tmp_path, kind, "after", "well")
        assert died == ["1 saved"]
        assert said[1].startswith("2 StorageError")
        assert "it is not known whether it was committed" in said[1]
        check_whole(tmp_path, [1])


class TestLate:
    """A rank that does not come is not waited for any longer than agreed."""

    @proves(
        "cell CheckpointProcess.forsake: this process dies",
        "cell SyncCheckpointer.save: timeout",
    )
    def test_it_times_out(self, tmp_path: Path) -> None:
        """And leaves nothing behind."""
        said = ranks(tmp_path, "tcp_store", "well", "stays-away")
        assert "timed out after 2 s in the barrier (step-2/2/written)" in said[0][1]
        check_whole(tmp_path, [1])
        assert names(tmp_path) == ["step-1"]


def store_barrier(rank: int, port: int, **options: Any) -> Barrier:
    """Make one side of a barrier, where rank 0 hosts the store."""
    from aiockpt.checkpointers.barriers import TCPStoreBarrier

    return TCPStoreBarrier(
        *(rank, 2),
        tcpstore_port=port,
        master_address="127.0.0.1",
        use_checkpoint_barrier_tcpstore_libuv=False,  # it keeps a pipe
        **options,
    )


def meeting(step: int) -> Meeting:
    """Return a meeting that nobody is waited for at, for long."""
    return Meeting(name="s", step=step, phase="written", place=Path(), timeout=0.2)


class TestStore:
    """What a meeting does not depend on."""

    @proves(
        "cell TCPStoreBarrier.meet: timeout",
        "cell TCPStoreBarrier.meet: the other one dies",
    )
    def test_a_replaced_process_finds_its_way(self) -> None:
        """Nothing is counted in a process, so a new one is as good (C9)."""
        port = free_port()

        def barrier(rank: int) -> Barrier:
            return store_barrier(rank, port)

        async def both(step: int, *barriers: Barrier) -> list[Any]:
            calls = [asyncio.to_thread(each.meet, meeting(step)) for each in barriers]
            return await asyncio.gather(*calls, return_exceptions=True)

        first, second = barrier(0), barrier(1)
        try:
            assert asyncio.run(both(1, first, second)) == [None, None]
            with pytest.raises(TimeoutError, match="timed out"):
                first.meet(meeting(2))
            for _ in range(3):
                second = barrier(1)
                assert asyncio.run(both(3, first, second)) == [None, None]
        finally:
            first.close()
            second.close()


class TestParting:
    """The host of the store stays until the others know how it went, and no longer."""

    def test_not_for_those_who_were_given_up(self) -> None:
        """They did not come in all the time that was agreed."""
        port = free_port()
        host = store_barrier(0, port, timeout_exit_secs=1000)
        with pytest.raises(TimeoutError, match="timed out"):
            host.meet(meeting(1))
        host.close()

    @proves("cell TCPStoreBarrier.meet: error")
    @pytest.mark.parametrize("meets", ["late", "now"])
    def test_for_those_who_will_read(self, meets: str) -> None:
        """They are told why, although the host has nothing more to do."""
        port = free_port()
        host = store_barrier(0, port, timeout_exit_secs=1000)
        other = store_barrier(1, port)
        if meets == "late":
            with pytest.raises(TimeoutError):
                other.meet(meeting(1))
        host.meet(meeting(2), failure="its disk is full")
        parting = threading.Thread(target=host.close)
        parting.start()
        parting.join(0.2)
        assert parting.is_alive()
        with pytest.raises(PeerFailedError, match="rank 0 gave up: its disk is full"):
            other.meet(meeting(2))
        parting.join()
        other.close()

    def test_for_as_long_as_it_was_told(self) -> None:
        """Whoever is to read may have died."""
        host = store_barrier(0, free_port(), timeout_exit_secs=0.1)
        host.meet(meeting(1), failure="its disk is full")
        host.close()


class TestRegistry:
    """Barriers by name, also one's own."""

    def test_a_class_of_ones_own(self, tmp_path: Path) -> None:
        """It needs ``execute_barrier`` only, and gets who it is if it asks."""
        calls: list[int] = []

        @register_barrier
        class Counting(Barrier):
            barrier_type = "counting"

            def __init__(self, global_rank: int, more: str) -> None:
                self.told = (global_rank, more)

            def execute_barrier(self) -> None:
                calls.append(1)

        given = BarrierConfig("counting", {"more": "x"})
        barrier = create_barrier_from_config(given, RankInfo(0, 1))
        assert isinstance(barrier, Counting)
        assert barrier.told == (0, "x")
        writer = CheckpointWriter(config(), ALONE, barrier)
        writer.write(tmp_path / "s", {"a": 1})
        writer.close()
        assert len(calls) == 2
        assert load(tmp_path / "s") == {"a": 1}

    def test_an_unknown_one(self) -> None:
        """The known ones are named."""
        with pytest.raises(ValueError, match=r"known are .*dist_barrier.*tcp_store"):
            create_barrier_from_config(BarrierConfig("none"), ALONE)

    def test_one_rank_needs_none(self) -> None:
        """Several need one, and are told how."""
        assert create_barrier_from_config(BarrierConfig(), ALONE) is None
        assert default_rank_info() == ALONE
        for in_process in (False, True):
            with pytest.raises(ValueError, match="2 ranks need somewhere to meet"):
                barrier_config_for(
                    BarrierConfig(), RankInfo(0, 2), in_process=in_process
                )

    def test_what_each_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process group, or the port of a store."""
        monkeypatch.delenv("MASTER_PORT", raising=False)
        for name, reason in (("dist_barrier", "initialized"), ("tcp_store", "port")):
            with pytest.raises(ValueError, match=reason):
                create_barrier_from_config(BarrierConfig(name), RankInfo(0, 2))

    @pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
    def test_no_such_rank(self, rank: int, size: int) -> None:
        """Is refused."""
        with pytest.raises(ValueError, match="is not one of"):
            RankInfo(rank, size)
