"""Two ranks save together: both commit, or neither does, whatever becomes of one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from aiockpt import latest, list_checkpoints
from aiockpt.checkpointers import (
    BarrierConfig,
    CheckpointReader,
    CheckpointWriter,
    RankInfo,
    TCPStoreBarrier,
    WriterHook,
    create_barrier_from_config,
)
from aiockpt.errors import StorageError, TransportError
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.ranks import SUPPORT, process
from tests.support.saving import (
    ALONE,
    LONG,
    SHORT,
    Dying,
    Wrapped,
    barrier,
    config,
    job,
    load,
    names,
    save,
    save_by_two,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(150)

WELL = ["1 saved", "2 saved"]
KILLED = ("before", "at", "after", "committed", "dies")
STORES = pytest.mark.parametrize(
    "kind", ["tcp_store", pytest.param("dist_barrier", marks=pytest.mark.nightly)]
)


def ranks(
    directory: Path, kind: str, *lives: str, port: int | None = None
) -> list[list[str]]:
    """Run two ranks to their ends; return what each said."""
    program = str(SUPPORT / "saving_rank.py")

    async def main():
        words = (str(port or free_port()), str(directory), kind)
        async with (
            process(program, "live", "0", *words, lives[0]) as first,
            process(program, "live", "1", *words, lives[1]) as second,
        ):
            said = await asyncio.gather(first.communicate(), second.communicate())
            return said, [first.returncode, second.returncode]

    said, codes = asyncio.run(main())
    assert codes == [-signal.SIGKILL if life in KILLED else 0 for life in lives]
    return [out.decode().splitlines() for out, _ in said]


def check_whole(directory: Path, steps: Sequence[int]) -> None:
    """Check that just these checkpoints are there, with what each rank has saved."""
    assert [each.step for each in list_checkpoints(directory)] == [*steps]
    for step in steps:
        for rank in (0, 1):
            reader = CheckpointReader(RankInfo(rank, 2))
            state, _ = reader.read(directory / f"step-{step}")
            assert (state["rank"], state["step"]) == (rank, step)
            assert state["w"].eq(step).all()
    newest = latest(directory)
    assert newest is not None
    assert (newest.step, newest.world_size) == (steps[-1], 2)


class TestTogether:
    """Ranks save together while all of them live."""

    @proves("cell TCPStoreBarrier.meet: success")
    @pytest.mark.parametrize(
        "kind",
        [
            *("tcp_store", "dist_barrier", "default_store"),
            *("background/tcp_store", "background/default_store"),
        ],
    )
    def test_both_save(self, tmp_path, kind: str) -> None:
        """One directory, a file for each, one marker; nothing else is left."""
        assert ranks(tmp_path / "c", kind, "well", "well") == [WELL, WELL]
        check_whole(tmp_path / "c", [1, 2])
        assert names(tmp_path / "c") == ["step-1", "step-2"]
        files = ["checkpoint_0.safetensors", "checkpoint_1.safetensors", "commit.json"]
        assert names(tmp_path / "c" / "step-2") == files

    @proves(
        "cell TCPStoreBarrier.meet: error",
        "cell AsyncCheckpointer.save: error",
        "cell AsyncCheckpointer.save: cancel",
        "cell CheckpointProcess.forsake: success",
    )
    @pytest.mark.parametrize(
        ("kind", "failing", "life", "error"),
        [
            ("tcp_store", 0, "fails", "UnsupportedLeafError"),
            ("dist_barrier", 1, "fails", "UnsupportedLeafError"),
            ("default_store", 0, "fails", "UnsupportedLeafError"),
            ("tcp_store", 1, "lost", "StorageError"),
            ("dist_barrier", 0, "lost", "StorageError"),
            ("background/tcp_store", 0, "fails", "UnsupportedLeafError"),
            ("background/tcp_store", 1, "hasty", "cancelled"),
            ("background/tcp_store", 1, "child-dies", "WorkerError"),
        ],
    )
    def test_one_fails(self, tmp_path, kind, failing, life, error) -> None:
        """The other one is told at once, and both clean up."""
        lives = ["well", "well"]
        lives[failing] = life
        said = ranks(tmp_path / "c", kind, *lives)
        assert said[failing][1].startswith(f"2 {error}")
        other = said[1 - failing][1]  # it has not waited for its timeout
        assert f"not committed: rank {failing} gave up" in other
        check_whole(tmp_path / "c", [1])
        if life != "child-dies":  # what is left of it goes with the next save
            assert names(tmp_path / "c") == ["step-1"]

    @proves(
        "cell CheckpointProcess.forsake: this process dies",
        "cell SyncCheckpointer.save: timeout",
    )
    def test_one_stays_away(self, tmp_path) -> None:
        """It is not waited for any longer than agreed, and nothing is left."""
        said = ranks(tmp_path, "tcp_store", "well", "stays-away")
        assert "timed out after 5 s in the barrier (step-2/2/written)" in said[0][1]
        assert "waited for rank 1 of 2; every rank must save" in said[0][1]
        assert "RankInfo(0, 1)" in said[0][1]
        check_whole(tmp_path, [1])
        assert names(tmp_path) == ["step-1"]


@proves("cell SyncCheckpointer.save: the other one dies")
class TestKilled:
    """A rank that is killed takes the save with it, or it does not."""

    @proves("cell TCPStoreBarrier.meet: this process dies")
    @STORES
    @pytest.mark.parametrize("victim", [0, 1])
    @pytest.mark.parametrize("moment", ["before", "at", "after"])
    def test_at_any_moment(self, tmp_path, kind, victim: int, moment: str) -> None:
        """A loadable checkpoint is whole, and the other rank does not wait for ever."""
        lives = ["well", "well"]
        lives[victim] = moment
        said = ranks(tmp_path, kind, *lives)
        assert said[victim] == ["1 saved"]
        assert said[1 - victim][0] == "1 saved"
        outcome = said[1 - victim][-1]
        if victim == 0:
            # It is rank 0 that commits, and it did not come that far. The other rank
            # cannot know that, unless all were told.
            assert outcome.startswith("2 StorageError")
            unknown = "it is not known whether it was committed" in outcome
            assert (
                unknown if moment == "after" else unknown or "not committed" in outcome
            )
            check_whole(tmp_path, [1])
        elif outcome == "2 saved":
            check_whole(tmp_path, [1, 2])
        else:
            assert moment != "after"
            assert "it was not committed" in outcome
            check_whole(tmp_path, [1])

    @STORES
    def test_after_the_commit(self, tmp_path, kind) -> None:
        """Rank 0 warns, calls its hook, and retires older checkpoints."""
        said, died = ranks(tmp_path, kind, "tells", "after")
        assert died == ["1 saved"]
        assert said[:2] == ["1 post_commit", "1 saved"]
        warning, *rest = sorted(said[2:], reverse=True, key=lambda line: "warn" in line)
        assert warning.startswith("2 warning: step-2 is committed, but")
        assert rest == ["2 post_commit", "2 saved"]
        check_whole(tmp_path, [2])
        assert names(tmp_path) == ["step-2"]

    @STORES
    def test_before_rank_0_could_say_that_it_has_committed(
        self, tmp_path, kind
    ) -> None:
        """The other rank looks at the marker."""
        died, said = ranks(tmp_path, kind, "committed", "tells")
        assert died == ["1 saved"]
        assert said[:2] == ["1 post_commit", "1 saved"]
        assert "2 post_commit" in said
        assert said[-1] == "2 saved"
        assert any(line.startswith("2 warning: step-2 is committed") for line in said)
        check_whole(tmp_path, [1, 2])

    def test_before_the_others_knew_that_all_had_arrived(
        self, tmp_path, caplog
    ) -> None:
        """The other ranks look at the marker, too."""
        path = tmp_path / "step"
        with job(path) as both:
            deaf = both.save(1, 1, wrap=partial(Deaf, path=path))
            time.sleep(0.2)
            committing = both.save(0, 1, SHORT)
            deaf.result(LONG)
            assert "step is committed, but not every rank" in caplog.text
            committing.result(LONG)
        assert [load(path, rank=n)["value"] for n in (0, 1)] == [1, 1]

    def test_a_checkpoint_process_that_is_killed_late(self, tmp_path) -> None:
        """Its successor tells why; both warn, as the other rank has committed."""
        kind = "background/tcp_store"
        said = ranks(tmp_path / "c", kind, "well", "child-dies-late")
        assert said[1][1].startswith("2 warning: step-2 is committed, but")
        assert "the checkpoint process ended by signal 9" in said[1][1]
        assert said[1][2:] == ["2 saved"]
        assert said[0][1].startswith("2 warning: step-2 is committed, but")
        assert "rank 1 gave up: the checkpoint process ended by signal 9" in said[0][1]
        assert said[0][2:] == ["2 saved"]
        check_whole(tmp_path / "c", [1, 2])

    def test_a_trainer_whose_process_has_the_save(self, tmp_path) -> None:
        """The process commits it with the other rank's."""
        said = ranks(tmp_path / "c", "background/tcp_store", "well", "dies")
        assert said == [WELL, ["1 saved"]]
        wait_until((tmp_path / "c" / "step-2").exists, "the commit")
        check_whole(tmp_path / "c", [1, 2])


class Late(Wrapped):
    """Another barrier, which its rank reaches when it may."""

    def __init__(self, real: TCPStoreBarrier) -> None:
        super().__init__(real)
        self.begun, self.proceed = threading.Event(), threading.Event()

    def meet(self, meeting: Any) -> dict[int, str]:
        self.begun.set()
        self.proceed.wait(LONG)
        return super().meet(meeting)


class Deaf(Wrapped):
    """Another barrier, whose store dies before its rank hears that all have arrived."""

    def __init__(self, real: TCPStoreBarrier, path: Path) -> None:
        super().__init__(real)
        self._path = path

    def meet(self, meeting: Any) -> dict[int, str]:
        assert meeting.phase == "written", "it would wait for a new store"
        super().meet(meeting)
        wait_until(self._path.exists, "the commit")
        raise TransportError("the store has died")


class Moving(WriterHook):
    """Moves the checkpoint away as soon as it is committed."""

    def __init__(self, to: Path, *, replace: bool) -> None:
        self._to, self._replace = to, replace

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        pass

    def post_commit(self, path: str, **kwargs: Any) -> None:
        os.rename(path, self._to)
        if self._replace:
            save_by_two(Path(path))


class Slow(Wrapped):
    """Another barrier, whose rank goes on late."""

    def __init__(self, real: TCPStoreBarrier, until: Callable[[], Any]) -> None:
        super().__init__(real)
        self._until = until

    def meet(self, meeting: Any) -> dict[int, str]:
        found = super().meet(meeting)
        if meeting.phase == "committed":
            wait_until(self._until, "the other rank")
        return found


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_that_rank_0_has_moved_away(tmp_path, *, replaced: bool) -> None:
    """It was saved, so the other rank is told so, whatever is there by now."""
    path, moved, port = tmp_path / "step-1", tmp_path / "moved", free_port()
    with ThreadPoolExecutor(2) as pool:
        meets = barrier(0, 2, port), barrier(1, 2, port)
        hook = Moving(moved, replace=replaced)
        first = CheckpointWriter(config(), RankInfo(0, 2), meets[0], hook)
        saving = pool.submit(first.write, path, {"value": 0})
        slow = Slow(meets[1], saving.done)
        second = CheckpointWriter(config(), RankInfo(1, 2), slow)
        pool.submit(second.write, path, {"value": 1}).result(LONG)
        saving.result(LONG)
        for each in reversed(meets):
            each.close()
    assert [load(moved, rank=rank)["value"] for rank in (0, 1)] == [0, 1]
    assert path.exists() is replaced


class TestSamePathAgain:
    """Keys of an earlier save in the store do not count for the next one."""

    def test_after_a_save_whose_commit_a_rank_missed(self, tmp_path) -> None:
        """The next save works, although the other rank has begun it already."""
        with job(tmp_path / "step") as both:
            dying = both.save(1, 1, wrap=Dying)
            time.sleep(0.2)
            both.save(0, 1, SHORT).result(LONG)  # with a warning
            assert dying.exception(LONG) is not None or load(tmp_path / "step", rank=1)
            both.restart(1)
            early = both.save(0, 2)
            time.sleep(0.2)
            both.mourn(1)
            both.save(1, 2).result(LONG)
            early.result(LONG)
        assert [load(tmp_path / "step", rank=n)["value"] for n in (0, 1)] == [2, 2]

    def test_a_rank_that_is_late_is_told_at_once(self, tmp_path) -> None:
        """It began before the other one gave up, so this is no new save for it."""
        with job(tmp_path / "step") as both:
            late: list[Late] = []

            def wrap(real: TCPStoreBarrier) -> TCPStoreBarrier:
                late.append(Late(real))
                return late[0]

            slow = both.save(1, 1, wrap=wrap)
            assert late[0].begun.wait(LONG)
            with pytest.raises(StorageError, match="timed out"):
                both.save(0, 1, SHORT).result(LONG)
            late[0].proceed.set()
            with pytest.raises(StorageError, match="rank 0 gave up"):
                slow.result(2 * LONG)


class TestStoreThatOutlivesTheJob:
    """A store that another program hosts still has what an earlier attempt left."""

    @pytest.fixture
    def port(self):
        """Return the port of such a store."""
        port = free_port()
        there = ("127.0.0.1", port)
        hosted = dist.TCPStore(*there, is_master=True, use_libuv=False)  # type: ignore[attr-defined]
        yield port
        del hosted

    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize(
        "lives", [("at", "stays-away"), ("stays-away", "at"), ("at", "before")]
    )
    def test_the_dead_of_an_earlier_attempt_do_not_count(
        self, tmp_path, monkeypatch, port: int, lives: tuple[str, str], first: int
    ) -> None:
        """They had written their files, and waited for the others, when they died."""
        assert ranks(tmp_path, "tcp_store", *lives, port=port) == [["1 saved"]] * 2
        monkeypatch.chdir(tmp_path.parent)
        path = Path("/proc/self/cwd", tmp_path.name, "step-2")  # their name for it
        assert not path.exists()
        assert path.with_name(".step-2.part").exists()
        with ThreadPoolExecutor(2) as pool:
            begun = []
            for rank in (first, 1 - first):
                meets = barrier(rank, 2, port, is_master=False, timeout_exit_secs=0)
                limits = config(write_barrier_timeout_secs=LONG)
                made = CheckpointWriter(limits, RankInfo(rank, 2), meets)
                begun.append(pool.submit(made.write, path, {"value": rank}))
                time.sleep(0.3)
            for each in begun:
                each.result(LONG)
        assert [load(path, rank=rank)["value"] for rank in (0, 1)] == [0, 1]

    @pytest.mark.parametrize("dead", [0, 1])
    def test_a_failure_is_told_to_one_save_only(
        self, tmp_path, port: int, dead: int
    ) -> None:
        """The failure of a rank that died early ends one save, and not the next."""
        path = tmp_path / "step-3"
        with ThreadPoolExecutor(2) as pool:
            writers = []
            for rank in (0, 1):
                meets = barrier(rank, 2, port, is_master=False, timeout_exit_secs=0)
                limits = config(write_barrier_timeout_secs=LONG)
                writers.append(CheckpointWriter(limits, RankInfo(rank, 2), meets))
            waiting = pool.submit(writers[1 - dead].write, path, {"value": 0})
            time.sleep(0.3)
            writers[dead].abandon(path, 3, "its process has died", begun=True)
            with pytest.raises(StorageError, match="its process has died"):
                waiting.result(LONG)
            again = [
                pool.submit(made.write, path, {"value": rank})
                for rank, made in enumerate(writers)
            ]
            for each in again:
                each.result(LONG)
        assert [load(path, rank=rank)["value"] for rank in (0, 1)] == [0, 1]


class TestConfig:
    """`BarrierConfig` says where the ranks meet."""

    def test_what_is_wrong_is_named(self) -> None:
        """A name, a rank, an address, or somewhere to meet; one rank needs none."""
        where = {"master_address": "127.0.0.1", "tcpstore_port": 1}
        for config_of_one in (BarrierConfig(), BarrierConfig("tcp_store", where)):
            assert create_barrier_from_config(config_of_one, ALONE) is None
        for name in ("tcp_store", "dist_barrier", None):
            with pytest.raises(ValueError, match=r"2 ranks need somewhere.*RankInfo"):
                create_barrier_from_config(BarrierConfig(name), RankInfo(0, 2))
        for part in where.items():
            half = BarrierConfig("tcp_store", dict([part]))
            with pytest.raises(ValueError, match="master_address and tcpstore_port"):
                create_barrier_from_config(half, RankInfo(0, 2))
        with pytest.raises(ValueError, match=r"no barrier type 'none'.*'dist_barrier'"):
            BarrierConfig("none")
        with pytest.raises(ValueError, match="name 'tcp_store'"):
            BarrierConfig("dist_barrier", where)
        with pytest.raises(ValueError, match="2 ranks need a barrier"):
            CheckpointWriter(config(), RankInfo(1, 2))
        foreign: Any = threading.Barrier(2)
        with pytest.raises(TypeError, match=r"not a threading.Barrier; create_barrier"):
            CheckpointWriter(config(), RankInfo(1, 2), foreign)
        for rank, size in [(-1, 2), (2, 2), (0, 0)]:
            with pytest.raises(ValueError, match="global_rank must be from 0"):
                RankInfo(rank, size)


class Meddling(WriterHook):
    """Removes this rank's file before the commit, or puts another one there."""

    def __init__(self, other: Path | None) -> None:
        self._other = other

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        file = Path(path).with_name(".step-1.part") / "checkpoint_1.safetensors"
        if self._other is None:
            file.unlink()
        else:
            file.write_bytes(self._other.read_bytes())

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("", "do all ranks see the same directory"),
        ("step-1", "replaced or removed checkpoint_1"),
        ("step-7", "it is of step 7, not 1"),
        ("thesis", "it is not a checkpoint file of"),
    ],
)
def test_a_commit_that_fails_leaves_no_file(tmp_path, other: str, reason: str) -> None:
    """Rank 0 looks at the files of all ranks, and each rank removes its own."""
    place, port = tmp_path / "c", free_port()
    file = tmp_path / other / "checkpoint_0.safetensors" if other else None
    if other.startswith("step"):
        save(tmp_path / other, {"a": 5})
    elif file is not None:
        file.parent.mkdir()
        file.write_bytes(bytes(100))

    def saved(rank: int) -> None:
        meets, hook = barrier(rank, 2, port), Meddling(file) if rank else None
        made = CheckpointWriter(config(), RankInfo(rank, 2), meets, hook)
        with closing(made), pytest.raises(StorageError, match=reason):
            made.write(place / "step-1", {"a": rank})

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(saved, rank) for rank in range(2)]:
            each.result(LONG)
    assert names(place) == []
