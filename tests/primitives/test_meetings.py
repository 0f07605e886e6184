"""The barrier of ranks: what a meeting decides, leaves in the store, and says."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch.distributed as dist

from aiockpt.checkpointers import TCPStoreBarrier
from aiockpt.checkpointers.barriers import Meeting
from aiockpt.errors import PeerFailedError
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.saving import LONG, barrier

pytestmark = pytest.mark.timeout(150)


def meeting(step: int, timeout: float = 0.2) -> Meeting:
    """Return a meeting."""
    return Meeting(directory="/s", step=step, phase="written", timeout=timeout)


class TestStore:
    """The ranks leave little in the store, and its host waits for the others."""

    @proves(
        "cell TCPStoreBarrier.meet: timeout",
        "cell TCPStoreBarrier.meet: the other one dies",
    )
    def test_a_replaced_process_finds_its_way(self) -> None:
        """Nothing is counted in a process, so a new one is as good."""
        port = free_port()
        first, second = barrier(0, 2, port), barrier(1, 2, port)
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(each.meet, meeting(1, LONG)) for each in (first, second)
            ]
            assert [each.result(LONG) for each in both] == [{0: "", 1: ""}, {}]
            with pytest.raises(TimeoutError, match="timed out"):
                first.meet(meeting(2))
            for _ in range(3):
                second = barrier(1, 2, port)
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
                assert "rank 1 gave up: it died" in str(each.exception(2 * LONG))
        for made in (successor, second, first):
            made.close()

    @proves("cell TCPStoreBarrier.meet: error")
    @pytest.mark.parametrize("late", [True, False])
    def test_its_host_stays_for_those_who_will_read(self, *, late: bool) -> None:
        """They are told why, although the host has nothing more to do."""
        port = free_port()
        host, other = barrier(0, 2, port, timeout_exit_secs=1000), barrier(1, 2, port)
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
        host, other = barrier(0, 2, port), barrier(1, 2, port)
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
                host.meet(meeting(5, 4.0))
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
        host = barrier(0, 2, free_port(), timeout_exit_secs=1000)
        with pytest.raises(TimeoutError, match="timed out"):
            host.meet(meeting(1))
        host.close()
        host = barrier(0, 2, free_port(), timeout_exit_secs=0.1)
        host.report(meeting(1), "its disk is full")
        host.close()

    def test_ranks_of_another_size_do_not_meet(self) -> None:
        """The keys of a job of three ranks do not count for a job of two."""
        port = free_port()
        with closing(barrier(0, 3, port)) as host:
            with pytest.raises(TimeoutError):
                host.meet(meeting(1))
            with (
                closing(barrier(0, 2, port, is_master=False)) as first,
                closing(barrier(1, 2, port)) as second,
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
