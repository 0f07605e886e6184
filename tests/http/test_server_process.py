"""`HTTPTransport(server=Server(process=True))` serves from a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import aiockpt
from aiockpt import HTTPTransport, StepNotFoundError, TransferEvent
from aiockpt.errors import LocalProtocolError, UnsupportedLeafError
from aiockpt.events import add_hook
from aiockpt.http import setup
from aiockpt.testing import assert_same, interruptions
from aiockpt.testing.conformance import Endings, Offers
from tests.support.proofs import proves
from tests.support.terminals import FROM_A_TERMINAL, ignored
from tests.support.transports import Transport, receive, transport

STATE = {"weight": torch.arange(300_000.0), "step": 7}


def apart(**options: Any) -> Transport:
    """Make a transport that serves from a process of its own."""
    return transport(process=True, **options)


def process_of(sender: Transport) -> Any:
    """Return what keeps the process that serves."""
    return sender._store


async def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): success",
    by="test_a_new_step_takes_the_place_of_the_old",
)
@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): success",
    by="test_a_receive_that_comes_first_waits",
)
@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): the other one dies",
    by="test_a_receiver_that_leaves_disturbs_nobody",
)
@pytest.mark.asyncio
class TestConformance(Endings[Transport], Offers[Transport]):
    """What callers see is what they see of a server on the loop."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Serve apart from the first one, which is the sender."""
        async with AsyncExitStack() as stack:
            kinds = [apart, *[transport] * (count - 1)]
            yield [await stack.enter_async_context(make()) for make in kinds]


@pytest.mark.asyncio
class TestServing:
    """It serves what was staged, and knows when it is not needed any more."""

    async def test_the_bytes_come_from_another_process(self) -> None:
        """Whose parent is this one, and which has no torch."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            assert_same(await receive(sender, receiver), STATE)
            pid = process_of(sender).pid
            mapped = maps_of(pid)
            assert pid != os.getpid()
            assert "memfd:aiockpt" in mapped
            assert "libtorch" not in mapped

    async def test_no_terminal_stops_or_ends_it(self) -> None:
        """It is in the background of the trainer's, and says something now and then."""
        async with apart() as sender:
            assert ignored(process_of(sender).pid) >= FROM_A_TERMINAL

    @pytest.mark.parametrize("nice", [0, 7])
    async def test_it_is_as_nice_as_it_is_told(self, nice: int) -> None:
        """In this session, in which alone that counts, and in a group of its own."""
        async with apart(nice=nice) as sender:
            pid = process_of(sender).pid
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            expected = min(mine + nice, 19)
            assert os.getpriority(os.PRIO_PROCESS, pid) == expected
            threads = map(int, os.listdir(f"/proc/{pid}/task"))
            found = {os.getpriority(os.PRIO_PROCESS, each) for each in threads}
            assert found == {mine, expected}  # who prepares is waited for
            assert os.getsid(pid) == os.getsid(0)
            assert os.getpgid(pid) == pid

    async def test_it_answers_while_the_trainers_loop_does_not(self) -> None:
        """A receiver in a process of its own is served while the loop is blocked."""
        async with apart() as sender:
            await sender.send_checkpoint([1], 1, STATE)
            done = subprocess.run(  # noqa: ASYNC221 - it blocks the loop on purpose
                [sys.executable, "-c", FETCH, sender.metadata()],
                capture_output=True,
                text=True,
                check=False,
                timeout=50,
            )
            assert done.stdout.strip() == "300000", done.stderr

    async def test_memory_is_reused_once_nobody_reads_it(self) -> None:
        """And given back after a retraction."""
        async with apart() as sender, transport() as receiver:
            store: Any = sender._store
            seen = set()
            for step in range(1, 7):
                await sender.send_checkpoint([1], step, STATE)
                assert_same(await receive(sender, receiver, step), STATE)
                [*_, current] = store._given.values()
                seen.add(current.arena.address)
                await until(lambda: len(store._given) == 1)
            assert len(seen) <= 3
            await sender.disallow_checkpoint()
            assert not store._given

    @proves("cell HTTPTransport.send_checkpoint, Server(process=True): success")
    async def test_a_slow_reader_keeps_the_old_one(self) -> None:
        """A superseded snapshot is not overwritten under its reader."""
        async with apart() as sender, transport(stall_timeout=30) as receiver:
            old = {"weight": torch.ones(4 << 20)}
            await sender.send_checkpoint([1], 1, old)
            started = asyncio.Event()

            def progress(now: aiockpt.Progress) -> None:
                if now.chunks_done:
                    started.set()

            task = asyncio.create_task(receive(sender, receiver, progress=progress))
            await started.wait()
            for step in (2, 3, 4):
                new = {"weight": torch.full((4 << 20,), float(step))}
                await sender.send_checkpoint([1], step, new)
            # Or it came too late for the rest, and was told so.
            with suppress(aiockpt.errors.UnavailableError):
                assert_same(await task, old)

    async def test_statistics_come_from_there(self) -> None:
        """A moment later."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 4, STATE)
            assert sender.statistics().step == 4
            await receive(sender, receiver, 4)
            await until(lambda: sender.statistics().bytes_sent > 1_200_000)
            assert sender.statistics().requests >= 2

    async def test_events_and_audit_records_happen_here(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Hooks run in the trainer, and each record is logged once."""
        caplog.set_level(logging.INFO, logger="aiockpt.audit")
        caplog.set_level(logging.DEBUG, logger="aiockpt")
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        try:
            async with apart() as sender, transport() as receiver:
                await sender.send_checkpoint([1], 1, STATE)
                await receive(sender, receiver)
                await until(lambda: [e for e in events if e.stop == "serve"])
        finally:
            remove()
        [audited, *_] = [r for r in caplog.records if r.name == "aiockpt.audit"]
        assert audited.args is not None
        assert "status=200" in audited.getMessage()
        served = [r for r in caplog.records if r.getMessage().startswith("serve ")]
        assert len(served) == len([e for e in events if e.stop == "serve"])

    @proves("cell HTTPTransport.send_checkpoint, Server(process=True): error")
    async def test_a_failed_send_is_told(self) -> None:
        """To who waits for it, at once."""
        async with apart() as sender, transport() as receiver:
            waiting = asyncio.create_task(receive(sender, receiver, 3))
            await asyncio.sleep(0.2)
            with pytest.raises(UnsupportedLeafError):
                await sender.send_checkpoint([1], 3, {"bad": object()})
            with pytest.raises(
                aiockpt.errors.PeerFailedError, match="UnsupportedLeafError"
            ):
                await waiting

    @proves("cell HTTPTransport.send_checkpoint, Server(process=True): cancel")
    async def test_a_cancel_at_any_await_leaves_one_offer(self) -> None:
        """The old one; and the memory of the new one comes back."""
        async with apart() as sender, transport() as receiver:
            store: Any = sender._store
            await sender.send_checkpoint([1], 1, STATE)
            new = {"weight": torch.ones(1000)}
            async for cut in interruptions(lambda: sender.send_checkpoint([1], 2, new)):
                assert cut.cancelled is cut.reached, cut
                if cut.cancelled:
                    assert_same(await receive(sender, receiver), STATE)
                await until(lambda: len(store._given) == 1)
            assert_same(await receive(sender, receiver, 2), new)
            await sender.allow_checkpoint(3)
            assert_same(await receive(sender, receiver, 3), new)


@pytest.mark.asyncio
class TestItsDeath:
    """A process that dies is replaced; what was offered is offered again."""

    async def test_another_one_serves_the_same(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """At the same address, while peers that connect meanwhile wait."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            os.kill(process_of(sender).pid, signal.SIGKILL)
            assert_same(await receive(sender, receiver), STATE)
            assert process_of(sender).restarts == 1
            assert "exit code -9" in caplog.text

    async def test_one_that_is_told_to_end_is_replaced_too(self) -> None:
        """It says that it serves nothing any more; the next one does."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            os.kill(process_of(sender).pid, signal.SIGTERM)
            await until(lambda: process_of(sender).restarts == 1)
            assert_same(await receive(sender, receiver), STATE)

    async def test_what_was_retracted_stays_so(self) -> None:
        """The next process does not offer it."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            os.kill(process_of(sender).pid, signal.SIGKILL)
            await sender.disallow_checkpoint()
            await until(lambda: process_of(sender).restarts == 1)
            with pytest.raises(aiockpt.errors.TransferTimeoutError):
                await receive(sender, receiver, timeout=1.0)
            await sender.send_checkpoint([1], 1, STATE)
            assert_same(await receive(sender, receiver), STATE)

    @proves(
        "cell HTTPTransport.send_checkpoint, Server(process=True): the other one dies"
    )
    async def test_a_send_at_that_moment_is_not_lost(self) -> None:
        """Whenever in a send the process dies, the step is there afterwards."""
        async with apart() as sender, transport() as receiver:
            for step in range(1, 6):
                pid = process_of(sender).pid
                sending = asyncio.create_task(sender.send_checkpoint([1], step, STATE))
                for _ in range(step * step):
                    await asyncio.sleep(0)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                await sending
                assert_same(await receive(sender, receiver, step), STATE)

    async def test_one_that_hangs_is_killed_by_a_retraction(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Training is not held up by more than the grace and a little."""
        async with apart(grace=0.5) as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            os.kill(process_of(sender).pid, signal.SIGSTOP)
            async with asyncio.timeout(20):
                await sender.disallow_checkpoint()
            assert "does not answer" in caplog.text
            await sender.send_checkpoint([1], 2, STATE)
            assert_same(await receive(sender, receiver, 2), STATE)

    @pytest.mark.allow_error_logs
    async def test_one_that_cannot_start_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the call that needs it."""
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        sender = apart()
        with pytest.raises(
            aiockpt.errors.WorkerError, match="no server process can be started"
        ):
            await sender.start()
        with pytest.raises(aiockpt.errors.WorkerError, match="exit code 1"):
            await sender.send_checkpoint([1], 1, STATE)
        await sender.shutdown()

    @pytest.mark.allow_error_logs
    async def test_a_later_call_tries_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the address that the metadata names already."""
        async with transport() as receiver:
            sender = apart()
            metadata = sender.metadata()
            with monkeypatch.context() as broken:
                broken.setattr(sys, "executable", shutil.which("false"))
                with pytest.raises(aiockpt.errors.WorkerError, match="exit code 1"):
                    await sender.start()
            await sender.send_checkpoint([1], 1, STATE)
            assert sender.metadata() == metadata
            assert_same(await receive(sender, receiver), STATE)
            await sender.shutdown()


FETCH = """
import asyncio, sys, aiockpt
async def main():
    server = aiockpt.Server(host="127.0.0.1")
    async with aiockpt.HTTPTransport(server=server) as receiver:
        state = await receiver.recv_checkpoint(0, sys.argv[1], 1, timeout=30)
        print(state["weight"].numel())
asyncio.run(main())
"""

TRAINER = """
import asyncio, sys, torch, aiockpt
async def main():
    server = aiockpt.Server(
        host="127.0.0.1", process=True, keep_last=float(sys.argv[1])
    )
    transport = aiockpt.HTTPTransport(server=server)
    await transport.send_checkpoint([1], 1, {"weight": torch.arange(300_000.0)})
    process = transport._store
    print(transport.metadata(), process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Tell whether a process runs, and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] != "Z"


def maps_of(pid: int) -> str:
    """Return what a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


@contextmanager
def forked() -> Iterator[None]:
    """Have a forked child, as of a data loader, that does nothing."""
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@asynccontextmanager
async def trainer(keep_last: float) -> AsyncIterator[tuple[Any, str, int]]:
    """Run a trainer that offers step 1; give it, its metadata and its server's id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        TRAINER,
        str(keep_last),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(50):
            metadata, pid = (await process.stdout.readline()).decode().split()
        yield process, metadata, int(pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        process._transport.close()  # type: ignore[attr-defined]


@pytest.mark.asyncio
class TestTheTrainersDeath:
    """The process ends with its trainer, or keeps the last checkpoint for a while."""

    @proves(
        "cell HTTPTransport.send_checkpoint, Server(process=True): this process dies"
    )
    async def test_it_ends_too(self) -> None:
        """Without keep_last, whatever the trainer was doing."""
        async with trainer(0) as (process, _, pid):
            process.kill()
            await process.wait()
            await until(lambda: not alive(pid))

    async def test_a_successor_gets_the_last_checkpoint(self) -> None:
        """From the same URL."""
        async with trainer(60.0) as (process, metadata, pid):
            process.kill()
            await process.wait()
            async with transport() as successor:
                state = await successor.recv_checkpoint(0, metadata, 1)
            assert_same(state, {"weight": torch.arange(300_000.0)})
            os.kill(pid, signal.SIGTERM)
            await until(lambda: not alive(pid))

    @proves(
        "cell HTTPTransport.send_checkpoint, Server(process=True): this process dies"
    )
    async def test_it_does_not_stay_for_ever(self) -> None:
        """It ends when nobody has asked for ``keep_last`` seconds."""
        async with trainer(0.2) as (process, _, pid):
            process.kill()
            await process.wait()
            await until(lambda: not alive(pid))

    async def test_a_forked_child_does_not_keep_it(self) -> None:
        """The trainer's death counts, not that of all who have its sockets."""
        async with apart() as sender:
            server = process_of(sender).pid
            with forked():
                await sender.shutdown()
                await until(lambda: not alive(server))


@pytest.mark.asyncio
class TestOptions:
    """What does not go together is refused when the transport is made."""

    @pytest.mark.parametrize(
        ("options", "error", "reason"),
        [
            ({"keep_last": 1.0}, LocalProtocolError, "needs process"),
            ({"process": True, "keep_last": -1.0}, ValueError, "at least 0"),
            ({"process": True, "zero_copy": True}, LocalProtocolError, "zero_copy"),
            (
                {"process": True, "ssl_context": ssl.create_default_context()},
                LocalProtocolError,
                "ssl_context",
            ),
        ],
    )
    async def test_it_is_refused(
        self, options: dict[str, Any], error: type[Exception], reason: str
    ) -> None:
        """With the remedy."""
        with pytest.raises(error, match=reason):
            transport(**options)

    async def test_it_cannot_be_mounted(self) -> None:
        """Handlers run in the application's process."""
        async with apart() as sender:
            with pytest.raises(LocalProtocolError, match="process=True"):
                setup(web.Application(), sender)

    async def test_the_address_is_there_before_the_process(self) -> None:
        """As ever, and nothing is left of a transport that was never started."""
        sender: HTTPTransport[Any] = apart()
        assert sender.metadata().startswith("http://127.0.0.1:")
        assert process_of(sender).pid is None
        await sender.shutdown()
        with pytest.raises(aiockpt.errors.ClosedError):
            await sender.send_checkpoint([1], 1, STATE)

    async def test_renaming_serves_the_same_memory(self) -> None:
        """`allow_checkpoint` stages nothing."""
        async with apart() as sender, transport() as receiver:
            await sender.send_checkpoint([1], 1, STATE)
            await sender.allow_checkpoint(2)
            assert_same(await receive(sender, receiver, 2), STATE)
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, 1, timeout=5)
