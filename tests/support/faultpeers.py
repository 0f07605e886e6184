"""Senders and receivers in processes of their own, for faults that hit a process.

``faultpeers.py send OPTIONS`` serves bytes and obeys lines on its standard input;
``faultpeers.py receive OPTIONS`` receives them, and does to itself what it is told when
a part has arrived. Options are JSON. Neither loads torch: they are there at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from aiockpt import AiockptError, Progress
from aiockpt.http.listen import open_sockets
from aiockpt.http.protocol import Origin
from aiockpt.http.server import CheckpointServer
from aiockpt.http.store import Store
from aiockpt.runtime.bridge import Bridge
from aiockpt.swarm.endpoint import SwarmEndpoint
from aiockpt.testing import Fault, FaultProxy
from tests.support import rangepeer, servers
from tests.support.shortages import exhausted_fds

TOKEN = servers.TOKEN
MIB = 1 << 20


def noise(mib: float, *, step: int = 1) -> dict[str, Any]:
    """Return the state dict that a sender of these options serves."""
    import torch

    data = bytearray(random.Random(step).randbytes(int(mib * MIB)))
    return {"weight": torch.frombuffer(data, dtype=torch.uint8)}


class Peer:
    """A sender in a process of its own."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.split(":")[2].split("/")[0])

    def signal(self, number: signal.Signals) -> None:
        """Do to it what the kernel or an operator does."""
        self.process.send_signal(number)

    async def ask(self, command: str) -> Any:
        """Let it do something; return what it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command.encode() + b"\n")
        return json.loads(await self.process.stdout.readline())


@asynccontextmanager
async def running(role: str, **options: Any) -> AsyncIterator[Process]:
    """Run this script; whatever happens, it is gone afterwards."""
    process = await create_subprocess_exec(
        *(sys.executable, __file__, role, json.dumps(options)),
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def sender(**options: Any) -> AsyncIterator[Peer]:
    """Start a sender of ``noise(mib)`` as step 1; give it once it serves."""
    async with running("send", **options) as process:
        yield Peer(process, await said(process))


async def said(process: Process) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    assert line, "the process ended"
    return line


def next_faults(proxy: FaultProxy, *faults: Fault) -> None:
    """Let these go wrong with the next connections of a proxy, and nothing after."""
    done = proxy.statistics().connections
    proxy.faults = [Fault()] * done + list(faults)


class Hold(Fault):
    """The connection rests at byte ``count`` until it is told to go on."""

    def __init__(self, count: int) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._count = count

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Send what comes before, then wait."""
        before = max(self._count - at, 0)
        await pipe.send(data[:before])
        if before < len(data):
            self.reached.set()
            await self.go_on.wait()
            await pipe.send(data[before:])


class Line(Fault):
    """All connections of a proxy together get so many bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, 0.0

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Wait for one's turn."""
        now = time.monotonic()
        self._free = max(self._free, now) + len(data) / self._rate
        await asyncio.sleep(self._free - now)
        await pipe.send(data)


async def outcome(receiving: asyncio.Task[Any], *allowed: dict[str, Any]) -> bool:
    """Return whether a receive succeeded; fail on anything else than is allowed."""
    try:
        got = await receiving
    except AiockptError:
        return False
    import torch

    assert any(torch.equal(got["weight"], each["weight"]) for each in allowed)
    return True


class At:
    """A ``progress`` that calls a function once when a share has arrived."""

    def __init__(self, share: float, act: Callable[[], object]) -> None:
        self.since = 0.0
        self._share, self._act = share, act

    def __call__(self, progress: Progress) -> None:
        """Act, once."""
        done, total = progress.bytes_done, progress.bytes_total
        if not self.since and total and done >= self._share * total:
            self._act()
            self.since = time.monotonic()


def share(seed: int) -> float:
    """Return a random share, neither of the very first nor of the last bytes."""
    return random.Random(seed).uniform(0.05, 0.25)


# What the processes do.


class Serving:
    """A sender's commands."""

    def __init__(self, server: CheckpointServer, store: Store) -> None:
        self._server, self._store = server, store
        self._hogs = ExitStack()

    def obey(self, line: str) -> object:
        """Do what a line says."""
        command, *arguments = line.split()
        return getattr(self, command)(*arguments)

    def exhaust(self, left: str) -> None:
        """Leave so many descriptors."""
        self._hogs.enter_context(exhausted_fds(left=int(left)))

    def relieve(self) -> None:
        """Let there be descriptors again."""
        self._hogs.close()

    def readers(self) -> int:
        """Tell how many bodies are being sent."""
        return self._store.statistics().readers


async def serve(options: dict[str, Any]) -> None:
    """Serve step 1 until standard input ends."""
    size, chunk = int(options.pop("mib", 16) * MIB), options.pop("chunk_bytes", MIB)
    content = servers.Memory(size, step=1, chunk_bytes=chunk)
    host, port = options.pop("host", "127.0.0.1"), options.pop("port", 0)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    config = servers.config(**options)
    bridge, store = Bridge(threads=1, name="faultpeers"), Store(config.options)
    server = CheckpointServer(config, store, SwarmEndpoint(config, bridge, store))
    sockets = open_sockets(host, port)
    port = sockets[0].getsockname()[1]
    await server.start(sockets)
    await store.publish(content, grace=0)
    print(f"http://{host}:{port}/checkpoint/", flush=True)
    commands = Serving(server, store)
    while line := (await reader.readline()).decode():
        print(json.dumps(commands.obey(line)), flush=True)
    await server.stop()
    await store.close()


async def fetch(options: dict[str, Any]) -> None:
    """Receive; at a fifth of it say ``now`` and send a signal to this very process."""
    source = Origin(options.pop("url"), TOKEN)
    number, size = options.pop("signal", 0), 0

    def count(nbytes: int, chunks: int) -> None:
        nonlocal size
        size += nbytes
        if number and size > outline.grid.segment_bytes / 5:
            print("now", flush=True)
            os.kill(os.getpid(), number)

    async with rangepeer.receiver(**options) as client:
        manifest = await rangepeer.fetch_manifest(
            client, source, 1, deadline=rangepeer.soon(30)
        )
        outline = manifest.outline
        print("ready", flush=True)
        sys.stdin.readline()
        since = time.monotonic()
        memory = rangepeer.Memory(outline.grid.segment_bytes)
        await rangepeer.fetch_chunks(
            client, source, outline, memory, range(len(outline.grid)), on_progress=count
        )
        print(json.dumps([since, time.monotonic()]), flush=True)


if __name__ == "__main__":
    does = {"send": serve, "receive": fetch}[sys.argv[1]]
    asyncio.run(does(json.loads(sys.argv[2])))
