"""`HTTPTransport` as a sender: its start and end, what it offers, and what it tells."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import torch

from aiockpt import AuthenticationError, StepNotFoundError
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    UnsupportedLeafError,
)
from aiockpt.testing import assert_same
from tests.support.memory import arenas
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import Peer, certified, settle
from tests.support.transports import (
    MIB,
    pair,
    port_of,
    receive,
    transport,
    weights,
)
from tests.support.waiting import PATIENCE, forked

pytestmark = pytest.mark.asyncio

LARGE = weights(mib=16)  # more than the kernel buffers for a reader that does not read


def sending(sender, step=1, state=None, **options):
    """Start to send."""
    state = weights() if state is None else state
    return asyncio.create_task(sender.send_checkpoint([1], step, state, **options))


@asynccontextmanager
async def slow_reader(sender, step=1, **headers):
    """Give a reader that has the head of a body, and reads no more."""
    async with Peer(port_of(sender), token=None, receive_buffer=4096) as peer:
        await peer.request(f"/checkpoint/{step}/full", **headers)
        await peer.head()
        yield peer


class TestStart:
    """The server starts with its first use."""

    @proves("cell HTTPTransport.start: timeout", "cell HTTPTransport.start: cancel")
    @pytest.mark.parametrize("turns", range(5))
    async def test_a_cancelled_start_keeps_the_address(self, turns):
        """Peers were told it already, and wait there for a start that succeeds."""
        sender = transport()
        metadata = sender.metadata()
        start = asyncio.create_task(sender.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait({start})
        async with transport() as receiver:
            early = asyncio.create_task(receiver.recv_checkpoint(0, metadata, 1))
            await sender.send_checkpoint([], 1, weights())
            assert_same(await early, weights())
            assert sender.metadata() == metadata
        await sender.shutdown()

    @proves("cell HTTPTransport.start: success")
    async def test_calls_that_begin_together_start_it_once(self):
        """The second one does not go on before somebody serves."""
        async with transport(reconnect_timeout=0) as receiver:
            sender = transport()
            await asyncio.gather(*(sending(sender) for _ in range(3)), sender.start())
            assert_same(await receive(sender, receiver), weights())
            await sender.shutdown()

    async def test_a_mount_gives_the_socket_back(self):
        """Nobody would ever accept on it; a transport that serves is not mounted."""
        port = free_port()
        sender = transport(advertise="here.example", port=port)
        assert port_of(sender) == port
        sender.mount("/checkpoint")
        async with transport(port=port) as other:
            with pytest.raises(LocalProtocolError, match="mount"):
                other.mount("/checkpoint")
        with pytest.raises(LocalProtocolError, match="advertise"):
            sender.metadata()
        await sender.shutdown()


class TestStaging:
    """A step that is still being staged is not there yet, for any kind of receiver."""

    async def test_a_receiver_that_waits_is_told_why_nothing_comes(self):
        """The error names the leaf, and the previous step stays published."""
        async with pair() as (sender, receiver):
            waiting = asyncio.ensure_future(receive(sender, receiver, 2, timeout=60))
            await settle(lambda: sender.statistics().waiting)
            await sender.send_checkpoint([1], 1, weights())
            with pytest.raises(UnsupportedLeafError):
                await sender.send_checkpoint([1], 2, {"bad": object()})
            with pytest.raises(PeerFailedError, match="bad is a object"):
                await waiting
            assert_same(await receive(sender, receiver, 1), weights())
            await sender.send_checkpoint([1], 2, weights())
            assert_same(await receive(sender, receiver, 2), weights())


class TestOffers:
    """A transport publishes a copy under a step."""

    @proves("cell HTTPTransport.allow_checkpoint: success")
    async def test_it_is_offered_under_the_new_step(self):
        """The transport publishes the staged copy again, if there is one."""
        async with pair() as (sender, receiver):
            with pytest.raises(StepNotFoundError):
                await sender.allow_checkpoint(1)
            await sender.send_checkpoint([], 1, weights())
            for step in (2, 2, 5):
                await sender.allow_checkpoint(step)
                assert_same(await receive(sender, receiver, step), weights())
            with pytest.raises(StepNotFoundError):
                await receive(sender, receiver, 1)
            await sender.disallow_checkpoint()
            with pytest.raises(StepNotFoundError):
                await sender.allow_checkpoint(1)

    @pytest.mark.parametrize("process", [False, True], ids=["loop", "process"])
    async def test_tensors_that_did_not_change_are_a_warning(
        self, process, caplog, events
    ):
        """A send warns if a later step has the same tensors."""

        def state(step, fill=1.0):
            return {"step": step, "weight": torch.full((1000,), fill)}

        async with transport(process=process) as sender:
            for step in (1, 1, 2):
                await sender.send_checkpoint([1], step, state(step))
            await sender.disallow_checkpoint()
            await sender.send_checkpoint([1], 3, state(3))
            await sender.send_checkpoint([1], 4, state(4, fill=2.0))
            for step in (5, 6):
                await sender.send_checkpoint([1], step, {"step": 1})
        told = [each for each in events if each.stop == "publish"]
        assert [each.unchanged for each in told] == [False, *[True] * 3, *[False] * 3]
        warned = [each.step for each in told if each.level == logging.WARNING]
        assert warned == [2, 3]
        lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        for line, steps in zip(lines, [(2, 1), (3, 2)], strict=True):
            assert all(f"step {step}" in line for step in steps)

    @proves("threat T8")
    @pytest.mark.parametrize("verifies", [False, True], ids=["curl", "verifies"])
    async def test_what_a_slow_local_reader_was_sent_never_changes(self, verifies):
        """It reads late, when others have been staged into the same memory."""
        nbytes, late, used = 4 << 20, 128 << 10, set[str]()
        # Earlier versions sent pages to a peer that said so.
        fields = {"Aiockpt_Verifies": "chunks"} if verifies else {}
        options = {"stall_timeout": 60, "insecure": True, "same_host": True}
        async with transport(**options) as sender:
            await sender.send_checkpoint([1], 0, weights(1.0, mib=4))
            async with Peer(port_of(sender), token=None) as peer:
                size = len((await peer.ask("/checkpoint/0/metadata")).body)
                await peer.request(
                    "/checkpoint/0/full", Range=f"bytes={size}-", **fields
                )
                await settle(lambda: sender.statistics().readers)
                await peer.head()
                read = b""
                while sender.statistics().readers:  # until the kernel has the rest
                    assert len(read) < nbytes - late, "the sender still has some"
                    read += await peer.read(64 << 10)
                    await asyncio.sleep(0.01)
                for step in range(1, 6):
                    await sender.send_checkpoint([1], step, weights(1.0 + step, mib=4))
                    used |= arenas()
                assert len(used) <= 2, "memory was not used again"
                read += await peer.read_some(nbytes - len(read))
        body = torch.frombuffer(bytearray(read), dtype=torch.float32)
        assert torch.equal(body, weights(1.0, mib=4)["w0"])

    async def test_statistics_events_and_repr_say_what_is_going_on(self, events):
        """They are right from the first request until after the end."""
        async with pair() as (sender, receiver):
            assert sender.statistics().step is None
            await sender.send_checkpoint([], 7, weights())
            assert repr(sender) == "<HTTPTransport step=7 readers=0>"
            await receive(sender, receiver, 7)
            await settle(lambda: not sender.statistics().readers)
            with pytest.raises(AuthenticationError):
                await receiver.recv_checkpoint(0, sender.address(), 7)
            now = sender.statistics()
            assert (now.step, now.refused, now.gone, now.evicted) == (7, 1, 0, 0)
            assert now.bytes_sent > MIB
            assert now.requests >= 3
            assert now.threads[1:] == (0, 0, 0)
            assert now.threads.threads >= 2
            assert receiver.statistics().requests == 0
            await settle(lambda: any(each.stop == "serve" for each in events))
            await sender.disallow_checkpoint()
        assert sender.statistics().requests == now.requests
        assert sender.statistics().step is None
        told = {each.stop: each for each in events if each.stop != "serve"}
        assert list(told) == ["publish", "recv", "retract"]
        assert {each.step for each in events} == {7}
        assert told["recv"].nbytes == told["publish"].nbytes == MIB
        assert told["publish"].seconds > 0

    async def test_statistics_show_who_reads_and_who_waits(self):
        """A reader of an old step is one, too, until it is evicted."""
        async with transport(insecure=True) as sender:
            await sender.send_checkpoint([], 1, LARGE)
            async with slow_reader(sender), Peer(port_of(sender), token=None) as early:
                await early.request("/checkpoint/3/full", Prefer="wait=30")
                await settle(lambda: sender.statistics().waiting == 1)
                assert sender.statistics().superseded == 0
                await sender.send_checkpoint([], 2, weights())
                now = sender.statistics()
                assert (now.step, now.readers, now.superseded) == (2, 1, 1)
                assert now.oldest_reader > 0
                await sender.shutdown(wait=False)
                assert sender.statistics().evicted == 1
                assert sender.statistics().readers == 0


class TestZeroCopy:
    """Live memory is served under a lock."""

    @proves("invariant 5")
    @pytest.mark.parametrize("by", ["a retraction", "a new send"])
    async def test_readers_are_evicted_before_disallow_returns(self, by):
        """A peer that hangs neither holds training up nor sees the next step."""
        live = weights(mib=16)
        options = {"zero_copy": True, "grace": 0.1, "stall_timeout": 600}
        async with transport(insecure=True, **options) as sender:
            await sender.send_checkpoint([], 1, live)
            async with slow_reader(sender) as peer, asyncio.timeout(60):
                if by == "a retraction":
                    await sender.disallow_checkpoint()
                else:
                    await sender.send_checkpoint([], 2, weights())
                live["w0"].fill_(7)
                rest = await peer.read_all()
            assert len(rest) < 16 * MIB
            assert torch.tensor(7.0).numpy().tobytes() * 2 not in rest


class TestShutdown:
    """`shutdown` ends the transport once."""

    async def test_a_second_one_need_not_wait(self):
        """With ``wait=False``, it cuts the grace of the first."""
        sender = transport(grace=600, stall_timeout=600, insecure=True)
        await sender.send_checkpoint([], 1, LARGE)
        async with slow_reader(sender):
            first = asyncio.create_task(sender.shutdown())
            await asyncio.sleep(0.05)
            assert not first.done()
            async with asyncio.timeout(60):
                await sender.shutdown(wait=False)
                await first

    @pytest.mark.parametrize("advertise", [None, "http://proxy.example/checkpoint"])
    async def test_nothing_works_after_it(self, advertise):
        """Every call says why; only stopping again is no mistake."""
        sender = transport(advertise=advertise)
        await sender.send_checkpoint([], 1, weights())
        await sender.shutdown()
        for call in (
            sender.start(),
            sender.send_checkpoint([], 1, weights()),
            sender.allow_checkpoint(1),
            sender.recv_checkpoint(0, "http://127.0.0.1:1/checkpoint/", 1),
        ):
            with pytest.raises(ClosedError):
                await call
        for function in (sender.metadata, sender.address, lambda: sender.mount("/x")):
            with pytest.raises(ClosedError):
                function()
        await sender.disallow_checkpoint()
        await sender.shutdown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
async def test_a_fork_does_not_disturb_the_parent():
    """Its connections carry the next receive; the child does not keep its port."""
    async with pair(state=weights()) as (sender, receiver):
        assert_same(await receive(sender, receiver), weights())
        with forked():
            await sender.send_checkpoint([1], 2, weights(2.0))
            assert_same(await receive(sender, receiver, 2), weights(2.0))
            port = port_of(sender)
            await sender.shutdown()
            with socket.socket() as peer:
                assert peer.connect_ex(("127.0.0.1", port))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
async def test_a_forked_child_keeps_no_connection_that_is_being_opened():
    """Here: one whose TLS handshake has not ended."""
    server, _ = certified()
    sender = transport(ssl_context=server)
    await sender.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(sender))
    await asyncio.sleep(0.2)  # it has been accepted
    with forked():
        await sender.shutdown()
        async with asyncio.timeout(PATIENCE):
            with suppress(ConnectionError):
                assert await reader.read() == b""
    writer.close()
