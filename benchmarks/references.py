"""The references: copies in memory, raw sockets, plain files, and torchft's transports.

A raw receiver connects, says which bytes it wants, and receives them with blocking
calls in as many threads as connections. It parses and verifies nothing: that is what
the sockets of this machine can do. Copies and sockets can also digest what they move,
which is the least that anybody who verifies must do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from xxhash import xxh3_128

from benchmarks.memory import fresh, ready, touch

T = TypeVar("T")

_PIECE = 4 << 20
_WRITE = 8 << 20
_RANGE = struct.Struct("<QQ")
_TIMEOUT = timedelta(seconds=300)
_THREADS = ThreadPoolExecutor(16, "benchmarks")


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return what ``work`` returns in a thread; nobody cancels a benchmark."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


def _set_congestion(listener: socket.socket, algorithm: str | None) -> None:
    """Choose the congestion control of accepted sockets; None: the system's."""
    if algorithm is not None:
        with suppress(OSError, AttributeError):  # not on Linux, or not allowed
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode()
            )


# ---------------------------------------------------------------- memory and disk


def copy(kind: str, source: memoryview) -> Callable[[], object]:
    """Return what copies all of ``source`` by one ``memmove`` to memory of a kind."""
    ready("warm", source.nbytes)
    touched = kind == "touched"
    destination = fresh("like ours" if touched else kind, source.nbytes)
    if touched:
        touch(destination)
    to, origin = (
        ctypes.addressof(ctypes.c_char.from_buffer(each))
        for each in (destination, source)
    )
    return lambda: ctypes.memmove(to, origin, source.nbytes) and destination


def write_raw(path: Path, memory: memoryview, *, fsync: bool) -> float:
    """Write a new file, its blocks allocated first; return the seconds."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(memory))  # or large writes wait for the disk
        while memory:
            memory = memory[os.write(fd, memory[:_WRITE]) :]
        if fsync:
            os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def read_raw(path: Path, memory: memoryview, *, threads: int) -> None:
    """Read the last bytes of a file, as many as there are, in so many threads."""
    fd = os.open(path, os.O_RDONLY)
    first = os.fstat(fd).st_size - len(memory)
    share = -(-len(memory) // threads)

    def work(start: int) -> None:
        stop = min(start + share, len(memory))
        while start < stop:
            piece = memory[start : min(start + _WRITE, stop)]
            count = os.preadv(fd, [piece], first + start)
            if not count:
                raise EOFError(path)
            start += count

    try:
        list(_THREADS.map(work, range(0, len(memory), share)))
    finally:
        os.close(fd)


# ---------------------------------------------------------------- raw sockets


class RawServer:
    """Sends ranges of touched memory, each connection in a thread of its own."""

    def __init__(self, memory: memoryview, host: str, congestion: str | None) -> None:
        self._memory = memory
        self._listener = socket.create_server((host, 0))
        _set_congestion(self._listener, congestion)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more; open connections get the rest."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends the accept
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # that is how it ends
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(ConnectionError):
            start, stop = _RANGE.unpack(peer.recv(_RANGE.size, socket.MSG_WAITALL))
            peer.sendall(self._memory[start:stop])


async def fetch_raw(
    address: tuple[str, int],
    memory: memoryview,
    *,
    connections: int,
    digest: bool = False,
) -> None:
    """Receive all of ``memory``, a part of it over each connection."""

    def work(start: int) -> None:
        rest, state = memory[start : start + size], xxh3_128()
        with socket.create_connection(address) as sock:
            sock.sendall(_RANGE.pack(start, start + rest.nbytes))
            while rest.nbytes:
                count = sock.recv_into(rest[:_PIECE])
                if not count:
                    raise ConnectionResetError("the raw sender closed the connection")
                if digest:
                    state.update(rest[:count])
                rest = rest[count:]

    size = -(-memory.nbytes // connections)
    starts = range(0, memory.nbytes, size)
    await asyncio.gather(*(in_thread(work, start) for start in starts))


# ---------------------------------------------------------------- torchft and torch


class Torchft:
    """One HTTP transport of torchft."""

    def __init__(self, num_chunks: int, congestion: str | None = None) -> None:
        module = import_module("torchft.checkpointing.http_transport")
        self._transport: Any = module.HTTPTransport(_TIMEOUT, num_chunks)
        _set_congestion(self._transport._server.socket, congestion)  # noqa: SLF001

    def send(self, state_dict: Mapping[str, torch.Tensor], host: str) -> str:
        """Offer the state dict itself, which is not copied; return the metadata."""
        self._transport.send_checkpoint([1], 1, state_dict, _TIMEOUT)
        url = urlsplit(self._transport.metadata())  # which names the host
        return f"{url.scheme}://{host}:{url.port}{url.path}"

    def receive(self, metadata: str) -> dict[str, torch.Tensor]:
        """Fetch what a peer offers."""
        state: dict[str, torch.Tensor] = self._transport.recv_checkpoint(
            0, metadata, 1, _TIMEOUT
        )
        return state

    def close(self) -> None:
        """Stop its server and its thread."""
        self._transport.disallow_checkpoint()
        self._transport.shutdown()


_GROUP_MODULES = {
    "torchft": "torchft.checkpointing.pg_transport",
    "torch": "torch.distributed.checkpoint._pg_transport",
}


def group_end(
    by: str, group: object, template: Mapping[str, torch.Tensor] | None = None
) -> tuple[Callable[[Any], object], Callable[[], Any]]:
    """Return ``(send, receive)`` of torchft's or torch's transport over a group."""
    fill = None if template is None else (lambda: template)
    made = import_module(_GROUP_MODULES[by]).PGTransport
    end = made(group, _TIMEOUT, torch.device("cpu"), fill)
    if by == "torch":  # it has the interface of torchft's without steps
        return (lambda state: end.send_checkpoint([1], state)), (
            lambda: end.recv_checkpoint(0)
        )
    return (lambda state: end.send_checkpoint([1], 1, state, _TIMEOUT)), (
        lambda: end.recv_checkpoint(0, end.metadata(), 1, _TIMEOUT)
    )
