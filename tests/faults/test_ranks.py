"""Ranks that save together, of which one dies, is lost, or stays away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import aiockpt
from aiockpt import StorageError, list_checkpoints
from aiockpt.checkpointers import (
    BarrierConfig,
    CheckpointProcess,
    CheckpointProcessConfig,
    CheckpointReader,
    CheckpointWriterConfig,
    RankInfo,
    SyncCheckpointer,
)
from aiockpt.errors import UnsupportedLeafError
from aiockpt.storage.interface import find_checkpoint
from tests.support.commandline import ENVIRONMENT
from tests.support.matrix import Record
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.ranks import process
from tests.support.saving import LONG, SHORT, Dying, Job, job, load, names, use_cpu
from tests.support.waiting import eventually

# What happens to processes is the same on both loops; each takes seconds.
LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = pytest.mark.timeout(900)

on_a_loop = pytest.mark.asyncio(loop_factories=[LOOP])

SUPPORT = Path(__file__).parents[1] / "support"
NICEST = 19
STARTS_WITHIN = 30.0
BUSY = "while True: pass"


class Rank:
    """A rank in a process of its own, which saves when it is told to."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = 0

    async def said(self) -> str:
        """Return what it says next; its checkpoint process's id is noted."""
        assert self._process.stdout is not None
        async with asyncio.timeout(100):
            line = await self._process.stdout.readline()
        pid, _, said = line.decode().strip().partition(" ")
        self.pid = 0 if pid == "None" else int(pid)
        return said

    def tell(self, path: Path, step: int, value: int) -> None:
        """Have it save."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path} {step} {value}\n".encode())

    def kill_its_process(self) -> None:
        """Kill the process that writes, if there is one."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@asynccontextmanager
async def two_ranks(port: int) -> AsyncIterator[list[Rank]]:
    """Give two ranks that are ready; end them."""
    command = [sys.executable, str(SUPPORT / "saving_rank.py"), "told"]
    started = [
        await create_subprocess_exec(
            *command,
            str(rank),
            str(port),
            env=ENVIRONMENT,
            stdin=PIPE,
            stdout=PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        ranks = [Rank(each) for each in started]
        for each in ranks:
            assert await each.said() == "ready"
        yield ranks
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            try:
                async with asyncio.timeout(30):
                    await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()


def value_at(path: Path) -> float | None:
    """Return what both ranks have saved, every digest verified; None: nothing."""
    if find_checkpoint(path) is None:
        return None
    found = set()
    for rank in (0, 1):
        state, _ = CheckpointReader(RankInfo(rank, 2)).read(path)
        assert state["rank"] == rank
        found |= {float(each) for each in state["w"].aminmax()}
    assert len(found) == 1, f"torn: {found}"
    return float(found.pop())


@proves("fault 52")
@on_a_loop
async def test_a_rank_whose_process_is_killed_at_a_random_moment(
    tmp_path: Path, record: Record
) -> None:
    """Nothing torn, no checkpoint denied, and the same step can be saved at once."""
    chance = random.Random(46)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *("127.0.0.1", 0),
        is_master=True,
        wait_for_workers=False,
        use_libuv=False,
        timeout=timedelta(seconds=30),
    )
    hit, committed = 0, 0
    asked, most = record.pick(3, 50), record.pick(40, 500)
    for step in range(most):
        # Processes of one checkpointer that die again and again start after pauses.
        async with two_ranks(store.port) as ranks:
            # The same name again and again, or one of its own.
            path = tmp_path / ("last" if step % 3 == 0 else f"step-{step}")
            value = 2 * step + 1
            began = time.monotonic()
            for each in ranks:
                each.tell(tmp_path / "undisturbed", step, value)
            assert [await each.said() for each in ranks] == ["saved", "saved"]
            took = time.monotonic() - began
            for each in ranks:
                each.tell(path, step, value)
            await asyncio.sleep(chance.uniform(0, took))
            victim = chance.randrange(2)
            ranks[victim].kill_its_process()
            killed = time.monotonic()
            said = [await each.said() for each in ranks]
            record.within("all ranks know after", time.monotonic() - killed, 10)
            there = value_at(path) == value
            for line in said:
                assert line == "saved" or line.startswith(("WorkerErr", "StorageErr"))
                assert there or line != "saved", said
                assert not there or "was not committed" not in line, said
            if said != ["saved", "saved"]:
                hit, committed = hit + 1, committed + there
            for each in ranks:
                each.tell(path, step, value + 1)
            assert [await each.said() for each in ranks] == ["saved", "saved"]
            assert value_at(path) == value + 1
        record.ran()
        if hit and step + 1 >= asked:
            break
    assert hit
    record.note(f"{hit} saves were hit, {committed} are committed nevertheless")
    del store


@proves("fault 53")
def test_the_save_after_one_that_went_wrong_for_a_rank(
    tmp_path: Path, record: Record
) -> None:
    """It is to the same path and step, and is committed, whoever comes first."""
    chance = random.Random(47)
    with job(tmp_path / "step") as ranks:
        for value in range(1, record.pick(6, 60)):
            other = chance.randrange(2)
            wrong = chance.choice([_left_out, _refused, _dies])
            wrong(ranks, other, -value, tmp_path, record)
            first = chance.randrange(2)
            saves = [ranks.save(first, value)]
            time.sleep(chance.choice([0, 0.2]))
            saves.append(ranks.save(1 - first, value))
            for each in saves:
                each.result(LONG)
            for rank in (0, 1):
                assert load(tmp_path / "step", rank=rank)["value"] == value
            record.ran()


def _left_out(ranks: Job, other: int, value: int, _: Path, __: Record) -> None:
    """Leave it out on one rank; the other one times out."""
    with pytest.raises(StorageError, match="timed out"):
        ranks.save(1 - other, value, SHORT).result(LONG)


def _refused(ranks: Job, other: int, value: int, _: Path, record: Record) -> None:
    """Have one rank not save its state; the other one is told."""
    since = time.monotonic()
    waits = ranks.save(1 - other, value)
    refused = ranks.save(other, object())
    with pytest.raises(UnsupportedLeafError):
        refused.result(LONG)
    with pytest.raises(StorageError, match=f"rank {other} gave up"):
        waits.result(LONG)
    record.within("a refused state: told after", time.monotonic() - since, 2)


def _dies(ranks: Job, _: int, value: int, place: Path, __: Record) -> None:
    """Have rank 1 die between the meetings; rank 0 has committed."""
    commits = ranks.save(0, value, SHORT)
    ranks.save(1, value, wrap=Dying).exception(LONG)
    commits.result(LONG)
    assert load(place / "step", rank=1)["value"] == value
    ranks.restart(1)


@proves("fault 66")
@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_a_checkpointer_that_is_older_than_the_group(
    tmp_path: Path, record: Record, kind: str
) -> None:
    """Two ranks commit one checkpoint; then one of them goes on alone."""
    program, ports = str(SUPPORT / "early_rank.py"), [free_port(), free_port()]

    async def main() -> list[bytes]:
        words = (*map(str, ports), str(tmp_path / "c"), kind)
        async with (
            process(program, "0", *words) as first,
            process(program, "1", *words) as second,
        ):
            said = await asyncio.gather(first.communicate(), second.communicate())
            return [out for out, _ in said]

    first, second = asyncio.run(main())
    assert first.splitlines() == [b"saved and loaded by rank 0"] * 2
    assert second.splitlines() == [b"saved and loaded by rank 1"]
    # The first one was retired, by rank 0 alone.
    assert names(tmp_path / "c") == ["step-2"]
    assert [each.world_size for each in list_checkpoints(tmp_path / "c")] == [1]
    record.ran(2)


@proves("fault 67")
def test_a_store_that_outlives_the_ranks(tmp_path: Path, record: Record) -> None:
    """A rank that died at the meeting is not taken for the one that comes later."""
    program = str(SUPPORT / "restarted_rank.py")
    directory, last = str(tmp_path / "c"), record.pick(2, 4)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        *("127.0.0.1", 0), is_master=True, wait_for_workers=False, use_libuv=False
    )

    def rank(number: int, attempt: int) -> AbstractAsyncContextManager[Process]:
        words = (str(number), str(store.port), str(attempt), directory)
        return process(program, *words, stdin=PIPE)

    async def heard(rank: Process) -> bytes:
        assert rank.stdout is not None
        return await rank.stdout.readline()

    async def arrive(rank: Process) -> None:
        """Let a rank that waits before the meeting come to it."""
        keys = store.num_keys()
        assert rank.stdin is not None
        rank.stdin.write(b"\n")
        await eventually(lambda: store.num_keys() != keys, "the arrival")

    async def main() -> list[bytes]:
        for attempt in range(1, last):
            async with rank(0, attempt) as first, rank(1, attempt) as second:
                said = await asyncio.gather(heard(first), heard(second))
                assert [*said] == [b"complete\n"] * 2
                await arrive(second if attempt % 2 else first)  # both die there
        async with rank(0, last) as first, rank(1, last) as second:
            assert await heard(first) == b"complete\n"
            await arrive(first)
            assert await heard(second) == b"complete\n"
            await arrive(second)
            return [*await asyncio.gather(heard(first), heard(second))]

    assert asyncio.run(main()) == [b"saved\n"] * 2
    for number in (0, 1):
        state = aiockpt.load(tmp_path / "c" / "step-1", rank=number)
        assert state == {"attempt": str(last), "rank": number}
    record.ran(last - 1)
    store = None  # it has descriptors


@proves("fault 68")
def test_two_checkpointers_of_one_job(tmp_path: Path, record: Record) -> None:
    """They save the same steps to other directories, in any order on each rank."""
    chance, port = record.chance(), free_port()
    where = {"master_address": "127.0.0.1", "tcpstore_port": port}
    ours = {"timeout_exit_secs": 0, "use_checkpoint_barrier_tcpstore_libuv": False}
    barrier = BarrierConfig("tcp_store", where | ours)
    kinds = ("model", "ema")

    def made(rank: int) -> SyncCheckpointer:
        config = aiockpt.CheckpointerConfig(
            writer_config=CheckpointWriterConfig(fsync=False), barrier_config=barrier
        )
        return aiockpt.make_sync_checkpointer(config, RankInfo(rank, 2))

    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        ranks = [
            {kind: stack.enter_context(made(rank)) for kind in kinds} for rank in (0, 1)
        ]
        for step in range(record.pick(5, 100)):
            order = [(rank, kind) for rank in (0, 1) for kind in kinds]
            chance.shuffle(order)
            saves = [
                pool.submit(
                    ranks[rank][kind].save,
                    {"step": step, "rank": rank, "kind": kind},
                    tmp_path / kind / f"step-{step}",
                )
                for rank, kind in order
            ]
            for each in saves:
                each.result(LONG)
            for rank, kind in order:
                found = load(tmp_path / kind / f"step-{step}", rank=rank)
                assert found == {"step": step, "rank": rank, "kind": kind}
            record.ran(2)


@contextmanager
def beside_busy_processes(count: int) -> Iterator[None]:
    """Share one core with processes that never wait, for as long as the block runs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # what is started now inherits it
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, cores)


@proves("fault 54")
@on_a_loop
async def test_a_checkpoint_process_starts_beside_busy_processes(
    record: Record,
) -> None:
    """A low priority would leave it less than a hundredth of the core."""
    config = CheckpointProcessConfig(
        nice=NICEST, subprocess_init_timeout_secs=STARTS_WITHIN
    )
    for _ in range(record.pick(1, 5)):
        since = time.monotonic()
        with beside_busy_processes(2):
            made = CheckpointProcess(
                RankInfo(0, 1),
                config,
                subprocess_init_fn=use_cpu,
                subprocess_init_args=(0.3,),  # with that priority, 40 s of the core's
            )
            try:
                await made.ready()
                taken = time.monotonic() - since
                assert made.pid is not None
                niceness = os.getpriority(os.PRIO_PROCESS, made.pid)
            except BaseException:
                await made.close()
                raise
        await made.close()
        assert niceness == NICEST
        record.within("ready after", taken, STARTS_WITHIN)
        record.ran()
