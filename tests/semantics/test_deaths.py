"""What is left of calls when a process is killed: at the end that lives."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aiockpt import ProcessGroupError, Progress, TransportError
from aiockpt.testing import Drip, FaultProxy, assert_same
from cells import CELLS, proves
from commandline import ENVIRONMENT
from groups import Transport as GroupTransport
from outcomes import Cell
from rankprocesses import SUPPORT, ranks
from receivers import COUNT, MIB_LARGE, left, options_of
from serving import Peer, settle
from transports import MIB, Transport, proxied, receive, through, transport, weights

# The kernel tells of a death, whatever the loop is.
LOOP = "uvloop" if find_spec("uvloop") else "asyncio"

pytestmark = pytest.mark.timeout(120)

HERE = "semantics/test_deaths.py::"
SLOW = Drip(rate=MIB, burst=64 << 10)
"""A connection that needs seconds for what is received here."""


RECEIVES = [
    call
    for call in dict.fromkeys(call for call, _ in CELLS)
    if "HTTPTransport.recv" in call and "torchft" not in call
]
"""The rows of all kinds of receives."""


@asynccontextmanager
async def program(name: str, path: Path) -> AsyncIterator[Process]:
    """Run a helper with ``path`` for its files; kill what is left of it at the end."""
    paths = f"{ENVIRONMENT['PYTHONPATH']}:{SUPPORT}"
    process = await create_subprocess_exec(
        *(sys.executable, str(SUPPORT / f"{name}.py")),
        env={**ENVIRONMENT, "PYTHONPATH": paths, "TMPDIR": str(path)},
        cwd=path,
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def heard(process: Process) -> str:
    """Return the next line that a program prints."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    assert line, "it has died"
    return line


def say(process: Process, line: str) -> None:
    """Tell it something."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def stuck(stack: AsyncExitStack, url: str) -> Peer:
    """Read the beginning of step 1, and no more."""
    port = urlsplit(url).port
    assert port is not None
    peer = await stack.enter_async_context(Peer(port, token=None, receive_buffer=4096))
    await peer.request("/checkpoint/1/full")
    await peer.head()
    return peer


async def at_the_receivers(stack: AsyncExitStack, path: Path) -> Mapping[str, str]:
    """Kill senders in the middle of all their calls; return what others find."""
    receiver = await stack.enter_async_context(transport(reconnect_timeout=0))
    sender = await stack.enter_async_context(program("dying_sender", path))
    urls = json.loads(await heard(sender))
    serving = urls.pop("")
    peers = {
        name: await stuck(stack, url) for name, url in urls.items() if name != "start"
    }
    say(sender, "call")
    assert json.loads(await heard(sender)) == ["", "start"]
    waiting = {
        name: asyncio.create_task(receiver.recv_checkpoint(0, url, 3))
        for name, url in urls.items()
    }
    receives = await under_way(stack, receiver, serving)
    sender.kill()
    async with asyncio.timeout(30):
        found = {name: await cut_off(waiting[name], peers.get(name)) for name in urls}
        found |= {name: await left_of(*each) for name, each in receives.items()}
    assert not os.listdir(path), "nothing of it is on the disk"
    return found


async def cut_off(waiting: asyncio.Task[Any], peer: Peer | None) -> str:
    """Say what becomes of who waits, and of who reads."""
    with pytest.raises(TransportError):
        await waiting
    assert peer is None or len(await peer.read_all()) < 16 * MIB
    return "cut"


Under = tuple[asyncio.Task[Any], dict[str, Any]]


async def under_way(
    stack: AsyncExitStack, receiver: Transport, url: str
) -> dict[str, Under]:
    """Begin a receive of each kind over slow connections; some of each has arrived."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    proxy = FaultProxy(address.hostname, address.port, otherwise=SLOW)
    await stack.enter_async_context(proxy)
    found = {}
    for name in RECEIVES:
        begun = asyncio.Event()
        options = options_of(name)
        call = receiver.recv_checkpoint(
            *(0, proxy.url(address.path), 1),
            **options,
            progress=partial(_note, begun),
        )
        found[name] = asyncio.create_task(call), options
        await begun.wait()
    return found


def _note(begun: asyncio.Event, now: Progress) -> None:
    if now.chunks_done:
        begun.set()


async def left_of(task: asyncio.Task[Any], options: dict[str, Any]) -> str:
    """Say what is left of a receive whose sender has died."""
    with pytest.raises(TransportError) as caught:
        await task
    notes = list(getattr(caught.value, "__notes__", []))
    here = "nothing" if "into" not in options else left(options, 0)
    if "into" in options:
        done = "was modified" if here == "torn" else "was not modified"
        assert f"the template {done}" in notes
    return here


async def at_the_senders(stack: AsyncExitStack, path: Path) -> Mapping[str, str]:
    """Kill receivers in the middle of all their calls; return what senders find."""
    state = weights(mib=MIB_LARGE, count=COUNT)
    senders, metadata = {}, {}
    for name in (*RECEIVES, "HTTPTransport.steps"):
        sender = await stack.enter_async_context(transport())
        await sender.send_checkpoint([], 1, state)
        proxy = await stack.enter_async_context(proxied(sender, otherwise=SLOW))
        senders[name], metadata[name] = sender, through(proxy, sender)
    receiver = await stack.enter_async_context(program("dying_receiver", path))
    say(receiver, json.dumps(metadata))
    assert await heard(receiver) == "receiving"
    await settle(lambda: all(map(uses, senders.values())))
    receiver.kill()
    await settle(lambda: not any(map(uses, senders.values())))
    async with transport() as other:
        for sender in senders.values():
            assert_same(await receive(sender, other), state)
    assert not os.listdir(path)
    return dict.fromkeys(senders, "idle")


def uses(sender: Transport) -> int:
    """Return how many requests somebody has there."""
    now = sender.statistics()
    return now.readers + now.waiting


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """Kill one process for all cells of a test; it takes seconds to start."""
    return asyncio.run(_in_a_stack(request.param, tmp_path_factory.mktemp("dies")))


async def _in_a_stack(scenario: Any, path: Path) -> Mapping[str, str]:
    async with AsyncExitStack() as stack:
        result: Mapping[str, str] = await scenario(stack, path)
        return result


def killing(scenario: Any) -> Any:
    """Give a test what is found where a scenario's process was killed."""
    return pytest.mark.parametrize("found", [scenario], indirect=True, ids=["killed"])


@killing(at_the_receivers)
@proves(HERE + "test_a_sender_dies")
def test_a_sender_dies(cell: Cell, found: Mapping[str, str]) -> None:
    """In the middle of its call: whoever reads or waits hears of it, at once."""
    assert found[cell.call.removeprefix("HTTPTransport.")] == cell.left


@killing(at_the_receivers)
@proves(HERE + "test_a_receive_outlives_its_sender")
def test_a_receive_outlives_its_sender(cell: Cell, found: Mapping[str, str]) -> None:
    """It ends, and says in a note what it has done to its template."""
    assert found[cell.call] == cell.left


@killing(at_the_senders)
@proves(HERE + "test_a_receiver_dies")
def test_a_receiver_dies(cell: Cell, found: Mapping[str, str]) -> None:
    """In the middle of it: its sender offers as before, and nobody reads."""
    assert found[cell.call.removeprefix("torchft.")] == cell.left


@pytest.mark.asyncio(loop_factories=[LOOP])
@proves(HERE + "test_a_withdrawal_ends")
async def test_a_withdrawal_ends(cell: Cell, tmp_path: Path) -> None:
    """With the send that it waits for, which its receiver's death has broken."""
    async with (
        ranks(tmp_path, "idle") as (group, (peer,)),
        GroupTransport(group, timeout=30) as ours,
    ):
        sending = asyncio.create_task(ours.send_checkpoint([1], 1, weights()))
        await asyncio.sleep(0.1)
        withdrawing = asyncio.create_task(ours.disallow_checkpoint())
        peer.kill()
        async with asyncio.timeout(20):
            await withdrawing
        with pytest.raises(ProcessGroupError):
            await sending
        assert "broken" in repr(ours)
    assert cell.left == "none, broken"
