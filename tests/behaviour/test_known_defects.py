"""Defects that checkpoint transports are known for, one test for each."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from contextlib import suppress

import pytest
import torch

from aiockpt import (
    AiockptError,
    TransportError,
)
from aiockpt.testing import (
    Drip,
    assert_same,
)
from tests.support.memory import resident
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.transports import (
    MIB,
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
    weights,
)

pytestmark = pytest.mark.asyncio
PROMPT = 30.0
"""Seconds that a busy machine may take for what should be at once."""


async def wire_bytes(state: object) -> int:
    """Return how many bytes the transfer of a state dict takes."""
    async with pair(state=state) as (sender, receiver), proxied(sender) as proxy:
        got = await receiver.recv_checkpoint(0, through(proxy, sender), 1)
        assert_same(got, state)
        return proxy.statistics().bytes_down


class TestWire:
    """No byte more than needed, however the work is divided."""

    @pytest.mark.parametrize(("theirs", "ours"), [(1, 4), (8, 3)])
    async def test_the_two_ends_need_not_agree_on_chunks(
        self, theirs: int, ours: int
    ) -> None:
        """The grid is the sender's, the number of connections the receiver's."""
        async with (
            transport(connections=theirs) as sender,
            transport(connections=ours, chunk_bytes=1 << 20) as receiver,
        ):
            await sender.send_checkpoint([], 1, weights(count=7))
            assert_same(await receive(sender, receiver), weights(count=7))

    async def test_a_tied_weight_travels_once(self) -> None:
        """The receiver ties the weights again."""
        weight = torch.ones(MIB // 4)
        assert await wire_bytes({"in": weight, "out": weight}) < 1.1 * MIB

    async def test_a_small_slice_travels_alone(self) -> None:
        """A slice travels without the storage that it is cut from."""
        large = torch.zeros(16 * MIB // 4)
        slices = [large[n * 100_000 :][:10] for n in range(8)]
        columns = large.view(1024, -1)[:, ::512]
        assert await wire_bytes([*slices, columns]) < 100_000


class TestMemory:
    """A transport keeps only the memory that it needs."""

    @pytest.mark.parametrize("zero_copy", [False, True])
    async def test_nothing_is_kept_after_disallow(self, zero_copy: bool) -> None:
        """Neither the state dict nor its copy: it may be as large as the model."""
        gc.collect()
        before = resident("VmRSS")
        state = weights(mib=64)
        gone = weakref.ref(state["w0"])
        async with pair(zero_copy=zero_copy) as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            del state
            gc.collect()
            assert zero_copy or gone() is None
            await receive(sender, receiver)
            await sender.disallow_checkpoint()
            gc.collect()
            await settle(lambda: resident("VmRSS") - before < 32 * MIB)
            assert gone() is None

    async def test_nothing_is_kept_of_a_receive(self) -> None:
        """The memory goes with the state dict that was received."""
        async with pair(state=weights()) as (sender, receiver):
            got = await receive(sender, receiver)
            gone = weakref.ref(got["w0"].untyped_storage())
            del got
            gc.collect()
            assert gone() is None


class TestPeers:
    """Slow, dead, many and early peers are served or given up."""

    async def test_a_slow_reader_that_progresses_is_served_to_the_end(self) -> None:
        """The stall timeout is no budget for the whole transfer."""
        async with (
            transport(stall_timeout=2) as sender,
            transport(connections=1) as receiver,
        ):
            await sender.send_checkpoint([], 1, weights(mib=3))
            drip = Drip(rate=1e6, burst=50_000)
            async with proxied(sender, otherwise=drip) as proxy:
                url = through(proxy, sender)
                assert_same(await receiver.recv_checkpoint(0, url, 1), weights(mib=3))

    async def test_waiting_peers_cost_no_threads(self) -> None:
        """Any number of requests for a later step takes no thread."""
        async with transport(insecure=True) as sender:
            before = threading.active_count()
            peers = [Peer(port_of(sender), token=None) for _ in range(100)]
            for peer in peers:
                await peer.__aenter__()
                await peer.request("/checkpoint/1/metadata", Prefer="wait=10")
            await asyncio.sleep(0.05)
            assert threading.active_count() <= before
            for peer in peers:
                peer.close()

    async def test_readers_without_a_gap_do_not_starve_disallow(self) -> None:
        """`disallow_checkpoint` ends, and the server works for later receivers."""
        async with pair(state=weights(mib=8), grace=1) as (sender, receiver):

            async def read_on() -> None:
                with suppress(AiockptError):
                    while True:
                        await receive(sender, receiver, timeout=2)

            readers = [asyncio.create_task(read_on()) for _ in range(3)]
            await asyncio.sleep(0.05)
            async with asyncio.timeout(PROMPT):
                await sender.disallow_checkpoint()
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            await sender.send_checkpoint([], 2, weights(2.0))
            assert_same(await receive(sender, receiver, 2), weights(2.0))


class TestShutdown:
    """Nothing goes on after `shutdown`."""

    @proves("cell HTTPTransport.shutdown: success")
    @proves("invariant 6")
    @pytest.mark.parametrize("wait", [False, True])
    async def test_nobody_listens_afterwards(self, wait: bool) -> None:
        """A connect is refused at once, instead of hanging in a backlog."""
        sender = transport(insecure=True)
        await sender.send_checkpoint([], 1, weights())
        port = port_of(sender)
        async with asyncio.timeout(PROMPT):
            await sender.shutdown(wait=wait)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)

    async def test_nothing_is_served_after_shutdown_without_wait(self) -> None:
        """An open connection gets no answer any more, either."""
        sender = transport(insecure=True)
        await sender.send_checkpoint([], 1, weights())
        async with Peer(port_of(sender), token=None) as peer:
            assert (await peer.ask("/checkpoint/1/metadata")).status == 200
            await sender.shutdown(wait=False)
            assert await peer.read_all() == b""

    async def test_a_receive_ends_when_the_sender_shuts_down(self) -> None:
        """It does not wait for its deadline if the caller wants none of that."""
        sender = transport()
        async with transport(reconnect_timeout=0) as receiver:
            waiting = asyncio.create_task(receive(sender, receiver, timeout=90))
            await sender.start()
            await asyncio.sleep(0.05)
            await sender.shutdown(wait=False)
            async with asyncio.timeout(PROMPT):
                with pytest.raises(TransportError):
                    await waiting
