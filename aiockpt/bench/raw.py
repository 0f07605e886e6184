"""The references: a plain copy in memory, and a plain copy through sockets.

A raw receiver connects, says which bytes it wants, and receives them with blocking
calls in as many threads as connections. Nothing is parsed and nothing is verified: it
is what the sockets of this machine can do. Either reference can compute the digests of
what it copies, beside the copying, and do nothing else: that is what whoever verifies
could reach here.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from xxhash import xxh3_128

from aiockpt.bench.memory import address_of
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.tasks import run_all

__all__ = [
    "RawServer",
    "congestion_control",
    "fetch_raw",
    "memcpy",
    "memcpy_and_digest",
]

_CONGESTION = b"reno"  # what the library asks for on the way to the same host
_PIECE = 4 << 20
_BLOCK = 256 << 10  # is still in a core's own cache when it is digested
_RANGE = struct.Struct("<QQ")


def memcpy(destination: memoryview, source: memoryview) -> float:
    """Copy all of ``source`` in one thread; return the seconds."""
    to, origin = address_of(destination), address_of(source)
    started = time.perf_counter()
    ctypes.memmove(to, origin, source.nbytes)
    return time.perf_counter() - started


async def memcpy_and_digest(
    destination: memoryview, source: memoryview, bridge: Bridge, *, threads: int
) -> float:
    """Copy all of ``source``, a part of it in each thread; return the seconds."""
    size = -(-source.nbytes // threads)
    starts = range(0, source.nbytes, size)
    started = time.perf_counter()
    await run_all(
        partial(
            bridge.run,
            _copy_and_digest,
            destination[start : start + size],
            source[start : start + size],
        )
        for start in starts
    )
    return time.perf_counter() - started


def _copy_and_digest(destination: memoryview, source: memoryview) -> None:
    to, origin, digest = address_of(destination), address_of(source), xxh3_128()
    for at in range(0, source.nbytes, _BLOCK):
        block = destination[at : at + _BLOCK]
        ctypes.memmove(to + at, origin + at, block.nbytes)
        digest.update(block)


def congestion_control() -> tuple[str, str]:
    """Return the system's congestion control, and what raw copies get."""
    with socket.socket() as sock:
        before = _congestion_of(sock)
        _prefer(sock)
        return before, _congestion_of(sock)


def _prefer(sock: socket.socket) -> None:
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION)


def _congestion_of(sock: socket.socket) -> str:
    with suppress(OSError, AttributeError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return name.rstrip(b"\0").decode()
    return "unknown"


class RawServer:
    """Sends ranges of touched memory, each connection in a thread of its own.

    Without ``ask`` connections keep the system's congestion control.
    """

    def __init__(self, memory: memoryview, bridge: Bridge, *, ask: bool = True) -> None:
        self._memory = memory
        self._bridge = bridge
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0)
        if ask:
            _prefer(self._listener)  # whom it accepts inherits it
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    async def aclose(self) -> None:
        """Stop; who is being sent to gets the rest first."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._listener)
            peer.settimeout(None)
            self._start(self._bridge.run(self._serve, peer))

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(ConnectionError):
            start, stop = _RANGE.unpack(peer.recv(_RANGE.size, socket.MSG_WAITALL))
            peer.sendall(self._memory[start:stop])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def fetch_raw(
    port: int,
    connections: int,
    destination: Callable[[], memoryview],
    bridge: Bridge,
    *,
    digest: bool = False,
) -> None:
    """Receive into ``destination()``, a part of it over each connection."""
    memory = destination()
    size = -(-memory.nbytes // connections)
    starts = range(0, memory.nbytes, size)
    await run_all(
        partial(bridge.run, _fetch, port, memory, start, start + size, digest)
        for start in starts
    )


def _fetch(
    port: int,
    memory: memoryview,
    start: int,
    stop: int,
    digest: bool,  # noqa: FBT001 - a thread's function takes no keywords
) -> None:
    rest, state = memory[start:stop], xxh3_128()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(_RANGE.pack(start, start + rest.nbytes))
        while rest.nbytes:
            count = sock.recv_into(rest[:_PIECE])
            if not count:
                raise ConnectionResetError("the raw sender went away")
            if digest:
                state.update(rest[:count])
            rest = rest[count:]
