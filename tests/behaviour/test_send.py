"""`HTTPTransport` as a sender: its start and end, what it offers, and what it tells."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import torch

from aiockpt import AuthenticationError, StepNotFoundError, TransferEvent, add_hook
from aiockpt.errors import (
    ClosedError,
    LocalProtocolError,
    PeerFailedError,
    UnsupportedLeafError,
)
from aiockpt.testing import assert_same
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import Peer, certified, settle
from tests.support.states import Copies
from tests.support.transports import (
    MIB,
    Gate,
    pair,
    port_of,
    receive,
    transport,
    weights,
)
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.asyncio

LARGE = weights(mib=16)  # more than the kernel buffers for a reader that does not read


@pytest.fixture
def events():
    """Return what happens."""
    found: list[TransferEvent] = []
    remove = add_hook(found.append)
    yield found
    remove()


@pytest.fixture
def copies(monkeypatch):
    """Return what stops each staging of 1 MiB after 10 of its 16 chunks."""
    made = Copies(monkeypatch, after=MIB * 10 // 16)
    yield made
    made.go()


def sending(sender, step=1, state=None, **options):
    """Start to send."""
    state = weights() if state is None else state
    return asyncio.create_task(sender.send_checkpoint([1], step, state, **options))


def held_up(sender, step, monkeypatch):
    """Let staging wait in its thread, before a function of the stager."""
    gate, original = Gate(), getattr(sender._stager, step)

    def wait_first(*args):
        gate()
        return original(*args)

    monkeypatch.setattr(sender._stager, step, wait_first)
    return gate


def arena_of(sender):
    """Return the memory of what is offered."""
    return sender._store.published.arena


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

    async def test_nothing_is_found_until_it_is_published(self, copies):
        """A receiver waits and gets no byte; a plain request is answered 404."""
        async with pair() as (sender, receiver):
            token = sender._credentials.token
            async with Peer(port_of(sender), token=token) as peer:
                send = sending(sender)
                early = asyncio.create_task(receive(sender, receiver))
                await settle(lambda: copies.waiting and sender.statistics().waiting)
                sent = sender.statistics().bytes_sent
                for what in ("metadata", "full", "0"):
                    path = f"/checkpoint/1/{what}"
                    assert (await peer.ask(path, Prefer="wait=0")).status == 404
                assert sent == 0
                copies.go()
                await send
                assert_same(await early, weights())
                assert (await peer.ask("/checkpoint/1/metadata")).status == 200

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


class TestWithdrawal:
    """``disallow_checkpoint`` while something is about to be offered."""

    @pytest.mark.parametrize("moment", ["begun", "_describe", "_plan", "staged"])
    async def test_it_wins_over_a_send_that_it_does_not_wait_for(
        self, moment, monkeypatch, copies
    ):
        """Nothing is offered, and the sender is told; a receiver waits for the next."""
        async with pair() as (sender, receiver):
            early = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting)
            gate = held_up(sender, moment, monkeypatch) if moment[0] == "_" else None
            sends = [sending(sender), sending(sender)]  # one waits for the other
            if gate is not None:
                await gate.entered.wait()
            elif moment == "staged":
                await settle(lambda: copies.waiting)
            else:
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await sender.disallow_checkpoint()
            assert not any(send.done() for send in sends)
            if gate is not None:
                gate.go.set()
            copies.go()
            for send in sends:
                with pytest.raises(StepNotFoundError) as caught:
                    await send
                assert "retracted" in caught.value.__notes__[0]
            assert "step=None" in repr(sender)
            assert not early.done()
            await sending(sender)
            assert_same(await early, weights())

    async def test_it_wins_over_a_renaming(self):
        """The renaming keeps its memory while it works."""
        async with transport() as sender:
            await sender.send_checkpoint([], 1, weights())
            gates = [Gate() for _ in range(sender.statistics().threads.threads)]
            for gate in gates:  # all threads are busy
                sender._bridge.post(gate)
                await gate.entered.wait()
            rename = asyncio.create_task(sender.allow_checkpoint(2))
            await asyncio.sleep(0.01)
            await sender.disallow_checkpoint()
            for gate in gates:
                gate.go.set()
            with pytest.raises(StepNotFoundError):
                await rename
            assert "step=None" in repr(sender)


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
        nbytes, late, memory = 4 << 20, 128 << 10, set()
        # Earlier versions sent pages to a peer that said so.
        fields = {"Aiockpt_Verifies": "chunks"} if verifies else {}
        async with transport(stall_timeout=60, insecure=True) as sender:
            await sender.send_checkpoint([1], 0, weights(1.0, mib=4))
            memory.add(id(arena_of(sender)))
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
                    memory.add(id(arena_of(sender)))
                read += await peer.read_some(nbytes - len(read))
        body = torch.frombuffer(bytearray(read), dtype=torch.float32)
        assert torch.equal(body, weights(1.0, mib=4)["w0"])
        assert len(memory) <= 2, "memory was not used again"

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

    async def test_nothing_is_copied(self):
        """What changes before the receive is noticed by its digest, at the latest."""
        live = weights()
        async with pair(zero_copy=True) as (sender, receiver):
            await sender.send_checkpoint([], 1, live)
            assert_same(await receive(sender, receiver), weights())
            await sender.disallow_checkpoint()
            live["w0"].zero_()
            await sender.send_checkpoint([], 2, live)
            assert_same(await receive(sender, receiver, step=2), weights(0.0))

    @proves("invariant 5")
    @pytest.mark.parametrize("by", ["a retraction", "a new send"])
    async def test_readers_are_evicted_before_disallow_returns(self, by):
        """A peer that hangs neither holds training up nor sees the next step."""
        live = weights(mib=16)
        async with transport(zero_copy=True, grace=0.1, insecure=True) as sender:
            await sender.send_checkpoint([], 1, live)
            async with slow_reader(sender) as peer, asyncio.timeout(5):
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

    async def test_the_loop_goes_on(self):
        """Posted work, as unmapping gigabytes is, ends in its thread."""
        sender, go = transport(), threading.Event()
        await sender.send_checkpoint([], 1, weights())
        for _ in range(4):
            sender._bridge.post(go.wait, 30)
        shutdown = asyncio.create_task(sender.shutdown())
        for _ in range(50):  # a loop that stands still would never get through
            await asyncio.sleep(0.001)
        assert not shutdown.done()
        go.set()
        await shutdown

    async def test_a_second_one_waits_for_the_first(self):
        """Unless it says ``wait=False``, which cuts the grace of the first."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(time.sleep, 0.05)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0)
        await sender.shutdown()
        await asyncio.sleep(0)
        assert first.done()
        sender = transport(grace=60, insecure=True)
        await sender.send_checkpoint([], 1, LARGE)
        async with slow_reader(sender):
            first = asyncio.create_task(sender.shutdown())
            await asyncio.sleep(0.05)
            assert not first.done()
            async with asyncio.timeout(5):
                await sender.shutdown(wait=False)
                await first

    @proves(
        "cell HTTPTransport.shutdown: timeout", "cell HTTPTransport.shutdown: cancel"
    )
    async def test_a_cancelled_one_goes_on(self):
        """A cancelled shutdown leaves nothing half closed."""
        sender = transport()
        await sender.send_checkpoint([], 1, weights())
        sender._bridge.post(time.sleep, 0.05)
        first = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await sender.shutdown()

    @pytest.mark.parametrize("step", ["_describe", "_plan"])
    async def test_calls_under_way_fail(self, step, monkeypatch):
        """The calls fail, and the arena is unmapped when `shutdown` returns."""
        sender = transport()
        gate = held_up(sender, step, monkeypatch)
        send = sending(sender)
        await gate.entered.wait()
        shutdown = asyncio.create_task(sender.shutdown())
        await asyncio.sleep(0.01)
        assert not shutdown.done()
        gate.go.set()
        await shutdown
        with pytest.raises(ClosedError):
            await send
        assert sender._stager._pool.free == []

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

    async def test_one_that_never_started_has_nothing_to_shut_down(self):
        """A transport that only told its address has nothing to shut down, either."""
        await transport().shutdown()
        sender = transport()
        sender.metadata()
        await sender.shutdown()


@contextmanager
def forked():
    """Fork a child, which lives until the end of the block."""
    ready, done = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(ready[1], b"!")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        yield
    finally:
        os.write(done[1], b"!")
        os.waitpid(pid, 0)
        for end in (*ready, *done):
            os.close(end)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
async def test_a_fork_does_not_disturb_the_parent():
    """Its connections carry the next receive; the child does not keep its port."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, weights())
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
