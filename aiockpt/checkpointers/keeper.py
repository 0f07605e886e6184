"""Keeps the last staged snapshot after the trainer's death, for its successor.

The memory is the arena that the trainer has staged into: it lives as long as somebody
has its descriptor. It is handed over to one process, which then has it alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from aiockpt.checkpointers.jobs import Job, sealed
from aiockpt.checkpointers.rendezvous import (
    DONE,
    Kept,
    address,
    private_directory,
    socket_name,
)
from aiockpt.format.manifest import Manifest
from aiockpt.memory.mapped import MappedSnapshot, trusted_header
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import encode, pack
from aiockpt.runtime.packets import is_ours

__all__ = ["Keeper"]

logger = logging.getLogger("aiockpt")

_LOOK: Final = 1.0


@dataclass(slots=True)
class _Held:
    number: int
    path: str
    header: bytes
    arena: int
    manifest: Manifest | None = None

    def close(self) -> None:
        os.close(self.arena)


class Keeper:
    """Holds on to the last snapshot; when it is started, it hands it over.

    Args:
        runtime_dir: Where the socket is.
        rank: The trainer's.
        seconds: How long it stays after its start.
    """

    def __init__(self, runtime_dir: str, rank: int, seconds: float) -> None:
        self._runtime_dir = runtime_dir
        self._rank = rank
        self._seconds = seconds
        # The last one, and the one before: the last may be dropped before it is begun.
        self._held: deque[_Held] = deque()
        self._listener: socket.socket | None = None
        self._name = ""
        self._inode = 0
        self._guests: set[socket.socket] = set()
        self._done = asyncio.Event()
        self._until = 0.0
        self._sealing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Keeper {self._name or 'idle'} held={len(self._held)}>"

    def hold(self, job: Job) -> None:
        """Take a snapshot for the last one."""
        number, path = job.request.number, os.fsdecode(job.request.path)
        self._held.append(_Held(number, path, job.header, os.dup(job.arena)))
        if len(self._held) > 2:
            self._held.popleft().close()

    def let_go(self, number: int) -> None:
        """Forget one that was dropped: the one before it is the last one again."""
        if self._held and self._held[-1].number == number:
            self._held.pop().close()

    def seal(self, number: int, manifest: Manifest) -> None:
        """Remember the digests of one that is held."""
        for held in self._held:
            if held.number == number:
                held.manifest = manifest
        for guest in tuple(self._guests):
            self._hand_over(guest)

    def start(self) -> None:
        """Let a successor come."""
        if not self._held:
            self._done.set()
            return
        loop = asyncio.get_running_loop()
        self._until = loop.time() + self._seconds
        last = self._held[-1]
        try:
            self._listen(os.path.dirname(last.path))
        except OSError as error:
            logger.error("the last snapshot is not kept: %s", error)
            self._done.set()
            return
        if last.manifest is None:  # the writer may be busy for long
            self._sealing = loop.create_task(self._seal_it(last))

    async def ended(self) -> None:
        """Wait until the snapshot has a new owner, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._until):
                while not self._done.is_set() and self._is_there():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK):
                            await self._done.wait()

    def close(self) -> None:
        """Forget everything, and leave nothing behind. Idempotent."""
        loop = asyncio.get_running_loop()
        for guest in tuple(self._guests):
            self._leave(guest)
        if self._sealing is not None:
            self._sealing.cancel()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._remove()
        while self._held:
            self._held.pop().close()

    async def _seal_it(self, held: _Held) -> None:
        bridge = Bridge(threads=1, name="aiockpt-seal")
        try:
            self.seal(held.number, await bridge.run(_sealed, held))
        finally:
            await bridge.aclose(timeout=_LOOK)

    def _listen(self, directory: str) -> None:
        name = socket_name(directory, self._rank)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.settimeout(0)
            with private_directory(self._runtime_dir) as fd:
                own = f"{name}.{os.getpid()}"
                listener.bind(address(fd, own))
                listener.listen()
                # In one step, so that a predecessor's is there, or this one.
                os.replace(own, name, src_dir_fd=fd, dst_dir_fd=fd)
                self._inode = os.stat(name, dir_fd=fd).st_ino
        except BaseException:
            listener.close()
            raise
        self._name = name
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def _is_there(self) -> bool:
        """Tell whether the socket is still this one's, and not a successor's."""
        with suppress(OSError):
            path = os.path.join(self._runtime_dir, self._name)
            return os.lstat(path).st_ino == self._inode
        return False

    def _remove(self) -> None:
        if self._is_there():
            with suppress(OSError):
                os.unlink(os.path.join(self._runtime_dir, self._name))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return
        guest.settimeout(0)
        if not is_ours(guest):
            guest.close()
            return
        self._guests.add(guest)
        asyncio.get_running_loop().add_reader(guest, self._hear, guest)
        self._hand_over(guest)

    def _hand_over(self, guest: socket.socket) -> None:
        held = self._held[-1]
        if held.manifest is None:
            return  # it is still being sealed
        parcel = pack(held.manifest.header)
        try:
            message = encode(Kept(os.fsencode(held.path), held.manifest.step))
            socket.send_fds(guest, [message], [parcel, held.arena])
        except OSError:
            self._leave(guest)
        finally:
            os.close(parcel)

    def _hear(self, guest: socket.socket) -> None:
        try:
            said = guest.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == DONE:
            self._done.set()
        self._leave(guest)

    def _leave(self, guest: socket.socket) -> None:
        self._guests.discard(guest)
        asyncio.get_running_loop().remove_reader(guest)
        guest.close()


def _sealed(held: _Held) -> Manifest:
    snapshot = MappedSnapshot(trusted_header(held.header), held.arena)
    try:
        return sealed(snapshot)
    finally:
        snapshot.close()
