"""``HostMirror``: the processes of a host fetch each step once and share it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aiockpt import join_metadata
from aiockpt.errors import (
    AuthenticationError,
    DeviceMeshError,
    LocalProtocolError,
    StepNotFoundError,
    StorageError,
    TransferTimeoutError,
)
from aiockpt.testing import Drip, Fault, PeerProcess, assert_same
from aiockpt.vllm import HostMirror
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.ports import free_port
from tests.support.servers import settle
from tests.support.transports import (
    CHUNK,
    MIB,
    TOKEN,
    Events,
    Transport,
    chunked,
    proxied,
    through,
    transport,
    weights_of,
)

pytestmark = pytest.mark.asyncio

FAULT = Drip(200_000, burst=8192)


@asynccontextmanager
async def mirroring(
    metadata: str, place: Path, token: str | None = None, *, swarm: bool = False
) -> AsyncIterator[HostMirror]:
    """Run a mirror as another process would; all it uses ends with it."""
    mirror = HostMirror(metadata, place=place, token=token, swarm=swarm)
    before = asyncio.all_tasks()
    task = asyncio.create_task(mirror.run())
    try:
        yield mirror
    finally:
        task.cancel()
        await asyncio.wait([task])
    # The connections of the sender have tasks here too.
    left = [repr(task) for task in asyncio.all_tasks() - before]
    assert not [each for each in left if "/lifetime.py" in each], "still shutting down"


@pytest.mark.parametrize("swarm", [False, True])
async def test_hosts_may_serve_each_other(
    tmp_path: Path, events: Events, swarm: bool
) -> None:
    """Hosts serve each full step to each other, if they were asked to."""
    state = chunked(24)
    async with transport() as sender, proxied(sender, otherwise=FAULT) as proxy:
        await sender.send_checkpoint(step=1, state_dict=state)
        url = through(proxy, sender)
        async with (
            mirroring(url, tmp_path / "one", swarm=swarm) as one,
            mirroring(url, tmp_path / "two", swarm=swarm) as two,
        ):
            for mirror in (one, two):
                assert_same(await mirror.wait_for(1, 60), state)
    served = [each for each in events if each.stop == "swarm"]
    assert bool(served) == swarm
    sent = sender.statistics().bytes_sent / (24 * CHUNK)
    assert sent < 2 if swarm else sent >= 2


async def send_shards(senders: Sequence[Transport], step: int) -> None:
    """Publish a step from ranks that each hold a part of each tensor but one."""
    for rank, sender in enumerate(senders):
        with as_rank(rank, len(senders)):
            mesh = init_device_mesh("cpu", (len(senders),))
            state = {
                name: distributed(each, mesh, Shard(0)) if each.ndim else each
                for name, each in weights_of(step).items()
            }
            await sender.send_checkpoint(step=step, state_dict=state)


@pytest.mark.parametrize("count", [1, 2])
async def test_processes_of_a_host_fetch_once(tmp_path: Path, count: int) -> None:
    """Each maps the same memory; later steps cost the changed elements.

    They get the full tensors of which several senders have the shards.
    """
    place = tmp_path / "locks"
    async with AsyncExitStack() as stack:
        senders = [
            await stack.enter_async_context(transport(keep_base=True, same_host=False))
            for _ in range(count)
        ]
        joined = join_metadata([each.metadata() for each in senders])
        async with mirroring(joined, place) as one, mirroring(joined, place) as other:
            for step in range(1, 4):
                before = [each.statistics().bytes_sent for each in senders]
                if count == 1:
                    await senders[0].send_checkpoint([], step, weights_of(step))
                else:
                    await send_shards(senders, step)
                held = [await each.wait_for(step, 30) for each in (one, other)]
                for each in held:
                    assert_same(each, weights_of(step))
                del held, each
                for was, sender in zip(before, senders, strict=True):
                    sent = sender.statistics().bytes_sent - was
                    assert sent < (4 / count + 0.1 if step == 1 else 0.1) * MIB
            assert one.is_leader != other.is_leader
    assert not list(place.iterdir())


async def test_metadata_that_cannot_be_mirrored_is_refused_at_once(
    tmp_path: Path,
) -> None:
    """A typing error is no trainer that is still to come.

    There is no swarm of several senders.
    """
    with pytest.raises(LocalProtocolError):
        HostMirror("no address", place=tmp_path)
    async with transport() as first, transport() as second:
        joined = join_metadata([first.metadata(), second.metadata()])
        with pytest.raises(LocalProtocolError, match="swarm="):
            HostMirror(joined, place=tmp_path, swarm=True)


async def test_a_sender_of_shards_that_restarts_is_followed(tmp_path: Path) -> None:
    """It has the same token and port. Until it is back, the last step stays."""
    port = free_port()
    async with transport(token=TOKEN) as first, AsyncExitStack() as stack:
        second = await stack.enter_async_context(transport(token=TOKEN, port=port))
        joined = join_metadata([first.metadata(), second.metadata()])
        async with mirroring(joined, tmp_path / "locks", TOKEN) as mirror:
            await send_shards([first, second], 1)
            await mirror.wait_for(1, 30)
            await stack.aclose()
            with as_rank(0, 2):
                mesh = init_device_mesh("cpu", (2,))
                alone = {"bias": distributed(torch.zeros(7), mesh, Shard(0))}
                await first.send_checkpoint(step=2, state_dict=alone)
            with pytest.raises(TransferTimeoutError):
                await mirror.wait_for(2, 0.5)
            assert_same(await mirror.wait_for(1, 30), weights_of(1))
            async with transport(token=TOKEN, port=port) as again:
                await send_shards([first, again], 3)
                assert_same(await mirror.wait_for(3, 30), weights_of(3))


async def test_a_wrong_step_is_an_error(tmp_path: Path) -> None:
    """An earlier one is gone, a later one does not come; the right one works."""
    async with transport() as sender:
        await sender.send_checkpoint(step=5, state_dict=weights_of(1))
        async with mirroring(sender.metadata(), tmp_path / "locks") as mirror:
            await mirror.wait_for(5, 30)
            with pytest.raises(StepNotFoundError, match="step 5"):
                await mirror.wait_for(4, 30)
            with pytest.raises(TransferTimeoutError, match="step 6 after step 5"):
                await mirror.wait_for(6, 0.2)
            assert_same(await mirror.wait_for(5, 30), weights_of(1))


async def test_a_leader_that_leaves_is_replaced(tmp_path: Path) -> None:
    """The other process follows the sender by itself."""
    async with transport() as sender, AsyncExitStack() as stack:
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        metadata, place = sender.metadata(), tmp_path / "locks"
        leader = await stack.enter_async_context(mirroring(metadata, place))
        await leader.wait_for(1, 30)
        async with mirroring(metadata, place) as heir:
            await heir.wait_for(1, 30)
            assert not heir.is_leader
            await stack.aclose()
            await sender.send_checkpoint(step=2, state_dict=weights_of(2))
            assert_same(await heir.wait_for(2, 30), weights_of(2))
            assert heir.is_leader


class FirstAnswer(Fault):
    """Deliver one answer, and hold the next one back."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._answers = 0

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        self._answers += 1
        if self._answers == 1:
            await pipe.send(data)
        else:
            self.reached.set()
            await pipe.stall()


async def test_a_leader_that_leaves_while_a_step_is_mapped_is_replaced(
    tmp_path: Path,
) -> None:
    """The process knows of the step, but cannot get it from this leader any more."""
    fault = FirstAnswer()
    async with (
        transport() as sender,
        transport(same_host=True) as leader,
        proxied(leader, otherwise=fault) as proxy,
    ):
        for each in (sender, leader):
            await each.send_checkpoint(step=1, state_dict=weights_of(1))
        metadata, place = sender.metadata(), tmp_path / "locks"
        async with mirroring(metadata, place) as mirror:
            await settle(lambda: mirror.is_leader)
            [path] = place.iterdir()
        place.mkdir(exist_ok=True)
        path.write_text(through(proxy, leader))
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            async with mirroring(metadata, place) as mirror:
                await fault.reached.wait()
                proxy.refuse()
                await proxy.cut_all()
                path.unlink()
                assert_same(await mirror.wait_for(1, 60), weights_of(1))
                assert mirror.is_leader


PROGRAM = """
import asyncio, sys
from pathlib import Path
from aiockpt.vllm import HostMirror

async def main():
    mirror = HostMirror(sys.argv[1], place=Path(sys.argv[2]))
    task = asyncio.create_task(mirror.run())
    await mirror.wait_for(1, 60)
    print("leader" if mirror.is_leader else "other", flush=True)
    await task

asyncio.run(main())
"""


async def test_a_leader_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """What it has published stays mapped; the next step comes all the same."""
    async with transport() as sender:
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        metadata, place = sender.metadata(), tmp_path / "locks"
        command = [sys.executable, "-c", PROGRAM, metadata, str(place)]
        async with PeerProcess(command) as leader:
            assert await leader.line() == "leader"
            async with mirroring(metadata, place) as mirror:
                held = await mirror.wait_for(1, 30)
                assert not mirror.is_leader
                await leader.kill()
                assert_same(held, weights_of(1))
                del held
                await sender.send_checkpoint(step=2, state_dict=weights_of(2))
                assert_same(await mirror.wait_for(2, 60), weights_of(2))
                assert mirror.is_leader


async def test_a_sender_that_comes_back_is_followed(tmp_path: Path) -> None:
    """It has the same token and port, an earlier step, and another layout."""
    port = free_port()
    async with transport(token="t" * 20, port=port) as sender:
        metadata = sender.metadata()
        await sender.send_checkpoint(step=5, state_dict=weights_of(1))
        locks = tmp_path / "locks"
        async with mirroring(metadata, locks, "t" * 20) as mirror:
            await mirror.wait_for(5, 30)
            await sender.shutdown()
            async with transport(token="t" * 20, port=port) as again:
                await again.send_checkpoint(step=2, state_dict=weights_of(2, count=3))
                await settle(lambda: mirror.step == 2, patience=30)
                assert_same(await mirror.wait_for(2, 30), weights_of(2, count=3))


async def test_a_refused_token_is_told(tmp_path: Path) -> None:
    """The error comes out of the wait, not of a log only."""
    async with transport() as sender:
        metadata = sender.metadata().partition("#")[0] + "#" + "x" * 20
        async with mirroring(metadata, tmp_path / "locks") as mirror:
            with pytest.raises(AuthenticationError):
                await mirror.wait_for(1, 30)


async def test_a_proxy_that_refuses_for_a_while_is_told_and_outlived(
    tmp_path: Path,
) -> None:
    """The mirror tells of it and tries again, since the sender did not refuse."""
    proxy = await asyncio.start_server(_refuse, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    metadata = f"http://127.0.0.1:{port}/checkpoint/#{'t' * 20}"
    async with mirroring(metadata, tmp_path) as mirror:
        async with proxy:
            with pytest.raises(AuthenticationError, match="not as a sender does"):
                await mirror.wait_for(1, 30)
        async with transport(token="t" * 20, port=port) as sender:
            await sender.send_checkpoint(step=1, state_dict=weights_of(1))
            await settle(lambda: mirror.step == 1, patience=30)


async def test_a_step_that_no_host_can_receive_is_told(tmp_path: Path) -> None:
    """The waiter gets the error at once, and the next step is mirrored."""
    async with transport(same_host=False) as sender:
        with as_rank(0, 1):
            sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
            await sender.send_checkpoint(step=1, state_dict={"a": sharded})
        async with mirroring(sender.metadata(), tmp_path) as mirror:
            with pytest.raises(DeviceMeshError):
                await mirror.wait_for(1, 30)
            await sender.send_checkpoint(step=2, state_dict=weights_of(2))
            await settle(lambda: mirror.step == 2, patience=30)


async def test_a_directory_that_is_lost_is_told_and_outlived(tmp_path: Path) -> None:
    """Something has put a file in its place while the leader led."""
    place = tmp_path / "locks"
    async with transport() as sender, mirroring(sender.metadata(), place) as mirror:
        await sender.send_checkpoint(step=5, state_dict=weights_of(1))
        await mirror.wait_for(5, 30)
        shutil.rmtree(place)
        place.touch()
        await sender.send_checkpoint(step=3, state_dict=weights_of(2))  # ends the lead
        await settle(lambda: not mirror.is_leader, patience=30)
        with pytest.raises(StorageError):
            await mirror.wait_for(6, 30)
        place.unlink()
        await settle(lambda: mirror.step == 3, patience=30)


async def test_a_leader_answers_before_the_first_step(tmp_path: Path) -> None:
    """A trainer may take its time, and silence would look like a lost leader."""
    async with transport() as sender, mirroring(sender.metadata(), tmp_path) as mirror:
        await settle(lambda: mirror.is_leader)
        (name,) = os.listdir(tmp_path)
        url, _, token = (tmp_path / name).read_text().partition("#")
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{url}1/full") as answer,
        ):
            assert answer.status == HTTPStatus.NOT_FOUND


async def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    """Whoever can write to it could offer other weights."""
    place = tmp_path / "locks"
    os.mkdir(place)
    os.chmod(place, 0o777)
    async with transport() as sender, mirroring(sender.metadata(), place) as mirror:
        with pytest.raises(StorageError, match="chmod 700"):
            await mirror.wait_for(1, 30)
        # A fault of this host that is mended is no reason to end.
        os.chmod(place, 0o700)
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        await settle(lambda: mirror.step == 1, patience=30)
        assert_same(await mirror.wait_for(1, 30), weights_of(1))


@pytest.mark.parametrize("said", [b"\xff\xfe", b"http://[::1", None])
async def test_another_program_in_the_leaders_place(
    tmp_path: Path, said: bytes | None
) -> None:
    """It has the port of a dead leader, say; the next leader is followed."""
    hello = await asyncio.start_server(_greet, "127.0.0.1", 0)
    port = hello.sockets[0].getsockname()[1]
    async with hello, transport() as sender:
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        async with mirroring(sender.metadata(), tmp_path) as mirror:
            await mirror.wait_for(1, 30)
            (name,) = os.listdir(tmp_path)
        with (tmp_path / name).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(said or b"http://127.0.0.1:%d/checkpoint/" % port)
            file.flush()
            async with mirroring(sender.metadata(), tmp_path) as mirror:
                with pytest.raises(TransferTimeoutError):
                    await mirror.wait_for(1, 0.5)
                os.unlink(tmp_path / name)
                assert_same(await mirror.wait_for(1, 30), weights_of(1))


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await writer.drain()
    writer.close()
