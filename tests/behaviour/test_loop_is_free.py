"""What takes a while is not done on the event loop: names, mappings, unmappings."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from aiockpt.errors import LocalProtocolError
from aiockpt.testing import assert_same
from tests.support.servers import settle
from tests.support.transports import receive, transport, weights

NAME = "sender.test"
NUMERIC = socket.AI_NUMERICHOST


class Names:
    """A name service that answers once it may, and knows one name.

    Addresses are read at once.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.go_on = threading.Event()
        self._ask = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if options.get("flags", 0) & NUMERIC:
            return self._ask(host, port, *args, **options)
        self.asked.append((str(host), threading.get_ident()))
        assert self.go_on.wait(60)
        if host != NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._ask("127.0.0.1", port, *args, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Have names looked up by a service that is slow until it may go on."""
    service = Names()
    monkeypatch.setattr(socket, "getaddrinfo", service)
    return service


@pytest.mark.parametrize("server", ["loop", "process"])
@pytest.mark.asyncio
async def test_a_name_is_looked_up_beside_the_loop(server: Any, names: Names) -> None:
    """A thread looks it up, before the URL is asked for.

    A start that waits for it can be cancelled at once, and repeated later.
    """
    sender = transport(host=NAME, advertise="127.0.0.1", process=server == "process")
    try:
        cancelled = asyncio.create_task(sender.start())
        await settle(lambda: names.asked, patience=60)  # the loop runs
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        names.go_on.set()
        await sender.start()
        assert sender.metadata().startswith("http://127.0.0.1:")
        assert {host for host, _ in names.asked} == {NAME}
        assert threading.get_ident() not in {thread for _, thread in names.asked}
        await sender.send_checkpoint([1], 1, weights())
        async with transport() as receiver:
            assert_same(await receive(sender, receiver), weights())
    finally:
        await sender.shutdown()


@pytest.mark.asyncio
async def test_an_unknown_name_is_told_with_the_address(names: Names) -> None:
    """The error is that of an address that this host does not have."""
    names.go_on.set()
    sender = transport(host="nobody.test")
    with pytest.raises(OSError, match=r"cannot listen on nobody\.test:0: Name or"):
        await sender.start()
    await sender.shutdown()


@pytest.mark.asyncio
async def test_the_url_of_a_name_is_there_once_it_was_looked_up(names: Names) -> None:
    """Before that, asking for it says what to do, and looks nothing up."""
    names.go_on.set()
    sender = transport(host=NAME)
    with pytest.raises(LocalProtocolError, match=r"await .*start\(\)"):
        sender.metadata()
    assert names.asked == []
    await sender.start()
    assert sender.metadata().startswith(f"http://{NAME}:")
    await sender.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", None, "::1"])
@pytest.mark.asyncio
async def test_the_url_of_an_address_needs_no_name_service(
    host: str | None, names: Names
) -> None:
    """It is there as soon as the transport is."""
    sender = transport(host=host)
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    assert sender.metadata()
    await sender.start()
    assert names.asked == []
    await sender.shutdown()


@pytest.mark.asyncio
async def test_a_thread_without_a_loop_may_look_the_name_up(names: Names) -> None:
    """The calling thread may block, since it runs no loop."""
    names.go_on.set()
    sender = transport(host=NAME)
    url = await asyncio.to_thread(sender.metadata)
    assert url.startswith(f"http://{NAME}:")
    await sender.shutdown()


# Each transfer runs in a fork of what has imported nothing but the package.
IMPORTS = """
import asyncio, os, sys, threading
import torch, aiockpt
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from torch import distributed

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == loop:
            print(kind, name, flush=True)

def made(server={}, **options):
    server = aiockpt.Server(host="127.0.0.1", **server)
    return aiockpt.HTTPTransport(server=server, **options)

async def over_http(sender, receiver):
    async with sender, receiver:
        for step in (1, 2):
            state["w"][step] = 9
            await sender.send_checkpoint(step=step, state_dict=state)
            await receiver.recv_checkpoint(metadata=sender.metadata(), step=step)
            await receiver.recv_checkpoint(
                metadata=sender.metadata(), into=template, have=True
            )
        async for prepared in receiver.follow(
            sender.metadata(), into=template, prepare=True
        ):
            prepared.apply()
            break

async def over_a_group(sender, receiver):
    async with sender, receiver:
        await asyncio.gather(
            sender.send_checkpoint([1], 1, state), receiver.recv_checkpoint(0, step=1)
        )

def ranks():
    store = distributed.HashStore()
    join = lambda r: distributed.ProcessGroupGloo(store, r, 2, timedelta(seconds=30))
    with ThreadPoolExecutor(2) as pool:
        return [aiockpt.PGTransport(each, 30) for each in pool.map(join, range(2))]

transfers = {
    "http": lambda: over_http(made(), made()),
    "memory": lambda: over_http(made(same_host=True), made(same_host=True)),
    "swarm": lambda: over_http(made(swarm=True), made(swarm=True)),
    "deltas": lambda: over_http(made({"keep_base": True}), made()),
    "group": lambda: over_a_group(*ranks()),
}
state = {"w": torch.ones(300_000), "words": ["a", 1]}
template = {"w": torch.zeros(300_000), "words": ["", 0]}
for kind, transfer in transfers.items():
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        print(kind, "status", status, flush=True)
        continue
    call, loop = transfer(), threading.get_ident()
    sys.meta_path.insert(0, Finder())
    asyncio.run(call)
    os._exit(0)
"""


@pytest.mark.usefixtures("fresh_interpreters")
def test_the_first_transfer_imports_nothing_on_the_loop() -> None:
    """An import reads files. A thread makes it, or the constructor does."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    kinds = ("http", "memory", "swarm", "deltas", "group")
    ended = [f"{kind} status 0" for kind in kinds]
    assert done.stdout.splitlines() == ended, done.stderr
