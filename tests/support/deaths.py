"""Processes killed in the middle of calls, and what is found at the other end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aiockpt import Progress, TransportError
from aiockpt.testing import Drip, FaultProxy, assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.forkserver import children_of
from tests.support.proofs import CELLS
from tests.support.rankprocesses import SUPPORT
from tests.support.saving import is_running, wait_until
from tests.support.servers import Peer, settle
from tests.support.transports import (
    COUNT,
    MIB,
    MIB_LARGE,
    MIB_SENT,
    SHARING,
    Gate,
    Transport,
    held_up,
    left,
    lends,
    options_of,
    proxied,
    receive,
    there,
    through,
    transport,
    weights,
)

__all__ = ["at_the_receivers", "at_the_senders"]

SLOW = Drip(rate=MIB / 2, burst=64 << 10)
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
    process = await create_subprocess_exec(
        *(sys.executable, str(SUPPORT / f"{name}.py")),
        env={**ENVIRONMENT, "TMPDIR": str(path)},
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
    await peer.request("/checkpoint/1/full", Connection="close")
    await peer.head()
    return peer


async def at_the_receivers(stack: AsyncExitStack, path: Path) -> Mapping[str, str]:
    """Kill senders in the middle of all their calls; return what others find."""
    gate = held_up(stack.enter_context(pytest.MonkeyPatch.context()), SHARING)
    made = transport(reconnect_timeout=0, connections=1)
    receiver = await stack.enter_async_context(made)
    sender = await stack.enter_async_context(program("dying_sender", path))
    urls = json.loads(await heard(sender))
    server = stack.enter_context(outliving(sender))
    serving, lending = urls.pop(""), urls.pop("share=True")
    peers = {
        name: await stuck(stack, url) for name, url in urls.items() if name != "start"
    }
    say(sender, "call")
    assert json.loads(await heard(sender)) == ["", "share=True", "start"]
    waiting = {
        name: asyncio.create_task(receiver.recv_checkpoint(0, url, 3))
        for name, url in {**urls, LENT: lending}.items()
    }
    receives = await under_way(stack, receiver, serving, lending, gate)
    sender.kill()
    await sender.wait()
    gate.go.set()
    async with asyncio.timeout(30):
        early = await cut_off(waiting[LENT], None)
        found = {PROCESS: await served_on(receiver, urls.pop(PROCESS), peers[PROCESS])}
        waiting[PROCESS].cancel()
        found |= {name: await cut_off(waiting[name], peers.get(name)) for name in urls}
        found |= {name: await left_of(*each) for name, each in receives.items()}
    assert early == "cut"
    found[LENT] += " or nothing"
    assert is_running(server)
    assert not os.listdir(path), "nothing of it is on the disk"
    return found


LENT = "HTTPTransport.recv_checkpoint, share=True"
PROCESS = "send_checkpoint, Server(process=True)"


@contextmanager
def outliving(process: Process) -> Iterator[int]:
    """Give the child of a process, which lives on without it; end it at the end."""
    (child,) = children_of(process.pid)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGTERM)
        wait_until(lambda: not is_running(child), "its end")


async def served_on(receiver: Transport, url: str, peer: Peer) -> str:
    """Receive what was offered before; so does who was reading it."""
    assert_same(await receiver.recv_checkpoint(0, url, 1), weights(mib=16))
    assert len(await peer.read_all()) > 16 * MIB
    return "serves on"


async def cut_off(waiting: asyncio.Task[Any], peer: Peer | None) -> str:
    """Say what becomes of who waits, and of who reads."""
    with pytest.raises(TransportError):
        await waiting
    assert peer is None or len(await peer.read_all()) < 16 * MIB
    return "cut"


Under = tuple[asyncio.Task[Any], dict[str, Any]]


async def under_way(
    stack: AsyncExitStack, receiver: Transport, url: str, lending: str, gate: Gate
) -> dict[str, Under]:
    """Begin a receive of each kind over slow connections; some of each has arrived."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    proxy = FaultProxy(address.hostname, address.port, otherwise=SLOW)
    await stack.enter_async_context(proxy)
    one = proxy.url(address.path)
    several = [one, await another(stack)]
    found = {}
    for name in RECEIVES:
        begun = asyncio.Event()
        options = options_of(name)
        metadata = several if "metadata=[" in name else one
        call = receiver.recv_checkpoint(
            *(0, lending if lends(name) else metadata, 1),
            **options,
            progress=partial(_note, begun),
        )
        found[name] = asyncio.create_task(call), options
        await begun.wait()
    await gate.entered.wait()
    return found


async def another(stack: AsyncExitStack) -> str:
    """Offer the same as the sender that is received from, nearly as slowly."""
    sender = await stack.enter_async_context(transport())
    await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
    slow = Drip(rate=MIB, burst=64 << 10)
    proxy = await stack.enter_async_context(proxied(sender, otherwise=slow))
    return through(proxy, sender)


def _note(begun: asyncio.Event, now: Progress) -> None:
    if now.chunks_done:
        begun.set()


async def left_of(task: asyncio.Task[Any], options: dict[str, Any]) -> str:
    """Say what is left of a receive whose sender has died, or one of two."""
    with suppress(TransportError):
        assert_same(await task, weights(mib=MIB_SENT, count=COUNT))
        return "shared" if "share" in options else "whole"
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
    senders: dict[str, Transport] = {}
    metadata: dict[str, str | list[str]] = {}
    for name in (*RECEIVES, "HTTPTransport.steps", "HTTPTransport.follow"):
        made = transport(same_host=lends(name))
        sender = senders[name] = await stack.enter_async_context(made)
        await sender.send_checkpoint([], 1, state)
        proxies = [proxied(sender, otherwise=SLOW) for _ in range(2)]
        for proxy in proxies:
            await stack.enter_async_context(proxy)
        both = [through(proxy, sender) for proxy in proxies]
        metadata[name] = both if "metadata=[" in name else both[0]
    receiver = await stack.enter_async_context(program("dying_receiver", path))
    say(receiver, json.dumps(metadata))
    assert await heard(receiver) == "receiving"
    await settle(lambda: all(map(was_used, senders.values())))
    receiver.kill()
    await receiver.wait()
    await settle(lambda: not any(map(reads, senders.values())))
    found = {name: there(sender) for name, sender in senders.items()}
    async with transport() as other:
        for sender in senders.values():
            assert_same(await receive(sender, other), state)
    assert not os.listdir(path)
    return found


def reads(sender: Transport) -> int:
    """Return how many requests somebody has there."""
    now = sender.statistics()
    return now.readers + now.waiting


def was_used(sender: Transport) -> bool:
    """Tell whether somebody waits there, or has asked for more than the manifest."""
    now = sender.statistics()
    return now.waiting > 0 or now.lent > 0 or now.requests > 1
