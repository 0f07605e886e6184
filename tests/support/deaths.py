"""Processes killed in the middle of calls, and what is found at the other end.

``python deaths.py send`` prints where its senders are, as JSON by the name of the call.
It makes the calls when it reads a line, prints which of them have returned, and waits.
A reader, or the look at a state dict, holds the others up.

``python deaths.py receive`` reads metadata as JSON by the name of the row, and prints
``receiving`` when some of every checkpoint has arrived. A state dict that is there at
once is never assembled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aiockpt import Progress, TransportError
from aiockpt.testing import Drip, FaultProxy, assert_same
from aiockpt.transfer.destination import Destination
from tests.support.commandline import ENVIRONMENT
from tests.support.forkserver import children_of
from tests.support.proofs import CELLS
from tests.support.ranks import process
from tests.support.servers import Peer, settle
from tests.support.transports import (
    COUNT,
    MIB,
    MIB_LARGE,
    MIB_SENT,
    SHARING,
    Gate,
    Transport,
    begin,
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
from tests.support.waiting import is_running, wait_until

SLOW = Drip(rate=MIB / 2, burst=64 << 10)
"""A connection that needs seconds for what is received here."""

RECEIVES = [
    call
    for call in dict.fromkeys(call for call, _ in CELLS)
    if call.startswith(("HTTPTransport.recv", "HTTPTransport.prepare"))
]
"""The rows of all kinds of receives."""


def program(role: str, path: Path) -> AbstractAsyncContextManager[Process]:
    """Run this file with ``path`` for its files; kill what is left of it at the end."""
    environment = {**ENVIRONMENT, "TMPDIR": str(path)}
    return process(__file__, role, env=environment, cwd=path, stdin=PIPE)


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
    sender = await stack.enter_async_context(program("send", path))
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
        place = lending if lends(name) else metadata
        call = begin(receiver, name, place, **options, progress=partial(_note, begun))
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
    receiver = await stack.enter_async_context(program("receive", path))
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


MIB_OFFERED = 16

Call = Callable[[Transport], Coroutine[Any, Any, object]]


def send(sender: Transport) -> Coroutine[Any, Any, object]:
    """Send something else."""
    return sender.send_checkpoint([], 2, weights())


CALLS: dict[str, Call] = {
    "": lambda it: it.start(),
    "share=True": lambda it: it.start(),
    "start": lambda it: it.start(),
    "send_checkpoint": send,
    "send_checkpoint, zero_copy=True": send,
    "send_checkpoint, Server(process=True)": send,
    "allow_checkpoint": lambda it: it.allow_checkpoint(2),
    "disallow_checkpoint": lambda it: it.disallow_checkpoint(),
    "shutdown": lambda it: it.shutdown(),
}
"""What each of them is in the middle of; the first two are received from."""

RECEIVED_FROM = ("", "share=True")


def made(name: str) -> Transport:
    """Make a transport that waits for its readers, as those of live memory do."""
    options: dict[str, Any] = {"grace": 600, "insecure": True, "timeout": 600}
    if "process" in name:
        options |= {"process": True, "keep_last": 60}
    elif name not in (*RECEIVED_FROM, "start", "send_checkpoint"):
        options["zero_copy"] = True
    return transport(same_host=lends(name), **options)


def stage_for_ever(sender: Transport) -> None:
    """Let whatever is sent from now on be looked at for ever."""
    sender._stager._describe = lambda _: time.sleep(600)  # type: ignore[assignment,method-assign,return-value]


async def send_until_killed() -> None:
    """Offer, wait for a word, and make the calls."""
    senders = {name: made(name) for name in CALLS}
    for name, sender in senders.items():
        if name in RECEIVED_FROM:
            await sender.send_checkpoint([], 1, weights(mib=MIB_SENT, count=COUNT))
        elif name != "start":
            await sender.send_checkpoint([], 1, weights(mib=MIB_OFFERED))
    for name, sender in senders.items():
        if name.startswith("send_checkpoint") and "zero_copy" not in name:
            stage_for_ever(sender)
    urls = {name: sender.address() for name, sender in senders.items()}
    print(json.dumps(urls), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    calls = {
        name: asyncio.create_task(CALLS[name](sender))
        for name, sender in senders.items()
    }
    await asyncio.wait(calls.values(), timeout=0.2)
    returned = sorted(name for name, call in calls.items() if call.done())
    print(json.dumps(returned), flush=True)
    await asyncio.Event().wait()


async def begun(
    receiver: Transport, name: str, metadata: str | list[str]
) -> asyncio.Future[Any]:
    """Receive as the row says; return when something has arrived."""
    some = asyncio.Event()
    if "steps" in name:
        assert isinstance(metadata, str)
        steps = receiver.steps(metadata, after=1)
        return asyncio.ensure_future(anext(steps))
    if "follow" in name:
        assert isinstance(metadata, str)
        follower = receiver.follow(
            metadata, progress=lambda now: some.set() if now.bytes_done else None
        )
        following = asyncio.ensure_future(anext(follower))
        await some.wait()
        return following
    call = begin(
        *(receiver, name, metadata),
        **options_of(name, MIB_LARGE),
        progress=lambda now: some.set() if now.bytes_done else None,
    )
    task = asyncio.create_task(call)
    await some.wait()
    return task


async def never(_: Destination) -> object:
    """Make no state dict of what has arrived."""
    return await asyncio.Event().wait()


async def receive_until_killed() -> None:
    """Begin all of them."""
    setattr(Destination, "assemble", never)  # noqa: B010 - mypy: it is a method
    async with transport(timeout=600, stall_timeout=600, connections=1) as receiver:
        given = json.loads(sys.stdin.readline())
        calls = [begun(receiver, *each) for each in given.items()]
        tasks = await asyncio.gather(*calls)
        assert not any(task.done() for task in tasks)
        print("receiving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    roles = {"send": send_until_killed, "receive": receive_until_killed}
    asyncio.run(roles[sys.argv[1]]())
