"""The checkpoint process serves for a transport, beside its writing."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import (
    AsyncCheckpointer,
    CheckpointerConfig,
    CheckpointProcess,
    CheckpointProcessConfig,
    RankInfo,
    TransferEvent,
    WorkerError,
)
from aiockpt.http.apart.forwarding import Forwarding
from aiockpt.http.apart.messages import Happened, Logged
from aiockpt.memory import CAN_LEND
from aiockpt.observe import add_hook, emit
from aiockpt.testing import assert_same
from aiockpt.testing.suite.endings import Endings
from aiockpt.testing.suite.offers import Offers
from checkpointing import (
    Forking,
    Gate,
    GatedWriter,
    eventually,
    is_running,
    loaded,
    reaped,
    refuse,
    refuse_and_tell,
    refuse_once,
    wait_until,
)
from commandline import ENVIRONMENT
from leakcheck import children
from rankprocesses import SUPPORT
from transports import Transport, port_of, receive, transport

pytestmark = pytest.mark.one_loop

STATE = {"weight": torch.arange(300_000.0), "step": 7}
IDLE = 3 << 13
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate for a writer."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def gated(gate: Gate, **options: Any) -> AsyncCheckpointer:
    """Make a checkpointer that writes when the gate says so."""
    return aiockpt.make_async_checkpointer(
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": gate.path},
        **options,
    )


@asynccontextmanager
async def keeper(
    made: AsyncCheckpointer | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncCheckpointer, Transport, Transport]]:
    """Give a checkpointer, a transport that its process serves for, and a receiver."""
    made = made or aiockpt.make_async_checkpointer()
    async with (
        made as checkpointer,
        transport(server=checkpointer.process, **options) as sender,
        transport() as receiver,
    ):
        yield checkpointer, sender, receiver


def server_of(sender: Transport) -> Any:
    """Return what keeps the server."""
    return sender._endpoint.shelf.process  # type: ignore[union-attr]


def pid_of(checkpointer: AsyncCheckpointer) -> int:
    """Return the id of the process."""
    pid = checkpointer.process.pid
    assert pid is not None
    return pid


def shelf_of(sender: Transport) -> Any:
    """Return what its server has on offer, as the transport knows it."""
    return sender._endpoint.shelf


def maps_of(pid: int) -> str:
    """Return what a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def sockets_of(pid: int) -> int:
    """Count the sockets of a process."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(each).startswith("socket:")
    return found


async def send_again_and_again(sender: aiockpt.HTTPTransport[Any]) -> None:
    """Send until it fails."""
    while True:
        await sender.send_checkpoint([1], 2, STATE)


@pytest.mark.asyncio
class TestConformance(Endings[Transport], Offers[Transport]):
    """What callers see is what they see of a server on the loop."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Serve from the checkpoint process for the first one, which is the sender."""
        async with AsyncExitStack() as stack:
            checkpointer = aiockpt.make_async_checkpointer()
            await stack.enter_async_context(checkpointer)
            servers = [checkpointer.process, *["loop"] * (count - 1)]
            yield [
                await stack.enter_async_context(transport(server=each))
                for each in servers
            ]


@pytest.mark.asyncio
class TestBoth:
    """One process writes and serves, and neither disturbs the other."""

    async def test_it_serves_while_it_writes(self, tmp_path: Path, gate: Gate) -> None:
        """A receiver gets everything while the writer stands still."""
        before = children()
        async with keeper(gated(gate)) as (checkpointer, sender, receiver):
            handle = await checkpointer.save(STATE, tmp_path / "step-1")
            await sender.send_checkpoint([1], 1, STATE)
            assert_same(await receive(sender, receiver), STATE)
            assert handle.error is None
            assert not (tmp_path / "step-1").exists()
            assert len(children() - before) == 1
            assert server_of(sender).pid == pid_of(checkpointer) != os.getpid()
            gate.open()
            assert await handle.written()
            assert_same(await receive(sender, receiver), STATE)
        assert_same(loaded(tmp_path / "step-1"), STATE)

    async def test_a_transport_that_closes_leaves_the_writer_alone(
        self, tmp_path: Path
    ) -> None:
        """And nothing of itself, neither sockets nor memory."""
        async with aiockpt.make_async_checkpointer() as checkpointer:
            await checkpointer.process.ready()
            pid, sockets = pid_of(checkpointer), sockets_of(pid_of(checkpointer))
            for step in (1, 2):
                async with (
                    transport(server=checkpointer.process) as sender,
                    transport() as receiver,
                ):
                    await sender.send_checkpoint([1], step, STATE)
                    assert_same(await receive(sender, receiver, step), STATE)
                await eventually(lambda: sockets_of(pid) <= sockets, "their end")
                assert "memfd:aiockpt" not in maps_of(pid)
            handle = await checkpointer.save(STATE, tmp_path / "step-1")
            assert await handle.written()
            assert (pid_of(checkpointer), checkpointer.process.restarts) == (pid, 0)

    async def test_what_the_writer_forks_keeps_no_port(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """Or who connects after the end of the server would wait for nothing."""
        note = tmp_path / "note"
        made = aiockpt.make_async_checkpointer(
            checkpoint_writer_init_fn=Forking,
            checkpoint_writer_init_args={"gate": gate.path, "note": str(note)},
        )
        try:
            async with keeper(made) as (checkpointer, sender, _):
                await sender.send_checkpoint([1], 1, STATE)
                handle = await checkpointer.save(STATE, tmp_path / "step-1")
                assert await handle.written()
                forked = int(note.read_text())
                assert listens(pid_of(checkpointer))
                await eventually(lambda: not listens(forked), "its letting go")
                assert is_running(forked)
        finally:
            gate.open()
        await eventually(lambda: not is_running(forked), "its end")

    async def test_it_serves_for_several(self) -> None:
        """Each at its own address, until each is closed."""
        async with keeper() as (checkpointer, sender, receiver):
            async with transport(server=checkpointer.process) as other:
                await sender.send_checkpoint([1], 1, STATE)
                await other.send_checkpoint([1], 2, {"other": 2})
                assert_same(await receive(other, receiver, 2), {"other": 2})
                assert server_of(other).pid == server_of(sender).pid
            assert_same(await receive(sender, receiver), STATE)

    async def test_events_and_records_happen_here(
        self, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """Those of the server; the counters come as well."""
        caplog.set_level(logging.INFO, logger="aiockpt.audit")
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        try:
            async with keeper() as (checkpointer, sender, receiver):
                await sender.send_checkpoint([1], 1, STATE)
                await receive(sender, receiver)
                handle = await checkpointer.save(STATE, tmp_path / "step-1")
                assert await handle.written()
                await eventually(
                    lambda: any(each.stop == "serve" for each in events), "the event"
                )
                await eventually(
                    lambda: sender.statistics().bytes_sent > 1_200_000, "the count"
                )
        finally:
            remove()
        assert "status=200" in caplog.text

    @pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only")
    async def test_it_lends_the_memory(self) -> None:
        """To the processes of this host; what is staged later lies elsewhere."""
        async with keeper(same_host=True) as (_, sender, receiver):
            await sender.send_checkpoint([1], 1, STATE)
            held = await receive(sender, receiver, share=True)
            await eventually(lambda: sender.statistics().lent == 1, "the count")
            for step in (2, 3):
                await sender.send_checkpoint([1], step, {"weight": torch.zeros(300)})
            assert_same(held, STATE)

    @pytest.mark.skipif(platform.machine() not in IOPRIO_GET, reason="no number known")
    async def test_it_serves_at_the_priority_of_a_server(self) -> None:
        """What the config asks for is the writer's alone."""
        config = CheckpointProcessConfig(io_idle=True)
        made = aiockpt.make_async_checkpointer(
            CheckpointerConfig(process_config=config)
        )
        async with made as checkpointer:
            await checkpointer.process.ready()
            before = priorities(pid_of(checkpointer))
            assert before[pid_of(checkpointer)] == IDLE
            async with transport(server=checkpointer.process) as sender:
                await sender.send_checkpoint([1], 1, STATE)
                after = priorities(pid_of(checkpointer))
        added = after.keys() - before.keys()
        assert added
        assert IDLE not in {after[each] for each in added}


def priorities(pid: int) -> dict[int, int]:
    """Return how the threads of a process use the disk."""
    get, libc = IOPRIO_GET[platform.machine()], ctypes.CDLL(None)
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {thread: libc.syscall(get, 1, thread) for thread in threads}


@pytest.mark.asyncio
class TestItsDeath:
    """A process that dies is replaced, and does again what it did."""

    @pytest.mark.allow_error_logs
    async def test_both_work_again(self, tmp_path: Path, gate: Gate) -> None:
        """What it was writing has failed; what it served is there at the same URL."""
        async with keeper(gated(gate)) as (checkpointer, sender, receiver):
            await sender.send_checkpoint([1], 1, STATE)
            url, before = sender.metadata(), pid_of(checkpointer)
            begun = await checkpointer.save(STATE, tmp_path / "step-1")
            await eventually(lambda: begun_in(checkpointer), "its begin")
            os.kill(before, signal.SIGKILL)
            assert_same(await receive(sender, receiver), STATE)
            with pytest.raises(WorkerError, match="signal 9"):
                await begun.written()
            gate.open()
            again = await checkpointer.save(STATE, tmp_path / "step-2")
            assert await again.written()
            assert server_of(sender).pid == pid_of(checkpointer) != before
            assert checkpointer.process.restarts == server_of(sender).restarts == 1
            assert sender.metadata() == url

    async def test_a_send_at_that_moment_is_not_lost(self) -> None:
        """Whenever in a send the process dies, the step is there afterwards."""
        async with keeper() as (checkpointer, sender, receiver):
            for step in range(1, 4):
                sending = asyncio.create_task(sender.send_checkpoint([1], step, STATE))
                for _ in range(step * step):
                    await asyncio.sleep(0)
                os.kill(pid_of(checkpointer), signal.SIGKILL)
                await sending
                assert_same(await receive(sender, receiver, step), STATE)

    async def test_one_that_is_told_to_end_is_replaced(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """It writes first what it has begun, and serves until then."""
        async with keeper(gated(gate)) as (checkpointer, sender, receiver):
            await sender.send_checkpoint([1], 1, STATE)
            begun = await checkpointer.save(STATE, tmp_path / "step-1")
            await eventually(lambda: begun_in(checkpointer), "its begin")
            before = pid_of(checkpointer)
            os.kill(before, signal.SIGTERM)
            assert_same(await receive(sender, receiver), STATE)
            gate.open()
            assert await begun.written()
            await eventually(lambda: not is_running(before), "its end")
            assert_same(await receive(sender, receiver), STATE)

    async def test_one_that_hangs_is_killed_by_a_retraction(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With what it writes: nothing else ends what it sends."""
        monkeypatch.setattr("aiockpt.http.apart.remote.PATIENCE", 0.5)
        async with keeper(grace=0.5) as (checkpointer, sender, receiver):
            await sender.send_checkpoint([1], 1, STATE)
            pid = pid_of(checkpointer)
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: stands_still(pid), "its stop")
            async with asyncio.timeout(20):
                await sender.disallow_checkpoint()
            assert "hangs" in caplog.text
            await eventually(
                lambda: 'transport that hung (with server="process"' in caplog.text,
                "the reason",
            )
            await sender.send_checkpoint([1], 2, STATE)
            assert_same(await receive(sender, receiver, 2), STATE)

    async def test_one_that_was_left_to_itself_and_hangs_is_killed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The checkpointer has gone, and the transport is left with it."""
        monkeypatch.setattr("aiockpt.http.apart.remote.PATIENCE", 0.5)
        config = CheckpointProcessConfig(
            keep_last_seconds=0.1, runtime_dir=f"{tmp_path}"
        )
        checkpointer = aiockpt.make_async_checkpointer(
            CheckpointerConfig(process_config=config)
        )
        async with transport(server=checkpointer.process, grace=0.5) as sender:
            await sender.send_checkpoint([1], 1, STATE)
            pid = pid_of(checkpointer)
            with pytest.raises(ZeroDivisionError):
                async with checkpointer:
                    raise ZeroDivisionError
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: stands_still(pid), "its stop")
            async with asyncio.timeout(20):
                await sender.disallow_checkpoint()
            await eventually(lambda: not is_running(pid), "its end")
            async with asyncio.timeout(20):  # it may hear of that a moment later
                with pytest.raises(aiockpt.ClosedError, match="has to outlive"):
                    await send_again_and_again(sender)
        reaped(pid)

    async def test_no_port_is_left_of_one_that_hangs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The transport closes all the same, and its peers are refused."""
        monkeypatch.setattr("aiockpt.http.apart.hosting.ENDING", 0.2)
        async with aiockpt.make_async_checkpointer() as checkpointer:
            sender = transport(server=checkpointer.process)
            await sender.start()
            port, pid = port_of(sender), pid_of(checkpointer)
            os.kill(pid, signal.SIGSTOP)
            try:
                await eventually(lambda: stands_still(pid), "its stop")
                await sender.shutdown()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), timeout=20)
            finally:
                os.kill(pid, signal.SIGCONT)


def stands_still(pid: int) -> bool:
    """Tell whether every thread of a process is stopped: one may be late."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def begun_in(checkpointer: AsyncCheckpointer) -> bool:
    """Tell whether a save is being written."""
    return any(each.begun for each in checkpointer._under_way)


@pytest.mark.asyncio
class TestTheEnd:
    """Whoever closes first, the other one is told."""

    async def test_a_checkpointer_that_closes_first_ends_the_serving(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The transport says why, and what to do; it still receives and closes."""
        checkpointer = aiockpt.make_async_checkpointer()
        async with (
            transport(reconnect_timeout=0) as source,
            transport(server=checkpointer.process) as sender,
        ):
            await sender.send_checkpoint([1], 1, STATE)
            handle = await checkpointer.save(STATE, tmp_path / "step-1")
            assert await checkpointer.close() == ()
            assert await handle.written()
            await eventually(lambda: "outlive" in caplog.text, "the warning")
            for _ in range(2):
                with pytest.raises(aiockpt.ClosedError, match="has to outlive"):
                    await sender.send_checkpoint([1], 2, STATE)
            assert sender.statistics().step is None
            assert not shelf_of(sender)._given
            with pytest.raises(aiockpt.ClosedError, match="has to outlive"):
                await sender.allow_checkpoint(2)
            with pytest.raises(aiockpt.PeerUnreachableError):
                await receive(sender, source, 1)
            await sender.disallow_checkpoint()
            await source.send_checkpoint([1], 3, STATE)
            assert_same(await receive(source, sender, 3), STATE)

    async def test_a_process_that_is_left_to_itself_serves_on(
        self, tmp_path: Path
    ) -> None:
        """As after this one's death, until the transport closes."""
        config = CheckpointProcessConfig(
            keep_last_seconds=0.1, runtime_dir=f"{tmp_path}"
        )
        checkpointer = aiockpt.make_async_checkpointer(
            CheckpointerConfig(process_config=config)
        )
        async with (
            transport(server=checkpointer.process) as sender,
            transport() as receiver,
        ):
            await sender.send_checkpoint([1], 1, STATE)
            pid = pid_of(checkpointer)
            with pytest.raises(ZeroDivisionError):
                async with checkpointer:
                    raise ZeroDivisionError
            await sender.send_checkpoint([1], 2, STATE)
            assert_same(await receive(sender, receiver, 2), STATE)
        await eventually(lambda: not is_running(pid), "its end")
        reaped(pid)

    async def test_both_close_at_once(self) -> None:
        """Neither waits for the other one."""
        checkpointer = aiockpt.make_async_checkpointer()
        sender = transport(server=checkpointer.process)
        await sender.send_checkpoint([1], 1, STATE)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(checkpointer.close())
            group.create_task(sender.shutdown())

    async def test_a_transport_may_end_while_it_starts(self, gate: Gate) -> None:
        """It does not wait for an init function that takes its time."""
        from checkpointing import pass_gate

        checkpointer = aiockpt.make_async_checkpointer(
            subprocess_init_fn=pass_gate, subprocess_init_args=(gate.path,)
        )
        sender = transport(server=checkpointer.process)
        starting = asyncio.create_task(sender.start())
        await eventually(lambda: server_of(sender)._starting, "the start")
        async with asyncio.timeout(20):
            await sender.shutdown()
        with pytest.raises(aiockpt.ClosedError):
            await starting
        gate.open()
        await checkpointer.close()

    @pytest.mark.allow_error_logs
    async def test_an_init_function_that_fails_is_told(self) -> None:
        """By the call that needs the server."""
        checkpointer = aiockpt.make_async_checkpointer(subprocess_init_fn=refuse)
        sender = transport(server=checkpointer.process)
        with pytest.raises(WorkerError, match="no such environment"):
            await sender.start()
        await sender.shutdown()
        await checkpointer.close()

    @pytest.mark.allow_error_logs
    async def test_an_init_function_that_fails_is_called_once(
        self, tmp_path: Path
    ) -> None:
        """For one call; and that tells everything that is known."""
        told = tmp_path / "told"
        checkpointer = aiockpt.make_async_checkpointer(
            subprocess_init_fn=refuse_and_tell, subprocess_init_args=(str(told),)
        )
        sender = transport(server=checkpointer.process)
        for times in (1, 2):
            with pytest.raises(WorkerError, match="no such environment") as caught:
                await sender.start()
            assert "LookupError" in caught.value.remote_traceback
            assert isinstance(caught.value.__cause__, WorkerError)
            assert len(told.read_text().split()) == times
        await sender.shutdown()
        await checkpointer.close()

    @pytest.mark.allow_error_logs
    async def test_another_try_may_help(self, tmp_path: Path) -> None:
        """At the same address, which peers may know already."""
        checkpointer = aiockpt.make_async_checkpointer(
            subprocess_init_fn=refuse_once, subprocess_init_args=(f"{tmp_path}/told",)
        )
        sender = transport(server=checkpointer.process)
        with pytest.raises(WorkerError, match="no such environment"):
            await sender.send_checkpoint([1], 1, STATE)
        url = sender.metadata()
        await sender.send_checkpoint([1], 2, STATE)
        assert sender.metadata() == url
        async with transport() as receiver:
            assert_same(await receive(sender, receiver, 2), STATE)
        await sender.shutdown()
        await checkpointer.close()

    async def test_a_thread_cannot_serve(self) -> None:
        """Nor can whatever else there is; the error says what can."""
        config = CheckpointerConfig(use_process=False)
        async with aiockpt.make_async_checkpointer(config) as checkpointer:
            with pytest.raises(aiockpt.LocalProtocolError, match="use_process=True"):
                _ = checkpointer.process
            with pytest.raises(ValueError, match="the process of an AsyncCheckpointer"):
                transport(server=checkpointer)


def test_whose_loop_it_is_is_told(tmp_path: Path) -> None:
    """It is the transport's, if that was used first: who saves elsewhere hears that."""
    process = CheckpointProcess(RankInfo(0, 1))

    async def serve() -> None:
        async with transport(server=process) as sender:
            await sender.start()

    with asyncio.Runner() as first, asyncio.Runner() as other:
        first.run(serve())
        with pytest.raises(aiockpt.LocalProtocolError, match="on which a transport"):
            other.run(process.write(STATE, tmp_path / "step-1"))
        first.run(process.close())


TRAINER = """
import asyncio, json, sys, torch, aiockpt
from aiockpt import CheckpointerConfig, CheckpointProcessConfig
from checkpointing import GatedWriter
async def main(place, keep_last, config):
    config = CheckpointProcessConfig(**json.loads(config))
    checkpointer = aiockpt.make_async_checkpointer(
        CheckpointerConfig(process_config=config),
        checkpoint_writer_init_fn=GatedWriter,
        checkpoint_writer_init_args={"gate": f"{place}/gate"},
    )
    sender = aiockpt.HTTPTransport(
        host="127.0.0.1", server=checkpointer.process, keep_last=float(keep_last)
    )
    state = {"weight": torch.arange(300_000.0), "step": 7}
    await sender.send_checkpoint([1], 1, state)
    await checkpointer.save(state, f"{place}/step-1")
    print(sender.metadata(), checkpointer.process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def killed_trainer(
    place: Path, keep_last: float, **config: Any
) -> Iterator[tuple[str, int]]:
    """Kill a trainer that serves and saves; give its metadata, and its process's id."""
    said, pid = place / "said", 0
    paths = f"{ENVIRONMENT['PYTHONPATH']}:{SUPPORT}"
    with said.open("wb") as out:  # its process would keep a pipe open
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, place, f"{keep_last}", json.dumps(config)],
            env=ENVIRONMENT | {"PYTHONPATH": paths},
            stdout=out,
        )
    try:
        wait_until(lambda: said.read_text().endswith("\n"), "the last word")
        metadata, number = said.read_text().split()
        pid = int(number)
        trainer.kill()
        trainer.wait()
        yield metadata, pid
    finally:
        trainer.kill()
        trainer.wait()
        with suppress(OSError):
            if pid:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not pid or not is_running(pid), "the process's end")


@pytest.mark.asyncio
class TestTheTrainersDeath:
    """The process ends with its last user."""

    async def test_a_successor_gets_both(self, tmp_path: Path, gate: Gate) -> None:
        """What was offered, from the same URL, and what was handed over, written."""
        with killed_trainer(tmp_path, 60.0) as (metadata, pid):
            async with transport() as successor:
                got = await successor.recv_checkpoint(0, metadata, 1)
                assert_same(got, STATE)
                gate.open()
                commit = tmp_path / "step-1" / "commit.json"
                await eventually(commit.exists, "the write")
                got = await successor.recv_checkpoint(0, metadata, 1)
                assert_same(got, STATE)
            assert_same(loaded(tmp_path / "step-1"), STATE)
            assert is_running(pid)
            os.kill(pid, signal.SIGTERM)
            await eventually(lambda: not is_running(pid), "its end")

    @pytest.mark.parametrize("keep_last", [0, 0.2])
    async def test_the_writing_may_end_last(
        self, tmp_path: Path, gate: Gate, keep_last: float
    ) -> None:
        """Nothing is served any more, and the process is there until it has written."""
        with killed_trainer(tmp_path, keep_last) as (_, pid):
            await eventually(lambda: not listens(pid), "the end of the server")
            assert is_running(pid)
            gate.open()
            await eventually(lambda: not is_running(pid), "its end")
            assert_same(loaded(tmp_path / "step-1"), STATE)

    async def test_a_writer_that_hangs_does_not_make_it_deaf(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """It is given up, and what is served ends when it is told to."""
        with killed_trainer(tmp_path, 60.0, write_timeout_secs=2.0) as (_, pid):
            await eventually(lambda: has_let_go(pid), "its patience")
            assert listens(pid)
            os.kill(pid, signal.SIGTERM)
            await eventually(lambda: not is_running(pid), "its end")

    async def test_a_writer_that_ends_after_all_is_not_given_up(
        self, tmp_path: Path, gate: Gate
    ) -> None:
        """What is kept is there still when nothing is served any more."""
        config = {
            "write_timeout_secs": 2.0,
            "keep_last_seconds": 60.0,
            "runtime_dir": f"{tmp_path}",
        }
        commit = tmp_path / "step-1" / "commit.json"
        with killed_trainer(tmp_path, 3.0, **config) as (metadata, pid):
            async with transport() as successor, asyncio.timeout(60):
                while not commit.exists():
                    if has_let_go(pid):
                        gate.open()
                    await successor.recv_checkpoint(0, metadata, 1)
            await eventually(lambda: not listens(pid), "the end of the server")
            found = await aiockpt.recover(tmp_path, runtime_dir=f"{tmp_path}")
            assert_same(found.state_dict, STATE)
            await eventually(lambda: not is_running(pid), "its end")


def has_let_go(pid: int) -> bool:
    """Tell whether a process has let go of its trainer's output."""
    return os.readlink(f"/proc/{pid}/fd/1") == os.devnull


def listens(pid: int) -> bool:
    """Tell whether a process has a TCP socket that listens."""
    listening = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening.add(fields[9])
    held = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.update(re.findall(r"socket:\[(\d+)\]", os.readlink(each)))
    return bool(listening & held)


class TestForwarding:
    """Only what the serving thread tells goes to the trainer."""

    def test_records_and_events_of_other_threads_stay(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each is told once: here, or there."""
        said: list[Happened | Logged] = []
        ours, logger = TransferEvent(stop="serve"), logging.getLogger("aiockpt")
        forwarding = Forwarding(said.append, hosted=True)
        level = logger.level
        try:
            forwarding.start({"aiockpt": logging.INFO})
            logger.warning("of the server: %d", 1)
            emit(ours)
            other = threading.Thread(target=logger.warning, args=("of the writer",))
            other.start()
            other.join()
        finally:
            forwarding.stop()
            logger.setLevel(level)
        assert said == [
            Logged("aiockpt", logging.WARNING, "of the server: 1"),
            Happened(ours),
        ]
        assert caplog.messages == ["of the writer"]

    def test_levels_are_the_trainers_for_what_is_its_own(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What others log is as it was, meanwhile and afterwards."""
        caplog.set_level(logging.WARNING, logger="aiockpt")
        caplog.handler.setLevel(logging.NOTSET)
        said: list[Happened | Logged] = []
        logger = logging.getLogger("aiockpt")
        quiet, loud = [Forwarding(said.append, hosted=True) for _ in range(2)]

        def elsewhere() -> None:
            logger.info("the writer's, as never")
            logger.warning("the writer's, as ever")

        def prepare() -> None:
            loud.take(threading.get_ident())
            logger.info("prepared")

        def serve() -> None:
            loud = Forwarding(said.append, hosted=True)
            loud.start({"aiockpt": logging.INFO})
            logger.info("the other server's")
            logger.debug("too much of it")
            in_a_thread(elsewhere)
            loud.stop()

        quiet.start({"aiockpt": logging.ERROR})
        logger.warning("too much")
        logger.error("of the server")
        in_a_thread(serve)
        loud.start({"aiockpt": logging.DEBUG})
        quiet.stop()
        in_a_thread(elsewhere)
        in_a_thread(prepare)
        loud.stop()
        assert logger.level == logging.WARNING
        assert [each.text for each in said if isinstance(each, Logged)] == [
            "of the server",
            "the other server's",
            "prepared",
        ]
        assert caplog.messages == ["the writer's, as ever"] * 2


def in_a_thread(told: Callable[[], None]) -> None:
    """Do it there, and wait."""
    thread = threading.Thread(target=told)
    thread.start()
    thread.join()
