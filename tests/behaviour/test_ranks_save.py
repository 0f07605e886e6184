"""Two ranks save together: both commit, or neither does, whatever becomes of one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from aiockpt import latest
from aiockpt.checkpointers import (
    BarrierConfig,
    CheckpointReader,
    CheckpointWriter,
    RankInfo,
    TCPStoreBarrier,
    WriterHook,
    create_barrier_from_config,
)
from aiockpt.checkpointers.barriers import Meeting
from aiockpt.errors import PeerFailedError, StorageError, TransportError
from aiockpt.storage.commit import Draft
from aiockpt.storage.interface import find_checkpoint
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
    save_by_both,
    save_by_two,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(150)

WELL = ["1 saved", "2 saved"]
KILLED = ("before", "at", "after", "committed", "dies")
STORES = pytest.mark.parametrize("kind", ["tcp_store", "dist_barrier"])


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
    found = [step for step in (1, 2) if find_checkpoint(directory / f"step-{step}")]
    assert found == [*steps]
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
        assert "timed out after 2 s in the barrier (step-2/2/written)" in said[0][1]
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
            deaf = partial(Deaf, committed=lambda: find_checkpoint(path))
            committing = both.save(0, 1, SHORT)
            both.save(1, 1, wrap=deaf).result(LONG)
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
        wait_until(lambda: find_checkpoint(tmp_path / "c" / "step-2"), "the commit")
        check_whole(tmp_path / "c", [1, 2])


class Late(Wrapped):
    """Another barrier, which its rank reaches when it may."""

    def __init__(self, real: TCPStoreBarrier) -> None:
        super().__init__(real)
        self.begun, self.proceed = threading.Event(), threading.Event()

    def meet(self, meeting: Meeting) -> dict[int, str]:
        self.begun.set()
        self.proceed.wait(LONG)
        return super().meet(meeting)


class Deaf(Wrapped):
    """Another barrier, whose store dies before its rank hears that all have arrived."""

    def __init__(self, real: TCPStoreBarrier, committed: Callable[[], Any]) -> None:
        super().__init__(real)
        self._committed = committed

    def meet(self, meeting: Meeting) -> dict[int, str]:
        assert meeting.phase == "written", "it would wait for a new store"
        super().meet(meeting)
        wait_until(self._committed, "the commit")
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

    def meet(self, meeting: Meeting) -> dict[int, str]:
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

    @pytest.mark.parametrize("restarted", [False, True])
    @pytest.mark.parametrize("first", [0, 1])
    def test_after_a_save_that_a_rank_left_out(
        self, tmp_path, first: int, *, restarted: bool
    ) -> None:
        """It is committed, whichever rank begins it."""
        with job(tmp_path / "step") as both:
            save_by_both(both, 1, 0)
            with pytest.raises(StorageError, match="timed out"):
                both.save(0, 2, SHORT).result(LONG)
            if restarted:
                both.restart(1)
            save_by_both(both, 3, first)
        assert [load(tmp_path / "step", rank=n)["value"] for n in (0, 1)] == [3, 3]

    @pytest.mark.parametrize("first", [0, 1, None])
    def test_after_a_save_whose_commit_a_rank_missed(self, tmp_path, first) -> None:
        """The next save works, also if the other rank has begun it already."""
        with job(tmp_path / "step") as both:
            committing = both.save(0, 1, SHORT)
            dying = both.save(1, 1, wrap=Dying)
            committing.result(LONG)  # with a warning
            assert dying.exception(LONG) is not None or load(tmp_path / "step", rank=1)
            both.restart(1)
            if first is None:
                early = both.save(0, 2)
                time.sleep(0.2)
                both.mourn(1)
                both.save(1, 2).result(LONG)
                early.result(LONG)
            else:
                save_by_both(both, 2, first)
        assert [load(tmp_path / "step", rank=n)["value"] for n in (0, 1)] == [2, 2]

    def test_again_and_again(self, tmp_path) -> None:
        """The store may lose any key of the last save while this one meets."""
        with job(tmp_path / "step") as both:
            for value in range(20):
                for each in [both.save(rank, value) for rank in (1, 0)]:
                    each.result(LONG)
        assert load(tmp_path / "step", rank=1)["value"] == 19

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
                slow.result(LONG / 2)


def meeting(step: int, timeout: float = 0.2) -> Meeting:
    """Return a meeting."""
    return Meeting(directory="/s", step=step, phase="written", timeout=timeout)


def one_of_two(rank: int, port: int, **options) -> TCPStoreBarrier:
    """Make one side of a barrier, where rank 0 hosts the store."""
    return TCPStoreBarrier(
        *(rank, 2),
        tcpstore_port=port,
        master_address="127.0.0.1",
        use_checkpoint_barrier_tcpstore_libuv=False,  # it keeps a pipe
        **options,
    )


class TestStore:
    """The ranks leave little in the store, and its host waits for the others."""

    @proves(
        "cell TCPStoreBarrier.meet: timeout",
        "cell TCPStoreBarrier.meet: the other one dies",
    )
    def test_a_replaced_process_finds_its_way(self) -> None:
        """Nothing is counted in a process, so a new one is as good."""
        port = free_port()
        first, second = one_of_two(0, port), one_of_two(1, port)
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(each.meet, meeting(1, LONG)) for each in (first, second)
            ]
            assert [each.result(LONG) for each in both] == [{0: "", 1: ""}, {}]
            with pytest.raises(TimeoutError, match="timed out"):
                first.meet(meeting(2))
            for _ in range(3):
                second = one_of_two(1, port)
                for each in (first, second):
                    each.expect(meeting(3))
                met = [
                    pool.submit(each.meet, meeting(3, LONG)) for each in (first, second)
                ]
                assert [each.result(LONG) for each in met] == [{0: "", 1: ""}, {}]
        first.close()
        second.close()

    def test_a_dead_ranks_successor_tells_those_that_wait(self) -> None:
        """The rank had come to the meeting before it died: it is about this save."""
        port = free_port()
        first, second, successor = (barrier(rank, 3, port) for rank in (0, 1, 1))
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(first.meet, meeting(7, LONG))
            dead = pool.submit(second.meet, meeting(7, LONG))
            time.sleep(0.2)
            successor.report(meeting(7, LONG), "it died")
            for each in (waiting, dead):
                assert "rank 1 gave up: it died" in str(each.exception(LONG / 2))
        for made in (successor, second, first):
            made.close()

    @proves("cell TCPStoreBarrier.meet: error")
    @pytest.mark.parametrize("late", [True, False])
    def test_its_host_stays_for_those_who_will_read(self, *, late: bool) -> None:
        """They are told why, although the host has nothing more to do."""
        port = free_port()
        host, other = one_of_two(0, port, timeout_exit_secs=1000), one_of_two(1, port)
        if late:
            with pytest.raises(TimeoutError):
                other.meet(meeting(1))
        host.report(meeting(2), "its disk is full")
        parting = threading.Thread(target=host.close)
        parting.start()
        parting.join(0.2)
        assert parting.is_alive()
        with pytest.raises(PeerFailedError, match="rank 0 gave up: its disk is full"):
            other.meet(meeting(2))
        parting.join()
        other.close()

    @pytest.mark.parametrize("failing", [False, True])
    def test_it_does_not_grow(self, *, failing: bool) -> None:
        """The keys of earlier saves are removed, whether these failed or not."""
        port, sizes = free_port(), []
        host, other = one_of_two(0, port), one_of_two(1, port)
        there = ("127.0.0.1", port)
        store = dist.TCPStore(*there, is_master=False, use_libuv=False)  # type: ignore[attr-defined]
        with ThreadPoolExecutor(2) as pool:

            def save(each: TCPStoreBarrier, step: int) -> None:
                each.expect(meeting(step, LONG))
                if failing:
                    each.report(meeting(step, LONG), "full")
                else:
                    each.meet(meeting(step, LONG))
                    each.meet(replace(meeting(step, LONG), phase="committed"))

            for step in range(60):
                saves = [pool.submit(save, each, step) for each in (host, other)]
                for each in saves:
                    each.result(LONG)
                sizes.append(store.num_keys())
        assert max(sizes[-20:]) < (640 if failing else 30)
        assert failing or sizes[-1] == sizes[-20] == max(sizes)
        other.close()
        host.close()

    def test_any_schedule_of_three_ranks(self) -> None:
        """All are told the same in time, although each save has the same name."""
        chance, port, step = random.Random(3), free_port(), 1
        host = barrier(0, 3, port)
        made = [host, barrier(1, 3, port), barrier(2, 3, port)]

        def save(each: TCPStoreBarrier, life: str, pause: list[float]) -> str:
            time.sleep(pause[0])
            each.expect(meeting(step, LONG))
            time.sleep(pause[1])
            try:
                if life == "fails":
                    each.report(meeting(step, LONG), "on purpose")
                    return "told"
                each.meet(meeting(step, LONG))
                each.meet(replace(meeting(step, LONG), phase="committed"))
            except PeerFailedError:
                return "told"
            return "saved"

        with ThreadPoolExecutor(3) as pool:
            for _ in range(150):
                lives = chance.choices(["lives", "fails"], [5, 1], k=3)
                pauses = [chance.choices([0, 0.001, 0.003], k=2) for _ in lives]
                saves = [
                    pool.submit(save, each, life, pause)
                    for each, life, pause in zip(made, lives, pauses, strict=True)
                ]
                said = {each.result(2 * LONG) for each in saves}
                assert said == {"told" if "fails" in lives else "saved"}, lives
        for each in reversed(made):
            each.close()

    def test_a_waiting_rank_says_for_whom(self, caplog) -> None:
        """A log line names the missing ranks, and so does the error."""
        port = free_port()
        host, other = barrier(0, 4, port), barrier(2, 4, port)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.meet, meeting(5, LONG))
            with pytest.raises(TimeoutError, match=r"for ranks 1, 3 of 4; .* /s by"):
                host.meet(meeting(5, 1.0))
            with pytest.raises(PeerFailedError, match=r"rank 0 .* for ranks 1, 3 of 4"):
                waiting.result(LONG)
        said = [each for each in caplog.messages if "waits for ranks 1, 3" in each]
        assert len(said) == 1
        assert said[0].startswith("saving /s ")
        assert "RankInfo(0, 1)" in said[0]
        other.close()
        host.close()

    def test_its_host_does_not_stay_for_ever(self) -> None:
        """The host waits for absent ranks no longer than it was told."""
        host = one_of_two(0, free_port(), timeout_exit_secs=1000)
        with pytest.raises(TimeoutError, match="timed out"):
            host.meet(meeting(1))
        host.close()
        host = one_of_two(0, free_port(), timeout_exit_secs=0.1)
        host.report(meeting(1), "its disk is full")
        host.close()


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
        assert find_checkpoint(path) is None
        assert path.with_name(".step-2.part").exists()
        with ThreadPoolExecutor(2) as pool:
            begun = []
            for rank in (first, 1 - first):
                meets = one_of_two(rank, port, is_master=False, timeout_exit_secs=0)
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
                meets = one_of_two(rank, port, is_master=False, timeout_exit_secs=0)
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


class TestTwoCheckpointers:
    """Two checkpointers of one job, which save the same name in other directories."""

    def test_they_do_not_meet_each_other(self, tmp_path) -> None:
        """Whichever is ready first on a rank; a rank 0's second one hosts nothing."""
        port, paths = free_port(), [tmp_path / "model/step-1", tmp_path / "ema/step-1"]
        with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            writers = [
                [
                    CheckpointWriter(
                        config(write_barrier_timeout_secs=LONG),
                        RankInfo(rank, 2),
                        one_of_two(rank, port, timeout_exit_secs=0),
                    )
                    for _ in paths
                ]
                for rank in (0, 1)
            ]
            for each in [*writers[0], *writers[1]]:
                stack.callback(each.close)

            def save(rank: int, which: int) -> Future[None]:
                writer, path = writers[rank][which], paths[which]
                return pool.submit(writer.write, path, {"rank": rank, "which": which})

            early = [save(0, 0), save(1, 1)]
            done, _ = wait(early, timeout=0.3)
            assert not done
            for saving in [*early, save(0, 1), save(1, 0)]:
                saving.result(LONG)
        for which, path in enumerate(paths):
            for rank in (0, 1):
                reader = CheckpointReader(RankInfo(rank, 2))
                assert reader.read(path)[0] == {"rank": rank, "which": which}

    def test_ranks_of_another_size_do_not_meet(self) -> None:
        """The keys of a job of three ranks do not count for a job of two."""
        port = free_port()
        with closing(barrier(0, 3, port)) as host:
            with pytest.raises(TimeoutError):
                host.meet(meeting(1))
            with (
                closing(one_of_two(0, port, is_master=False)) as first,
                closing(one_of_two(1, port)) as second,
                ThreadPoolExecutor(2) as pool,
            ):
                for each in (first, second):
                    each.expect(meeting(1, LONG))
                met = [
                    pool.submit(each.meet, meeting(1, LONG)) for each in (first, second)
                ]
                assert [each.result(LONG) for each in met] == [{0: "", 1: ""}, {}]

    def test_other_directories_have_other_meetings(self) -> None:
        """Each directory has its own meeting, also if its name is no text."""
        where = ["/a/s", "/b/s", "/a/s/s", *map(os.fsdecode, (b"/a/\xff", b"/a/\xfe"))]
        keys = {replace(meeting(1), directory=each).key for each in where}
        assert len(keys) == len(where)


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


def test_a_commit_that_fails_leaves_no_file(tmp_path, monkeypatch) -> None:
    """Each rank removes its own."""

    def fails(*_: Any) -> list[Path]:
        raise StorageError("there", "no room")

    monkeypatch.setattr(Draft, "commit", fails)
    port = free_port()

    def save(rank: int) -> None:
        made = CheckpointWriter(config(), RankInfo(rank, 2), barrier(rank, 2, port))
        with closing(made), pytest.raises(StorageError):
            made.write(tmp_path / "step-1", {"a": rank})

    with ThreadPoolExecutor(2) as pool:
        for saved in [pool.submit(save, rank) for rank in range(2)]:
            saved.result(LONG)
    assert names(tmp_path) == []
