"""What the calls that end an object leave behind when they do not simply succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import PGTransport, make_async_checkpointer
from aiockpt.checkpointers import CheckpointProcess, DefaultStager, RankInfo
from aiockpt.errors import ClosedError, LocalProtocolError
from aiockpt.testing import assert_same
from tests.support.groups import gloo_groups, moved
from tests.support.proofs import Cell, each_cell
from tests.support.saving import loaded, submit
from tests.support.servers import Peer
from tests.support.transports import MIB, port_of, transport, weights
from tests.support.waiting import eventually, is_running, reaped

pytestmark = pytest.mark.timeout(120)


@dataclass
class Subject:
    """An object, a use of it that succeeds while it is open, and how it ends.

    ``finished`` is awaited when it has ended: it checks what was under way.
    """

    use: Callable[[], Awaitable[object]]
    end: Callable[[], Awaitable[object]]
    close: Callable[[], Awaitable[object]]
    finished: Callable[[], Awaitable[object]] | None = None


async def http(method: str, _: Path) -> Subject:
    """Offer something that somebody reads."""
    made = transport(insecure=True, grace=0.2)

    async def use() -> None:
        await made.send_checkpoint([], 1, weights(mib=16))

    await use()
    peer = await Peer(port_of(made), token=None, receive_buffer=4096).__aenter__()
    await peer.request("/checkpoint/1/full")
    await peer.head()

    async def evicted() -> None:
        assert len(await peer.read_all()) < 16 * MIB
        peer.close()

    return Subject(use, getattr(made, method), made.shutdown, evicted)


async def group(method: str, _: Path) -> Subject:
    """Move something between two ranks."""
    sender, receiver = [PGTransport[Any](each, 20) for each in await gloo_groups(2)]

    async def use() -> None:
        await sender.send_checkpoint([], 1, weights())
        assert_same(await moved(sender, receiver, weights()), weights())

    async def close() -> None:
        await sender.shutdown()
        await receiver.shutdown()

    await use()
    return Subject(use, getattr(sender, method), close, receiver.shutdown)


async def process(method: str, path: Path) -> Subject:
    """Write something in a process, and hand something over."""
    made = CheckpointProcess(RankInfo(0, 1))

    async def use() -> None:
        await made.write(weights(), path / "used")

    await use()
    pid = made.pid
    assert pid
    await submit(made, weights(2.0), path / "handed")

    async def written() -> None:
        await eventually(lambda: not is_running(pid), "the child's end")
        reaped(pid)
        assert_same(loaded(path / "handed"), weights(2.0))

    return Subject(use, getattr(made, method), made.close, written)


async def checkpointer(method: str, path: Path) -> Subject:
    """Save something, and have something else on its way."""
    made = make_async_checkpointer()

    async def use() -> None:
        assert await (await made.save(weights(), path / "used")).written()

    await use()
    handle = await made.save(weights(2.0), path / "handed")

    async def written() -> None:
        assert await handle.written()
        assert_same(loaded(path / "handed"), weights(2.0))

    return Subject(use, getattr(made, method), made.close, written)


async def stager(method: str, _: Path) -> Subject:
    """Stage something."""
    made = DefaultStager()

    async def use() -> None:
        with await made.stage({"w": torch.ones(3)}) as staged:
            assert_same(staged.state_dict(), {"w": torch.ones(3)})

    await use()
    return Subject(use, getattr(made, method), made.close)


MAKE: dict[str, Callable[[str, Path], Awaitable[Subject]]] = {
    "HTTPTransport": http,
    "PGTransport": group,
    "CheckpointProcess": process,
    "AsyncCheckpointer": checkpointer,
    "DefaultStager": stager,
}


def subject_of(cell: Cell, path: Path) -> Awaitable[Subject]:
    """Make what the cell's row is about."""
    owner, _, method = cell.call.partition(",")[0].rpartition(".")
    return MAKE[owner](method, path)


@each_cell(
    "HTTPTransport.disallow_checkpoint: error",
    "HTTPTransport.shutdown: error",
    "PGTransport.disallow_checkpoint: error",
    "PGTransport.shutdown: error",
    "CheckpointProcess.close, aclose: error",
    "CheckpointProcess.abandon: error",
    "DefaultStager.close: error",
)
def test_another_loop(cell: Cell, tmp_path: Path) -> None:
    """The call is refused there, and the object serves its own loop as before."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        subject = first.run(_awaited(subject_of(cell, tmp_path)))

        async def elsewhere() -> None:
            with pytest.raises(LocalProtocolError, match="event loop"):
                await subject.end()

        second.run(elsewhere())
        first.run(_awaited(subject.use()))
        first.run(_awaited(subject.close()))
        if subject.finished is not None:
            first.run(_awaited(subject.finished()))
    assert cell.left == "as before"


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


@pytest.mark.asyncio
@each_cell(
    "HTTPTransport.shutdown: cancel",
    "PGTransport.shutdown: cancel",
    "AsyncCheckpointer.close, aclose: cancel",
    "CheckpointProcess.close, aclose: cancel",
    "CheckpointProcess.abandon: cancel",
    "DefaultStager.close: cancel",
    "PGTransport.shutdown: timeout",
    "CheckpointProcess.abandon: timeout",
    "DefaultStager.close: timeout",
)
async def test_a_cancelled_end(cell: Cell, tmp_path: Path) -> None:
    """The closing goes on by itself; who calls it again waits for its end."""
    subject = await subject_of(cell, tmp_path)
    ending = asyncio.ensure_future(subject.end())
    for _ in range(2):
        await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    with pytest.raises(ClosedError):
        await subject.use()
    await subject.end()
    if subject.finished is not None:
        await subject.finished()
    here, _, _ = cell.left.partition(" / ")
    assert here in ("closing", "as cancel")
