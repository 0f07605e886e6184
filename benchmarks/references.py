"""The references: copies in memory, raw sockets, plain files, and torchft's transport.

A raw receiver connects, says which bytes it wants, and receives them with blocking
calls in as many threads as connections. It parses and verifies nothing: that is what
the sockets of this machine can do. Sockets and copies can also digest what they move
and do nothing else, which is what anybody who verifies could reach.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
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

import torch
from xxhash import xxh3_128

from benchmarks.state import address_of

__all__ = [
    "TORCHFT_CHUNKS",
    "RawServer",
    "Torchft",
    "fetch_raw",
    "has_torchft",
    "in_thread",
    "memcpy",
    "memcpy_and_digest",
    "write_raw",
]

T = TypeVar("T")

TORCHFT_CHUNKS = (0, 4, 8)
"""The values of ``num_chunks`` that are tried; the best one counts."""

_CONGESTION = b"reno"  # what the library asks for on the way to the same host
_PIECE = 4 << 20
_BLOCK = 256 << 10  # is still in a core's own cache when it is digested
_WRITE = 8 << 20
_RANGE = struct.Struct("<QQ")
_TIMEOUT = timedelta(seconds=300)
_THREADS = ThreadPoolExecutor(16, "benchmarks")


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return what ``work`` returns in a thread; nobody cancels a benchmark."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, work, *arguments)


# ---------------------------------------------------------------------- memory, disk


def memcpy(destination: memoryview, source: memoryview) -> float:
    """Copy all of ``source`` in one thread; return the seconds."""
    to, origin = address_of(destination), address_of(source)
    started = time.perf_counter()
    ctypes.memmove(to, origin, source.nbytes)
    return time.perf_counter() - started


async def memcpy_and_digest(
    destination: memoryview, source: memoryview, threads: int
) -> float:
    """Copy and digest all of ``source``, a part in each thread; return the seconds."""

    def work(start: int) -> None:
        to, origin, digest = address_of(destination), address_of(source), xxh3_128()
        for at in range(start, min(start + size, source.nbytes), _BLOCK):
            block = destination[at : min(at + _BLOCK, start + size)]
            ctypes.memmove(to + at, origin + at, block.nbytes)
            digest.update(block)

    size = -(-source.nbytes // threads)
    started = time.perf_counter()
    starts = range(0, source.nbytes, size)
    await asyncio.gather(*(in_thread(work, start) for start in starts))
    return time.perf_counter() - started


def write_raw(path: Path, memory: memoryview, *, fsync: bool) -> float:
    """Write a new file, its blocks allocated first; return the seconds."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(memory))  # or large writes wait for the disk
        rest = memory
        while rest:
            rest = rest[os.write(fd, rest[:_WRITE]) :]
        if fsync:
            os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


# --------------------------------------------------------------------------- sockets


class RawServer:
    """Sends ranges of touched memory, each connection in a thread of its own."""

    def __init__(self, memory: memoryview, host: str) -> None:
        self._memory = memory
        self._listener = socket.create_server((host, 0))
        with suppress(OSError, AttributeError):  # accepted sockets inherit it
            self._listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION
            )
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

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
    connections: int,
    memory: memoryview,
    *,
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


# --------------------------------------------------------------------------- torchft


def has_torchft() -> bool:
    """Return whether torchft can be measured here."""
    return importlib.util.find_spec("torchft") is not None


class Torchft:
    """One HTTP transport of torchft."""

    def __init__(self, num_chunks: int) -> None:
        module = import_module("torchft.checkpointing.http_transport")
        self._transport: Any = module.HTTPTransport(_TIMEOUT, num_chunks)

    def send(self, state_dict: Mapping[str, torch.Tensor]) -> str:
        """Offer the state dict itself, which is not copied; return the metadata."""
        self._transport.send_checkpoint([1], 1, state_dict, _TIMEOUT)
        metadata: str = self._transport.metadata()
        return metadata

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
