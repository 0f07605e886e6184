"""Processes that are killed, stopped, forked, or end in the middle of a transfer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.errors import ProcessGroupError, TransferTimeoutError, WorkerError
from aiockpt.testing import Drip, FaultProxy, PeerProcess, assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.forkserver import FRESH
from tests.support.leakcheck import shm
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.ranks import MIB_SENT, ranks
from tests.support.ranks import transport as rank_transport
from tests.support.saving import Gate, names
from tests.support.senders import CODE
from tests.support.transports import in_the_middle, pair, receive, weights
from tests.support.waiting import eventually, is_running, wait_until

# What happens to processes is the same on both loops; each takes seconds.
LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = [pytest.mark.asyncio(loop_factories=[LOOP]), pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"
TOKEN = "a-secret-of-16-letters"


def program(name: str, *arguments: object, errors: Path | None = None) -> PeerProcess:
    """Return one of the programs of the tests, which is not started yet."""
    command = [sys.executable, str(SUPPORT / name), *map(str, arguments)]
    return PeerProcess(command, env=ENVIRONMENT, errors=errors)


def state(fill: float) -> dict[str, Any]:
    """Return what takes a while to be written."""
    return {"weight": torch.full((4 << 20,), fill), "fill": fill}


@proves("fault 20")
@pytest.mark.allow_error_logs  # a save that fails is logged
async def test_a_writer_that_is_killed_fails_its_save_only(
    tmp_path: Path, record: Record
) -> None:
    """The checkpoint before stays whole, and the next save works."""
    chance = random.Random(20)
    failed = 0
    async with aiockpt.make_async_checkpointer() as made:
        writer: Any = made._writer
        await (await made.save(state(0), tmp_path / "last")).written()
        for number in range(record.pick(3, 50)):
            handle = await made.save(state(number + 1), tmp_path / "last")
            await asyncio.sleep(chance.uniform(0, 0.02))
            os.kill(writer.pid, signal.SIGKILL)
            killed = time.monotonic()
            try:
                await handle.written()
            except WorkerError:
                noticed = time.monotonic() - killed
                record.within("the save fails after", noticed, 0.5)
                failed += 1
            found = made_whole(tmp_path / "last")
            assert_same(found, state(found["fill"]))
            assert found["fill"] in (number, number + 1)
            await (await made.save(state(number + 1), tmp_path / "last")).written()
            record.ran()
        assert writer.restarts >= failed
    assert failed
    assert names(tmp_path) == ["last"]


def made_whole(path: Path) -> dict[str, Any]:
    """Load a checkpoint, every digest verified."""
    with aiockpt.make_sync_checkpointer() as made:
        found: dict[str, Any] = made.load(path)
        return found


@proves("fault 21")
async def test_a_trainer_and_its_writer_that_are_killed_leave_nothing(
    tmp_path: Path, record: Record
) -> None:
    """No process, no shared memory; what was saved before is whole."""
    before = shm()
    for run in range(record.pick(1, 10)):
        place = tmp_path / str(run)
        place.mkdir()
        gate = Gate(place / "gate")
        try:
            async with program("trainer.py", place, 60, "save", "save", "wait") as peer:
                gate.open()
                assert await peer.line() == "waiting"
                await eventually((place / "pid").exists, "the child's start")
                child = int((place / "pid").read_text())
                await eventually((place / "checkpoints/step-1").exists, "the write")
                os.kill(child, signal.SIGKILL)
                await peer.kill()
            await eventually(partial(has_ended, child), "its end")
        finally:
            gate.close()
        assert made_whole(place / "checkpoints/step-1")["step"] == 1
        assert shm() <= before
        record.ran()


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone."""
    return not is_running(pid)


@asynccontextmanager
async def slow_sender() -> AsyncIterator[tuple[PeerProcess, str]]:
    """Give a sender in a process of its own, and its metadata by way of a slow link."""
    async with program("senders.py", "serve", 0, TOKEN) as sender:
        url = await sender.line()
        port = int(url.split(":")[2].split("/")[0])
        slow = Drip(rate=16e6, burst=1 << 17)
        async with FaultProxy("127.0.0.1", port, otherwise=slow) as proxy:
            yield sender, url.replace(str(port), str(proxy.port))


@proves("fault 31")
async def test_a_transfer_goes_on_after_a_suspension(record: Record) -> None:
    """Both ends stand still for longer than their stall timeout."""
    async with slow_sender() as (sender, metadata):
        for stall_timeout in record.pick([0.5], [0.5, 2.0, 20.0]):
            fetching = program("senders.py", "fetch", metadata, TOKEN, stall_timeout)
            async with fetching as receiver:
                assert await receiver.line() == "receiving"
                for each in (sender, receiver):
                    await each.stop()
                await asyncio.sleep(record.pick(1.0, 10.0))
                for each in (sender, receiver):
                    each.resume()
                said = await receiver.line()
            assert said.split()[0] in ("received", "failed"), said
            record.note(f"stall timeout {stall_timeout:g} s: {said}")
            record.ran()


@proves("fault 35")
@pytest.mark.allow_leaks("threads", "fds")  # the wait that nothing but time ends
async def test_a_rank_that_is_killed_is_an_error_soon(
    tmp_path: Path, record: Record
) -> None:
    """Long before the deadline; the group is broken then, and says so."""
    for run, life in enumerate(record.pick(["receive"], ["send", "receive"] * 3)):
        async with joined(tmp_path, run, life) as (ours, peer):
            peer.send_signal(signal.SIGSTOP)  # or the transfer may end before the kill
            call = moving(ours, life, timeout=60)
            await asyncio.sleep(0.05)
            peer.kill()
            began = time.monotonic()
            with pytest.raises(ProcessGroupError, match="make a new group"):
                await call
            record.within("killed: error after", time.monotonic() - began, 0.5)
            assert "broken" in repr(ours)
        record.ran()


@proves("fault 35")
@pytest.mark.allow_leaks("threads", "fds")  # the wait that nothing but time ends
async def test_a_rank_that_stands_still_is_an_error_at_the_deadline(
    tmp_path: Path, record: Record
) -> None:
    """The error comes not much later than the deadline."""
    limit = record.pick(1, 6)
    for run, life in enumerate(record.pick(["send"], ["send", "receive"])):
        async with joined(tmp_path, run, life) as (ours, peer):
            peer.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TransferTimeoutError, match="rank 1"):
                await moving(ours, life, timeout=limit)
            late = time.monotonic() - began - limit
            record.within("stopped: error after the deadline", late, 0.5)
            with pytest.raises(ProcessGroupError, match="make a new group"):
                await moving(ours, life, timeout=limit)
        record.ran()


@asynccontextmanager
async def joined(place: Path, run: int, life: str) -> AsyncIterator[tuple[Any, Any]]:
    """Give rank 0's transport, and the process of rank 1, of a new group."""
    (place / str(run)).mkdir()
    async with (
        ranks(place / str(run), life) as (group, (peer,)),
        rank_transport(group) as ours,
    ):
        yield ours, peer


def moving(ours: Any, life: str, *, timeout: float) -> asyncio.Task[Any]:
    """Do rank 0's part of what rank 1 does."""
    call = (
        ours.recv_checkpoint(1, "", 1, timeout)
        if life == "send"
        else ours.send_checkpoint([1], 1, weights(mib=MIB_SENT, count=64), timeout)
    )
    return asyncio.create_task(call)


@proves("fault 35")
async def test_a_process_exits_beside_a_wait_for_its_group(
    tmp_path: Path, record: Record
) -> None:
    """Nobody joins the thread."""
    async with ranks(tmp_path, "leave") as (_, (peer,)):
        assert peer.stdout is not None
        assert await peer.stdout.readline() == b"cancelled\n"
        began = time.monotonic()
        assert await peer.wait() == 0
        record.within("exit after", time.monotonic() - began, 2.0)
    record.ran()


@proves("fault 37")
async def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(
    tmp_path: Path, record: Record
) -> None:
    """The fork happens in the middle of a receive."""
    said = tmp_path / "said"
    for _ in range(record.pick(1, 20)):
        async with pair(state=weights(mib=8)) as (sender, receiver):

            async def fork(ours: Any = receiver) -> None:
                if (child := os.fork()) == 0:
                    try:
                        said.write_text(told(ours))
                    finally:
                        os._exit(0)
                wait_until(lambda: os.waitpid(child, os.WNOHANG)[0], "its end")

            def call(halfway: Any, ends: Any = (sender, receiver)) -> Any:
                return receive(*ends, progress=halfway)

            receiving, _ = await in_the_middle(call, fork)
            assert_same(await receiving, weights(mib=8))
        assert said.read_text() == (
            "LocalProtocolError: the transport belongs to the process that first used "
            "it, and this is a forked one: make one after the fork"
        )
        record.ran()


def told(ours: Any) -> str:
    """Return what a child is told that uses its parent's transport."""
    asyncio.set_event_loop(None)
    try:
        asyncio.run(ours.disallow_checkpoint())
    except Exception as error:  # noqa: BLE001 - it is told
        return f"{type(error).__name__}: {error}"
    return "nothing"


ENDS = {
    "exit": CODE,
    "raise": 1,
    "interrupt": -signal.SIGINT,
    "return": 0,
    "shutdown": 0,
}
"""How a program ends, and the code that is its own then."""


@proves("fault 38")
async def test_a_program_ends_in_the_middle_of_a_transfer(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, with its own code, and without a word about tasks."""
    async with slow_sender() as (_, metadata):
        for how in record.pick(["shutdown", "exit"], [*ENDS] * 5):
            if record.exhaustive or how == "exit":  # a fork ends as quietly
                monkeypatch.setenv(FRESH, "1")
            errors = tmp_path / f"{record.outcome.runs}"
            leaving = program(
                "senders.py", "leave", how, metadata, TOKEN, errors=errors
            )
            async with leaving as peer:
                assert await peer.line() == "leaving"
                began = time.monotonic()
                code = await peer.ended()
                record.within("exit after", time.monotonic() - began, 2.0)
            assert code in (ENDS[how], 128 - ENDS[how]), errors.read_text()
            own_words_only(how, errors.read_text())
            record.ran()


def own_words_only(how: str, said: str) -> None:
    """Check what a program that ends so may write to stderr."""
    assert not said or how != "shutdown", said
    for word in ("destroyed", "never retrieved", "Exception ignored"):
        assert word not in said, said
    assert said.count("Traceback") <= {"raise": 1, "interrupt": 3}.get(how, 0), said
