"""`HTTPTransport(server=Server(process=True))` serves from a process of its own.

Once more it lends the trainer's memory to the processes of its host.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web

from aiockpt import (
    StepNotFoundError,
    make_async_checkpointer,
)
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    TransferTimeoutError,
    WorkerError,
)
from aiockpt.http import setup
from aiockpt.testing import assert_same, interruptions
from tests.support.memory import arenas, mapped
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.shortages import exhausted_fds
from tests.support.transports import (
    MIB,
    in_the_middle,
    port_of,
    receive,
    told,
    transport,
    weights,
)
from tests.support.waiting import (
    OF_TRAINER,
    forked,
    has_torch,
    ignored,
    is_running,
    maps,
    servers_of,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

STATE = weights(1.0)


def apart(**options):
    """Make a transport that serves from a process of its own."""
    return transport(process=True, **options)


@asynccontextmanager
async def pair(*, state=None, step=1, **options):
    """Make a sender whose process serves, which may offer a state, and a receiver."""
    async with apart(**options) as sender, transport() as receiver:
        if state is not None:
            await sender.send_checkpoint([1], step, state)
        yield sender, receiver


def pid_of(sender) -> int:
    """Return the process that serves."""
    (pid,) = servers_of(port_of(sender))
    return pid


async def kill(sender, number=signal.SIGKILL):
    """End the process that serves, and wait for its end."""
    async with told() as events:
        os.kill(pid_of(sender), number)
        await settle(lambda: of_kind("restart", events), patience=60)


def of_kind(stop, events):
    """Return the events of one kind."""
    return [each for each in events if each.stop == stop]


class TestServing:
    """It serves what was staged, and knows when it is not needed any more."""

    async def test_it_is_a_process_without_torch(self, fresh_interpreters):
        """The process has its niceness and its own group, and ignores terminals."""
        nice = 7
        async with pair(state=STATE, nice=nice) as (sender, receiver):
            assert_same(await receive(sender, receiver), STATE)
            pid = pid_of(sender)
            assert maps(pid, "memfd:aiockpt")
            assert not has_torch(pid)
            assert ignored(pid) >= OF_TRAINER
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            threads = map(int, os.listdir(f"/proc/{pid}/task"))
            found = {os.getpriority(os.PRIO_PROCESS, each) for each in threads}
            assert found == {mine, min(mine + nice, 19)}  # it waits for no nice thread
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(mine + nice, 19)
            assert os.getsid(pid) == os.getsid(0)  # in which alone niceness counts
            assert os.getpgid(pid) == pid

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prlimit")
    async def test_it_raises_its_own_limit_of_descriptors_only(self, tmp_path):
        """The caller's limit stays, whatever the caller does with the package."""
        kind = resource.RLIMIT_NOFILE
        before = resource.getrlimit(kind)
        raised = min(before[1], 65_536)
        if raised <= 400:
            pytest.skip("the hard limit is too low")
        resource.setrlimit(kind, (400, before[1]))
        try:
            async with pair(state=STATE) as (sender, receiver):
                assert_same(await receive(sender, receiver), STATE)
                assert resource.prlimit(pid_of(sender), kind)[0] == raised
                async with make_async_checkpointer() as checkpointer:
                    saved = await checkpointer.save(STATE, tmp_path / "step-2")
                    await saved.written()
            assert resource.getrlimit(kind) == (400, before[1])
        finally:
            resource.setrlimit(kind, before)

    async def test_it_answers_while_the_trainers_loop_does_not(self):
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
            assert done.stdout.strip() == "262144", done.stderr

    async def test_memory_is_reused_once_nobody_reads_it(self):
        """A superseded snapshot is not overwritten; a retraction gives it back."""
        async with pair() as (sender, receiver):
            before, used = arenas(), set[str]()
            for step in range(1, 7):
                await sender.send_checkpoint([1], step, STATE)
                assert_same(await receive(sender, receiver, step), STATE)
                await settle(lambda: sender.statistics().superseded == 0)
                used |= arenas() - before
            assert 1 <= len(used) <= 3
            await sender.disallow_checkpoint()
            await settle(lambda: len(arenas() - before) <= 1)  # one is kept

    @proves("cell HTTPTransport.send_checkpoint, Server(process=True): success")
    async def test_a_slow_reader_keeps_the_old_one(self):
        """Its snapshot is not overwritten under it."""
        async with pair(state=weights(1.0, mib=8)) as (sender, receiver):

            async def send_on():
                for step in (2, 3, 4):
                    await sender.send_checkpoint([1], step, weights(step, mib=8))

            task, _ = await in_the_middle(
                lambda halfway: receive(sender, receiver, progress=halfway), send_on
            )
            assert_same(await task, weights(1.0, mib=8))

    async def test_figures_events_and_audit_records_are_the_trainers(
        self, events, caplog
    ):
        """Hooks run in the trainer, and each record is logged once."""
        caplog.set_level(logging.INFO, logger="aiockpt.audit")
        caplog.set_level(logging.DEBUG, logger="aiockpt")
        async with pair(state=STATE, step=4) as (sender, receiver):
            assert sender.statistics().step == 4
            await receive(sender, receiver, 4)
            await settle(lambda: sender.statistics().bytes_sent > 1 << 20)
            assert sender.statistics().requests >= 2
            await settle(lambda: of_kind("serve", events))
        [audited, *_] = [r for r in caplog.records if r.name == "aiockpt.audit"]
        assert "status=200" in audited.getMessage()
        served = [r for r in caplog.records if r.getMessage().startswith("serve ")]
        assert len(served) == len(of_kind("serve", events))

    @proves("cell HTTPTransport.send_checkpoint, Server(process=True): cancel")
    async def test_a_cancel_at_any_await_leaves_one_offer(self):
        """The old one; and the memory of the new one comes back."""
        async with pair() as (sender, receiver):
            new = {"weight": torch.ones(1000)}
            await sender.send_checkpoint([1], 1, STATE)
            async for cut in interruptions(lambda: sender.send_checkpoint([1], 2, new)):
                assert cut.cancelled is cut.reached, cut
                if cut.cancelled:
                    assert_same(await receive(sender, receiver), STATE)
            await settle(lambda: mapped() < 4 * MIB)
            assert_same(await receive(sender, receiver, 2), new)
            await sender.allow_checkpoint(3)  # which stages nothing
            assert_same(await receive(sender, receiver, 3), new)
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, 2, timeout=5)


class TestItsDeath:
    """A process that dies is replaced; what was offered is offered again."""

    async def test_one_that_hangs_at_the_shutdown_is_not_replaced(self, events):
        """It is killed, which is told once; no other one is tried."""
        async with apart(grace=0.1) as sender:
            await sender.send_checkpoint([], 1, STATE)
            server = pid_of(sender)
            os.kill(server, signal.SIGSTOP)
        assert not is_running(server)
        (ended,) = of_kind("restart", events)
        assert ended.detail == "the server process has ended: exit code -9"
        assert ended.level == logging.WARNING
        with pytest.raises(ClosedError):
            await sender.send_checkpoint([], 2, STATE)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    async def test_another_one_serves_the_same(self, number, caplog, events):
        """A new process serves at the same address, and new peers wait for it."""
        async with pair(state=STATE) as (sender, receiver):
            os.kill(pid_of(sender), number)
            if number == signal.SIGTERM:  # until then it serves
                await settle(lambda: of_kind("restart", events), patience=60)
            assert_same(await receive(sender, receiver), STATE)
            [ended] = of_kind("restart", events)
            code = -9 if number == signal.SIGKILL else 0
            assert ended.detail == f"the server process has ended: exit code {code}"
            assert (ended.step, ended.level) == (1, logging.WARNING)
            assert ended.detail in caplog.text

    async def test_the_counters_go_on(self):
        """What a dead process has counted is not counted again, and not lost."""
        large = weights(mib=16)  # more than the kernel buffers for a reader
        async with apart(insecure=True, grace=0.01) as sender:
            await sender.send_checkpoint([], 1, large)
            async with Peer(port_of(sender), token=None, receive_buffer=4096) as peer:
                await peer.request("/checkpoint/1/full")
                await peer.head()
                await settle(lambda: sender.statistics().readers == 1)
                await sender.disallow_checkpoint()
                await settle(lambda: sender.statistics().evicted == 1)
            await settle(lambda: not sender.statistics().readers)
            before = sender.statistics()
            assert before.bytes_sent
            await kill(sender)
            now = sender.statistics()
            for name in ("bytes_sent", "requests", "evicted", "gone", "readers"):
                assert getattr(now, name) == getattr(before, name)

    async def test_what_was_retracted_stays_so(self):
        """The next process does not offer it."""
        async with pair(state=STATE) as (sender, receiver):
            os.kill(pid_of(sender), signal.SIGKILL)
            await sender.disallow_checkpoint()
            with pytest.raises(TransferTimeoutError):
                await receive(sender, receiver, timeout=0.3)
            await sender.send_checkpoint([1], 1, STATE)
            assert_same(await receive(sender, receiver), STATE)

    @proves(
        "cell HTTPTransport.send_checkpoint, Server(process=True): the other one dies"
    )
    async def test_a_send_at_that_moment_is_not_lost(self):
        """Whenever in a send the process dies, the step is there afterwards."""
        async with pair() as (sender, receiver):
            for step in range(1, 6):
                serving = servers_of(port_of(sender))
                sending = asyncio.create_task(sender.send_checkpoint([1], step, STATE))
                for _ in range(step * step):
                    await asyncio.sleep(0)
                for pid in serving:
                    os.kill(pid, signal.SIGKILL)
                await sending
                assert_same(await receive(sender, receiver, step), STATE)

    @pytest.mark.allow_error_logs
    async def test_one_that_cannot_start_is_an_error(
        self, monkeypatch, fresh_interpreters
    ):
        """The call that needs it raises; a later call works at the same address."""
        sender = apart()
        metadata = sender.metadata()
        try:
            lacks = pytest.raises(WorkerError, match="Too many open")
            with exhausted_fds(left=0), lacks:
                await sender.start()
            with monkeypatch.context() as broken:
                broken.setattr(sys, "executable", shutil.which("false"))
                with pytest.raises(WorkerError, match="exit code 1"):
                    await sender.start()
                with pytest.raises(WorkerError, match="no server process can be"):
                    await sender.send_checkpoint([1], 1, STATE)
            async with transport() as receiver:
                await sender.send_checkpoint([1], 1, STATE)
                assert sender.metadata() == metadata
                assert_same(await receive(sender, receiver), STATE)
        finally:
            await sender.shutdown()


FETCH = """
import asyncio, sys
from tests.support.transports import transport
async def main():
    async with transport() as receiver:
        state = await receiver.recv_checkpoint(0, sys.argv[1], 1, timeout=30)
        print(state["w0"].numel())
asyncio.run(main())
"""

TRAINER = """
import asyncio, sys
from tests.support.transports import transport, weights
async def main():
    sender = transport(process=True, keep_last=float(sys.argv[1]))
    await sender.send_checkpoint([1], 1, weights(1.0))
    print(sender.metadata(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class TestTheTrainersDeath:
    """The process ends with its trainer, or keeps the last checkpoint for a while."""

    @proves(
        "cell HTTPTransport.send_checkpoint, Server(process=True): this process dies"
    )
    @pytest.mark.parametrize("keep_last", [0.0, 0.2, 60.0])
    async def test_it_ends_too(self, keep_last):
        """The process ends with the trainer, or after ``keep_last`` idle seconds.

        Until then the restarted trainer gets the last checkpoint from the same URL.
        """
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TRAINER, str(keep_last)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert trainer.stdout is not None
        try:
            async with asyncio.timeout(50):
                metadata = (await trainer.stdout.readline()).decode().strip()
            port = urlsplit(metadata).port
            assert port is not None
            (pid,) = servers_of(port) - {trainer.pid}
        finally:
            trainer.kill()
            await trainer.communicate()
        if keep_last > 1:
            async with transport() as successor:
                state = await successor.recv_checkpoint(0, metadata, 1)
                with pytest.raises(PeerFailedError, match="the trainer has ended"):
                    await successor.fingerprint(metadata, 1)
            assert_same(state, STATE)
            os.kill(pid, signal.SIGTERM)
        await settle(lambda: not is_running(pid), patience=60)

    async def test_a_forked_child_does_not_keep_it(self):
        """The trainer's death counts, not that of all who have its sockets."""
        async with apart() as sender:
            await sender.start()
            server = pid_of(sender)
            with forked():
                await sender.shutdown()
                await settle(lambda: not is_running(server), patience=60)


class TestOptions:
    """The constructor refuses options that exclude each other."""

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
    async def test_it_is_refused(self, options, error, reason):
        """The error says what to do instead."""
        with pytest.raises(error, match=reason):
            transport(**options)

    async def test_it_cannot_be_mounted(self):
        """Mounted handlers run in the application's process, so it is refused."""
        async with apart() as sender:
            with pytest.raises(LocalProtocolError, match="process=True"):
                setup(web.Application(), sender)

    async def test_the_address_is_there_before_the_process(self):
        """A transport that never starts leaves nothing behind."""
        sender = apart()
        assert sender.metadata().startswith("http://127.0.0.1:")
        assert not servers_of(port_of(sender))
        await sender.shutdown()
        with pytest.raises(ClosedError):
            await sender.send_checkpoint([1], 1, STATE)

    async def test_times_without_end_are_taken(self):
        """The process accepts infinite times, as a server on the loop does."""
        names = ("timeout", "stall_timeout", "keep_last")
        async with pair(**dict.fromkeys(names, math.inf)) as (sender, receiver):
            await sender.send_checkpoint([], 1, STATE, timeout=60)
            assert_same(await receive(sender, receiver), STATE)


async def send_often(sender, held):
    """Send other states; what is held stays what it was."""
    for step in range(2, 5):
        await sender.send_checkpoint([1], step, weights(float(step)))
        assert_same(held, STATE)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is lent on Linux only")
class TestLending:
    """The server process lends the trainer's memory."""

    async def test_the_memory_is_shared_and_stays(self, events):
        """No byte came over HTTP; later sends go to other memory, to the last."""
        async with pair(state=STATE, same_host=True) as (sender, receiver):
            held = await receive(sender, receiver, share=True)
            assert_same(held, STATE)
            assert of_kind("recv", events)[-1].medium == "shared memory"
            await settle(lambda: sender.statistics().lent == 1)
            assert sender.statistics().requests == 1  # the manifest
            await settle(
                lambda: "shared memory" in {e.medium for e in of_kind("serve", events)}
            )
            await send_often(sender, held)
            await sender.disallow_checkpoint()
            assert_same(held, STATE)
        assert_same(held, STATE)

    async def test_what_was_copied_is_used_again(self):
        """It is given back to the process, and by that to the trainer."""
        used = set[str]()
        async with pair(same_host=True) as (sender, receiver):
            for step in range(8):
                state, into = weights(float(step)), weights(-1.0)
                await sender.send_checkpoint([1], step, state)
                assert_same(await receive(sender, receiver, step, into=into), state)
                await settle(lambda: sender.statistics().superseded == 0)
                used |= arenas()
            assert len(used) <= 4

    async def test_a_process_that_dies_may_have_lent_it(self):
        """It had no time to say so: nothing is staged there any more."""
        async with pair(state=STATE, same_host=True) as (sender, receiver):
            held = await receive(sender, receiver, share=True)
            await kill(sender)
            await send_often(sender, held)
            await sender.send_checkpoint([1], 9, weights(9.0))
            assert_same(await receive(sender, receiver, 9, share=True), weights(9.0))

    @pytest.mark.parametrize("what", ["death", "retraction", "cancel"])
    async def test_a_copy_under_way_is_not_disturbed(self, what):
        """A retraction waits for nobody that has it; a cancel frees the receiver."""
        state = weights(1.0, mib=8)
        async with pair(state=state, same_host=True, grace=60) as (sender, receiver):
            held = await receive(sender, receiver, share=True)

            async def act():
                if what == "death":
                    await kill(sender)
                    await sender.send_checkpoint([1], 2, weights(2.0, mib=8))
                elif what == "retraction":
                    await sender.disallow_checkpoint()

            task, _ = await in_the_middle(
                lambda halfway: receive(sender, receiver, progress=halfway), act
            )
            if what == "cancel":
                task.cancel()
                await asyncio.wait({task})
                assert_same(await receive(sender, receiver), state)
            else:
                assert_same(await task, state)
            assert_same(held, state)
