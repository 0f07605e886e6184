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
from aiockpt import AuthenticationError, Fingerprint, StepNotFoundError
from aiockpt.errors import (
    FingerprintMismatchError,
    PeerFailedError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.servers import Peer, running, settle
from tests.support.transports import pair, port_of, transport, weights

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_blocking")]

STATE = {**weights(mib=2.0, count=4), "b": torch.arange(7.0).bfloat16(), "step": 3}


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


async def test_the_first_replica_that_answers_counts() -> None:
    """The others may be dead."""
    dead = f"http://127.0.0.1:{free_port()}/checkpoint/"
    async with pair(state=STATE) as (sender, receiver):
        for metadata in ([dead, sender.metadata()], [sender.metadata(), dead]):
            found = await receiver.fingerprint(metadata, 1)
            assert found == aiockpt.fingerprint(STATE)
    async with transport(reconnect_timeout=0.2) as receiver:
        with pytest.raises(PeerUnreachableError):
            await receiver.fingerprint([dead], 1)


async def test_a_token_is_needed() -> None:
    """As for everything else."""
    async with pair(state=STATE) as (sender, receiver):
        address = sender.metadata().partition("#")[0]
        with pytest.raises(AuthenticationError):
            await receiver.fingerprint(f"{address}#another-token", 1)
        granted = sender.grant("somebody", step=2)
        with pytest.raises(AuthenticationError):
            await receiver.fingerprint(granted, 1)


@asynccontextmanager
async def answering(
    body: bytes, status: int = 200
) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a server of another kind; yield its metadata, and what it is asked for."""
    asked = list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=body, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_get("/checkpoint/{step}/{what}", answer)
    async with running(app) as host:
        yield f"http://127.0.0.1:{host.port}/checkpoint/", asked


async def test_an_older_peer_is_named() -> None:
    """Its 404 is that of an unknown resource, and asked for once."""
    body = b'{"type": "about:blank", "status": 404, "detail": "no resource"}'
    async with answering(body, 404) as (metadata, asked), transport() as receiver:
        with pytest.raises(UnavailableError, match=r"127.*older version") as caught:
            await receiver.fingerprint(metadata, 1)
        assert type(caught.value) is UnavailableError
        assert len(asked) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[" * 1000, b'{"aiockpt":2}', b" " * 2000]
)
async def test_an_answer_that_is_malformed_or_too_large_is_refused(body: bytes) -> None:
    """The error names the peer. The limits of a receive hold."""
    limits = aiockpt.Limits(max_header_bytes=1500)
    why = "2000 bytes" if len(body) == 2000 else r"127.*malformed fingerprint"
    async with answering(body) as (metadata, _), transport(limits=limits) as receiver:
        with pytest.raises(RemoteProtocolError, match=why):
            await receiver.fingerprint(metadata, 1)


async def test_conditions_hold() -> None:
    """It has the ETag of the snapshot."""
    async with transport(insecure=True) as sender:
        await sender.send_checkpoint(step=1, state_dict=STATE)
        path = "/checkpoint/1/fingerprint"
        async with Peer(port_of(sender), token=None) as peer:
            tag = (await peer.ask("/checkpoint/1/metadata")).headers["ETag"]
            assert (await peer.ask(path, method="HEAD")).status == 200
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
    dead = f"http://127.0.0.1:{free_port()}/checkpoint/"
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
        async with pair(state={"w": partial}) as (sender, receiver):
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
