"""`HTTPTransport.fingerprint`: what a sender computes when somebody asks first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from aiohttp import web
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial

import aiockpt
from aiockpt import AuthenticationError, Fingerprint, StepNotFoundError, http_transport
from aiockpt.errors import (
    FingerprintMismatchError,
    PeerFailedError,
    PeerUnreachableError,
    RemoteProtocolError,
    StorageError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
    UnsupportedLeafError,
)
from aiockpt.http.protocol import format_metadata
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import Peer, settle
from tests.support.transports import pair, port_of, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

STATE = {**weights(mib=2.0, count=4), "b": torch.arange(7.0).bfloat16(), "step": 3}


class Slow:
    """Makes each computation wait until it may go on, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.count = self.running = self.most = 0
        self._lock = threading.Lock()
        module: Any = http_transport
        compute = module.fingerprint_of_snapshot

        def slowly(*args: Any, **options: Any) -> bytes:
            with self._lock:
                self.count += 1
                self.running += 1
                self.most = max(self.most, self.running)
            self.began.set()
            try:
                assert self.go_on.wait(20)
                return compute(*args, **options)
            finally:
                with self._lock:
                    self.running -= 1

        monkeypatch.setattr(module, "fingerprint_of_snapshot", slowly)

    async def has_begun(self) -> None:
        """Wait until a thread computes."""
        await settle(self.began.is_set)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes computations wait."""
    found = Slow(monkeypatch)
    yield found
    found.go_on.set()


async def ask(sender: Any, receiver: Any, step: int | None = 1, **options: Any) -> Any:
    """Ask for a fingerprint."""
    return await receiver.fingerprint(sender.metadata(), step, **options)


@proves("cell HTTPTransport.fingerprint: success")
@pytest.mark.parametrize(
    "options", [{}, {"zero_copy": True}, {"process": True}], ids=str
)
async def test_it_is_that_of_the_state(options: dict[str, Any]) -> None:
    """A receiver that got the state can prove it."""
    async with transport(**options) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        received = await receiver.recv_checkpoint(metadata=sender.metadata(), step=1)
        for step in (1, None):
            theirs = await ask(sender, receiver, step)
            assert aiockpt.fingerprint(received).require(theirs) == []
            assert theirs == aiockpt.fingerprint(STATE)
        received["w1"].view(torch.int32)[5] ^= 1
        with pytest.raises(FingerprintMismatchError, match="w1 differs"):
            aiockpt.fingerprint(received).require(theirs)


@proves("cell HTTPTransport.fingerprint: timeout")
async def test_it_waits_for_a_step() -> None:
    """As a receive does, until the deadline."""
    async with pair() as (sender, receiver):
        asking = asyncio.create_task(ask(sender, receiver, 2))
        await settle(lambda: sender.statistics().waiting == 1)
        await sender.send_checkpoint(step=2, state_dict=STATE)
        assert (await asking).tensors
        with pytest.raises(StepNotFoundError):
            await ask(sender, receiver, 1)
        with pytest.raises(TransferTimeoutError, match="the fingerprint of step 3"):
            await ask(sender, receiver, 3, timeout=0.3)


@proves("cell HTTPTransport.fingerprint: cancel")
async def test_many_who_ask_get_one_computation(slow: Slow) -> None:
    """Also where the first of them leaves."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        first, *others = (asyncio.create_task(ask(sender, receiver)) for _ in range(5))
        await slow.has_begun()
        first.cancel()
        await asyncio.wait({first})
        slow.go_on.set()
        found = await asyncio.gather(*others)
        found.append(await ask(sender, receiver))
        assert found == [aiockpt.fingerprint(STATE)] * 5
        assert slow.count == 1


async def test_one_is_computed_at_a_time(slow: Slow) -> None:
    """A second snapshot waits for its turn; a superseded one is kept meanwhile."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        first = asyncio.create_task(ask(sender, receiver, 1))
        await slow.has_begun()
        newer = {**STATE, "w0": STATE["w0"] + 1}
        await sender.send_checkpoint(step=2, state_dict=newer)
        second = asyncio.create_task(ask(sender, receiver, 2))
        await asyncio.sleep(0.2)
        slow.go_on.set()
        assert await first == aiockpt.fingerprint(STATE)
        assert await second == aiockpt.fingerprint(newer)
        assert (slow.count, slow.most) == (2, 1)


async def test_a_slow_one_is_asked_for_in_pieces(slow: Slow) -> None:
    """A computation may take longer than the stall timeout."""
    async with pair(stall_timeout=0.5) as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        asking = asyncio.create_task(ask(sender, receiver))
        await slow.has_begun()
        await sender.send_checkpoint(step=2, state_dict=STATE)
        await asyncio.sleep(2)
        assert not asking.done()
        slow.go_on.set()
        assert await asking == aiockpt.fingerprint(STATE)
        assert sender.statistics().requests > 2


async def test_a_retraction_ends_it(slow: Slow) -> None:
    """Its memory is read no more afterwards; whoever asks waits for the step again."""
    async with pair(grace=0.1) as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        asking = asyncio.create_task(ask(sender, receiver, timeout=20))
        await slow.has_begun()
        retracting = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.3)
        assert not retracting.done()
        slow.go_on.set()
        await retracting
        assert not slow.running
        await settle(lambda: sender.statistics().waiting == 1)
        other = {"w": torch.ones(3)}
        await sender.send_checkpoint(step=1, state_dict=other)
        assert await asking == aiockpt.fingerprint(other)


@pytest.mark.parametrize("process", [False, True])
async def test_a_step_may_be_replaced_first(slow: Slow, process: bool) -> None:
    """The next step is computed after the first, and the sender keeps one of them."""
    async with transport(process=process) as sender, transport() as receiver:
        asking = list[asyncio.Task[Any]]()
        for step in (1, 2):
            await sender.send_checkpoint(step=step, state_dict=STATE)
            asking.append(asyncio.create_task(ask(sender, receiver, step, timeout=20)))
            await slow.has_begun()
            await asyncio.sleep(0.3)
        await sender.send_checkpoint(step=3, state_dict=STATE)
        slow.go_on.set()
        assert await asking[0] == aiockpt.fingerprint(STATE)
        with pytest.raises(StepNotFoundError, match="being served is step 3") as caught:
            await asking[1]
        assert (caught.value.step, caught.value.serving) == (2, 3)


@proves("cell HTTPTransport.fingerprint: this process dies")
async def test_a_client_that_dies_cancels_nothing(slow: Slow) -> None:
    """The sender is idle when the computation has ended, and keeps the result."""
    async with transport(insecure=True) as sender:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        async with Peer(port_of(sender), token=None) as peer:
            await peer.request("/checkpoint/1/fingerprint")
            await slow.has_begun()
            assert sender.statistics().readers == 1
        slow.go_on.set()
        await settle(lambda: sender.statistics().readers == 0)
        assert sender._store.latest.fingerprint  # type: ignore[attr-defined]


@proves("cell HTTPTransport.fingerprint: the other one dies")
async def test_a_shutdown_ends_it(slow: Slow) -> None:
    """Nothing is left of a computation that nobody needs any more."""
    async with transport() as receiver:
        async with transport(grace=0.1) as sender:
            await sender.send_checkpoint(step=1, state_dict=STATE)
            asking = asyncio.create_task(ask(sender, receiver, timeout=2))
            await slow.has_begun()
            asyncio.get_running_loop().call_later(0.3, slow.go_on.set)
        with pytest.raises(TransportError):
            await asking


async def test_the_first_replica_that_answers_counts() -> None:
    """The others may be dead."""
    dead = format_metadata(f"http://127.0.0.1:{free_port()}/checkpoint/", None)
    async with pair() as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        for metadata in ([dead, sender.metadata()], [sender.metadata(), dead]):
            found = await receiver.fingerprint(metadata, 1)
            assert found == aiockpt.fingerprint(STATE)
    async with transport(reconnect_timeout=0.2) as receiver:
        with pytest.raises(PeerUnreachableError):
            await receiver.fingerprint([dead], 1)


async def test_a_token_is_needed() -> None:
    """As for everything else."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint(step=1, state_dict=STATE)
        address = sender.metadata().partition("#")[0]
        with pytest.raises(AuthenticationError):
            await receiver.fingerprint(f"{address}#another-token", 1)
        granted = sender.grant("somebody", step=2)
        with pytest.raises(AuthenticationError):
            await receiver.fingerprint(granted, 1)


@asynccontextmanager
async def answering(
    handler: Any,
) -> AsyncIterator[str]:
    """Run a server of another kind, and yield its metadata."""
    app = web.Application()
    app.router.add_get("/checkpoint/{step}/{what}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        yield f"http://127.0.0.1:{port}/checkpoint/"
    finally:
        await runner.cleanup()


async def test_an_older_peer_is_named() -> None:
    """Its 404 is that of an unknown resource, and asked for once."""
    count = 0

    async def unknown(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        body = {"type": "about:blank", "status": 404, "detail": "no resource"}
        return web.json_response(body, status=404)

    async with answering(unknown) as metadata, transport() as receiver:
        with pytest.raises(UnavailableError, match=r"127.*older version") as caught:
            await receiver.fingerprint(metadata, 1)
        assert type(caught.value) is UnavailableError
        assert count == 1


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 1000, b'{"aiockpt":2}'])
async def test_a_malformed_answer_is_refused(body: bytes) -> None:
    """The error names the peer."""

    async def malformed(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async with answering(malformed) as metadata, transport() as receiver:
        with pytest.raises(RemoteProtocolError, match=r"127.*malformed fingerprint"):
            await receiver.fingerprint(metadata, 1)


async def test_a_large_answer_is_refused() -> None:
    """The limits of a receive hold."""

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 2000)

    limits = aiockpt.Limits(max_header_bytes=1000)
    async with answering(large) as metadata, transport(limits=limits) as receiver:
        with pytest.raises(RemoteProtocolError, match="2000 bytes"):
            await receiver.fingerprint(metadata, 1)


async def test_conditions_hold() -> None:
    """It has the ETag of the snapshot; a HEAD computes nothing."""
    async with transport(insecure=True) as sender:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        snapshot = sender._store.published
        assert snapshot is not None
        tag = f'"{snapshot.manifest.snapshot_id}"'
        path = "/checkpoint/1/fingerprint"
        async with Peer(port_of(sender), token=None) as peer:
            assert (await peer.ask(path, method="HEAD")).status == 200
            assert sender._store.latest.fingerprint is None  # type: ignore[attr-defined]
            found = await peer.ask(path)
            assert (found.status, found.headers["ETag"]) == (200, tag)
            assert found.headers["Content-Type"] == "application/json"
            assert Fingerprint.from_json(found.body) == aiockpt.fingerprint(STATE)
            assert (await peer.ask(path, If_None_Match=tag)).status == 304
            assert (await peer.ask(path, If_Match='"other"')).status == 412
            latest = await peer.ask("/checkpoint/latest/fingerprint")
            assert latest.body == found.body


async def test_senders_of_shards_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joined string names all of them; the loop does not wait for the sum."""
    total = Fingerprint.total

    def apart(fingerprints: Any) -> Fingerprint:
        assert threading.current_thread() is not threading.main_thread()
        return total(fingerprints)

    monkeypatch.setattr(Fingerprint, "total", apart)
    whole = torch.rand(5, 300)
    async with (
        transport() as first,
        transport() as second,
        transport() as third,
        transport() as receiver,
    ):
        senders = [first, second, third]
        for rank, sender in enumerate(senders):
            with as_rank(rank, 3):
                mesh = init_device_mesh("cpu", (3,))
                shard = distributed(whole, mesh, Shard(0))
                rng = torch.full((4,), rank)
                state = {"w": shard, "b": torch.ones(3), "rng": rng}
                await sender.send_checkpoint(
                    step=rank if rank < 2 else 1, state_dict=state
                )
                if not rank:
                    await sender.send_checkpoint(step=1, state_dict=state)
        joined = aiockpt.join_metadata([each.metadata() for each in senders])
        ours = aiockpt.fingerprint({"w": whole, "b": torch.ones(3)})
        for step in (1, None):
            theirs = await receiver.fingerprint(joined, step)
            assert theirs.by_rank == ("rng",)
            assert ours.require(theirs) == ["rng"]
        some = aiockpt.join_metadata([first.metadata(), third.metadata()])
        theirs = await receiver.fingerprint(some, 1)
        with pytest.raises(FingerprintMismatchError, match="theirs covers 60 % of w"):
            ours.require(theirs)


async def test_a_sender_without_which_all_is_there_may_be_dead() -> None:
    """So it is if others hold replicas of its shards; else the error names it.

    Without a mesh that has its rank, nobody knows what it had.
    """
    dead = format_metadata(f"http://127.0.0.1:{free_port()}/checkpoint/", None)
    async with transport() as sender, transport(reconnect_timeout=0.2) as receiver:
        joined = aiockpt.join_metadata([dead, sender.metadata()])
        whole = torch.ones(4)
        with as_rank(1, 2):
            mesh, alone = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1])
            cut = [
                distributed(whole, *each)
                for each in ((mesh, Replicate()), (mesh, Shard(0)), (alone, Shard(0)))
            ]
            for step, each in enumerate([*cut, whole]):
                await sender.send_checkpoint(step=step, state_dict={"w": each})
                if not step:
                    found = await receiver.fingerprint(joined, step)
                    assert aiockpt.fingerprint({"w": whole}).require(found) == []
                    continue
                with pytest.raises(PeerUnreachableError, match=dead):
                    await receiver.fingerprint(joined, step)


@proves("cell HTTPTransport.fingerprint: error")
async def test_what_cannot_be_computed_is_told() -> None:
    """A term of a sum is no tensor."""
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        spread = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        same = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint(step=1, state_dict={"w": partial})
            with pytest.raises(PeerFailedError, match=r"w is a partial DTensor"):
                await ask(sender, receiver)
            await sender.send_checkpoint(
                step=2, state_dict={"spread": spread, "same": same}
            )
            found = await ask(sender, receiver, 2)
    assert [part.count for part in found.tensors["spread"].parts] == [2]
    assert found.tensors["same"].wholes
    whole = aiockpt.fingerprint({"spread": torch.ones(4)})
    with pytest.raises(FingerprintMismatchError, match="theirs covers 50 % of spread"):
        whole.require(found)


async def test_a_process_computes_in_the_trainer(slow: Slow) -> None:
    """The server process asks the trainer, once; a cancel leaves nothing behind."""
    async with transport(process=True) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        asking = [asyncio.create_task(ask(sender, receiver)) for _ in range(3)]
        await slow.has_begun()
        asking[0].cancel()
        await sender.send_checkpoint(step=2, state_dict=STATE)
        slow.go_on.set()
        assert await asyncio.gather(*asking[1:]) == [aiockpt.fingerprint(STATE)] * 2
        assert slow.count == 1


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("error", "said", "is_kept"),
    [
        (UnsupportedLeafError("w", "object", "w is odd"), "w is ", True),
        (StorageError("model.safetensors", "no space left"), "no space left", False),
        (MemoryError("a detail"), "MemoryError; the sender's log has more", False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failure_of_the_checkpoint_is_remembered(
    process: bool,
    error: Exception,
    said: str,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    allow_error_logs: list[Any],
) -> None:
    """Such a failure is not computed again; one of the host may pass.

    Neither blocks the next step.
    """
    module: Any = http_transport
    compute, steps = module.fingerprint_of_snapshot, list[int]()

    def fails_at_first(snapshot: Any, **options: Any) -> bytes:
        steps.append(snapshot.manifest.step)
        if steps == [1]:
            raise error
        found: bytes = compute(snapshot, **options)
        return found

    monkeypatch.setattr(module, "fingerprint_of_snapshot", fails_at_first)
    async with transport(process=process) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        for attempt in range(3):
            if attempt and not is_kept:
                assert await ask(sender, receiver) == aiockpt.fingerprint(STATE)
                continue
            with pytest.raises(PeerFailedError, match=said) as caught:
                await ask(sender, receiver, timeout=20)
            assert "step 1 has no fingerprint" in str(caught.value)
            assert "a detail" not in str(caught.value)
        assert steps == ([1] if is_kept else [1, 1])
        await sender.send_checkpoint(step=2, state_dict=STATE)
        assert await ask(sender, receiver, 2) == aiockpt.fingerprint(STATE)
    logged = [each.getMessage() for each in allow_error_logs]
    assert logged == ["a fingerprint failed"] * isinstance(error, MemoryError)


async def test_a_process_that_dies_is_asked_again(slow: Slow) -> None:
    """The next process asks the trainer again."""
    async with transport(process=True) as sender, transport() as receiver:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        asking = asyncio.create_task(ask(sender, receiver))
        await slow.has_begun()
        process: Any = sender._store
        process._running.child.kill()
        await asyncio.sleep(0.5)
        slow.go_on.set()
        assert await asking == aiockpt.fingerprint(STATE)
