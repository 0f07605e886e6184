"""`recover`: the last snapshot of a trainer that has died, without reading a disk.

The memory is the arena that the trainer has staged into. It lives as long as a process
has its descriptor, and the checkpoint process has it. `LastSnapshot` keeps it there
after the trainer's death, and hands the descriptor to one process, which then has the
memory alone.

The two meet at a Unix socket, in a directory that belongs to this user alone. Its name
comes from the directory of the checkpoints and the rank, which the restarted trainer
knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import socket
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from aiockpt.checkpointers.config import CLOSING_S, RankInfo
from aiockpt.checkpointers.ranks import default_rank_info
from aiockpt.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    StorageError,
    WorkerError,
)
from aiockpt.format.chunks import digest
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.memory.snapshot import MappedSnapshot, trusted_header
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.ipc import encode, is_ours, pack, receive, unpack
from aiockpt.storage.directory import absolute, expanded
from aiockpt.storage.files import named
from aiockpt.storage.write import WritableSnapshot
from aiockpt.transport import Timeout, seconds

logger = logging.getLogger("aiockpt")

_POLL_S: Final = 1.0
_MIN_TIMEOUT_S: Final = 1e-3  # a process that is there answers sooner

_DONE: Final = b"done"
"""What a restarted trainer says once the snapshot is its own."""


class _SnapshotOffer(msgspec.Struct, frozen=True):
    """What is handed over with a parcel of the sealed header, and the arena."""

    path: bytes
    step: int


_OFFER: Final = msgspec.msgpack.Decoder(_SnapshotOffer)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a trainer that has died staged last.

    Attributes:
        state_dict: The state dict, in memory that is this process's alone.
        step: Its step.
        path: Where it was saved to; ``latest`` knows whether it is whole there.
    """

    state_dict: Any
    step: int
    path: str


# ------------------------------------------------------------- the restarted trainer


async def recover(
    directory: str | os.PathLike[str],
    *,
    rank_info: RankInfo | None = None,
    runtime_dir: str | None = None,
    timeout: Timeout = 30.0,
    allow_pickle: bool = False,
) -> Recovered:
    """Take over the last snapshot that a dead trainer was saving below ``directory``.

    The checkpoint process of the dead trainer keeps the snapshot for
    ``keep_last_seconds``. It can be taken over once; then that process exits. All
    digests are verified. No byte is copied or read from a disk. If cancelled, the
    process keeps the snapshot for a later call.

    Args:
        directory: The parent of the checkpoint's directory.
        rank_info: The rank to recover. By default the rank in ``torch.distributed``,
            or 0.
        runtime_dir: The ``runtime_dir`` of the dead trainer's config.
        timeout: How long the process may take to answer, in seconds or as a
            ``timedelta``.
        allow_pickle: Also rebuild leaves that were staged as pickles, which runs code.

    Raises:
        CheckpointNotFoundError: no process keeps a snapshot.
        IntegrityError: the snapshot is damaged; the process keeps it.
        UnsupportedLeafError: a leaf has a type that this process does not know; the
            process keeps the snapshot.
        StorageError: a leaf is a pickle, without ``allow_pickle``; the process keeps
            the snapshot.
        WorkerError: the process does not answer, or belongs to another user.
    """
    rank = (rank_info or default_rank_info()).global_rank
    where, runtime = expanded(directory), socket_directory(runtime_dir)
    limit = seconds(timeout)
    bridge = Bridge(threads=1, name="aiockpt-recover")
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Zero would mean a socket that does not block, whose errors are others.
    holder.settimeout(min(max(limit, _MIN_TIMEOUT_S), threading.TIMEOUT_MAX))
    take = partial(
        _take, holder, limit, where, rank, runtime, allow_pickle=allow_pickle
    )
    try:
        try:
            taken = await bridge.run(take)
        finally:
            await bridge.aclose(timeout=CLOSING_S)
        holder.settimeout(0)
        with suppress(ConnectionError):  # a dead process keeps nothing either
            # After the last await: the caller gets the snapshot for certain.
            holder.send(_DONE)
    finally:
        holder.close()
    return taken


def _take(
    holder: socket.socket,
    limit: float,
    directory: str,
    rank: int,
    runtime: str,
    *,
    allow_pickle: bool,
) -> Recovered:
    try:
        _connect(holder, directory, rank, runtime)
        data, fds = receive(holder)
    except (TimeoutError, BlockingIOError):  # it has too many guests, or is busy
        raise WorkerError(
            f"the process that keeps the snapshot did not answer for {limit:g} s"
        ) from None
    except ConnectionError:  # it died before it had accepted
        data, fds = b"", []
    if not data:
        raise _nothing(directory, rank)
    parcel, arena = fds
    try:
        manifest = trusted_header(unpack(parcel))
        state = _rebuilt(manifest, arena, directory, allow_pickle=allow_pickle)
    finally:
        os.close(arena)
    offer = _OFFER.decode(data)
    return Recovered(state, offer.step, os.fsdecode(offer.path))


def _connect(holder: socket.socket, directory: str, rank: int, runtime: str) -> None:
    if not os.path.isdir(runtime):
        raise _nothing(directory, rank)
    try:
        with _private_directory(runtime) as fd:
            holder.connect(_address(fd, runtime, _socket_name(directory, rank)))
    except (FileNotFoundError, ConnectionRefusedError):
        raise _nothing(directory, rank) from None
    if not is_ours(holder):
        raise WorkerError("the process that keeps the snapshot belongs to another user")


def _nothing(directory: str, rank: int) -> CheckpointNotFoundError:
    detail = f"no process keeps a snapshot of rank {rank} that belongs there"
    return CheckpointNotFoundError(directory, detail)


def _rebuilt(
    manifest: Manifest, arena: int, directory: str, *, allow_pickle: bool
) -> object:
    # The checkpoint process imports this module, and does without torch.
    from aiockpt.state.nodes import decoder_by_name
    from aiockpt.state.rebuild import Frame, assemble, tensors_over
    from aiockpt.storage.checkpoint_file import blaming_file

    size = max(manifest.segment_bytes, 1)
    # A page that is written to is copied then: no other process's memory changes.
    held = mmap.mmap(arena, size, access=mmap.ACCESS_COPY)
    whole = memoryview(held)
    for chunk, expected in enumerate(manifest.digests):
        start, stop = manifest.grid.range(chunk)
        actual = digest([whole[start:stop]], manifest.algorithm)
        if actual != expected:
            raise IntegrityError(
                chunk=chunk, expected=expected, actual=actual, url=directory
            )
    limits = replace(FILE_LIMITS, max_header_bytes=1 << 40)
    with blaming_file(directory):
        return assemble(
            Frame.of(manifest),
            tensors_over(manifest, held),
            limits=limits,
            allow_pickle=allow_pickle,
            by_name=partial(decoder_by_name, imports=False),
        )


# -------------------------------------------------------------- the checkpoint process


@dataclass(slots=True)
class SharedSnapshot:
    """A snapshot in the trainer's arena. It owns a descriptor of the arena.

    Attributes:
        number: Which of the trainer's saves it is.
        path: The checkpoint's path.
        rank: The rank that has staged it.
        header: The header without digests.
        arena: The descriptor; -1 once it is closed.
        manifest: The manifest with digests, once they are known.
    """

    number: int
    path: str
    rank: int
    header: bytes
    arena: int
    manifest: Manifest | None = None

    def mapped(self) -> MappedSnapshot:
        """Map the arena."""
        return MappedSnapshot(trusted_header(self.header), self.arena)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


class LastSnapshot:
    """Holds on to the last snapshot. Once it is offered, one process may take it over.

    It belongs to the checkpoint process's event loop.

    Args:
        runtime_dir: The directory of the socket.
        seconds: How long to wait for a process that takes it over.
    """

    def __init__(self, runtime_dir: str, seconds: float) -> None:
        self._runtime_dir = runtime_dir
        self._seconds = seconds
        # The last one, and the one before: the last may be dropped before it is begun.
        self._held: deque[SharedSnapshot] = deque()
        self._offering: asyncio.Task[None] | None = None

    def hold(self, newer: SharedSnapshot) -> None:
        """Hold a newer snapshot, with another descriptor of its arena."""
        self._held.append(replace(newer, arena=os.dup(newer.arena)))
        if len(self._held) > 2:
            self._held.popleft().close()

    def drop(self, number: int) -> None:
        """Forget a snapshot that is not written: the one before is the last again."""
        if self._held and self._held[-1].number == number:
            self._held.pop().close()

    def seal(self, number: int, manifest: Manifest) -> None:
        """Remember the digests of a snapshot, which the writer has computed."""
        for held in self._held:
            if held.number == number:
                held.manifest = manifest

    def offer(self) -> None:
        """Let a restarted trainer take it over, from now on."""
        if self._held:
            loop = asyncio.get_running_loop()
            self._offering = loop.create_task(self._offer(self._held[-1]))

    async def ended(self) -> None:
        """Wait until the snapshot has a new owner, or the time is up."""
        if self._offering is not None:
            await asyncio.wait({self._offering})

    async def close(self) -> None:
        """Forget everything, and leave nothing behind. Idempotent."""
        if self._offering is not None:
            self._offering.cancel()
            await asyncio.wait({self._offering})
        while self._held:
            self._held.pop().close()

    async def _offer(self, last: SharedSnapshot) -> None:
        """Listen until one process has taken the snapshot over, or the time is up."""
        name = _socket_name(os.path.dirname(last.path), last.rank)
        taken = asyncio.Event()
        try:
            with _listening(self._runtime_dir, name) as (listener, is_there):
                loop = asyncio.get_running_loop()
                serving = loop.create_task(_serve(listener, last, taken))
                try:
                    async with asyncio.timeout(self._seconds):
                        while not taken.is_set() and is_there():
                            with suppress(TimeoutError):
                                async with asyncio.timeout(_POLL_S):
                                    await taken.wait()
                finally:
                    serving.cancel()
                    await asyncio.wait({serving})
        except TimeoutError:
            pass
        except OSError as error:
            logger.error("the last snapshot is not kept: %s", error)


async def _serve(
    listener: socket.socket, last: SharedSnapshot, taken: asyncio.Event
) -> None:
    """Hand the snapshot to each process that comes, until one of them has it."""
    loop = asyncio.get_running_loop()
    manifest = last.manifest
    if manifest is None:  # the writer may be busy for long
        bridge = Bridge(threads=1, name="aiockpt-seal")
        try:
            manifest = await bridge.run(_sealed, last)
        finally:
            await bridge.aclose(timeout=_POLL_S)
    offer = encode(_SnapshotOffer(os.fsencode(last.path), manifest.step))
    async with asyncio.TaskGroup() as guests:
        while True:
            try:
                guest, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_POLL_S)  # it has left, or no descriptor is free
                continue
            guests.create_task(_hand_over(guest, last, manifest, offer, taken))


async def _hand_over(
    guest: socket.socket,
    last: SharedSnapshot,
    manifest: Manifest,
    offer: bytes,
    taken: asyncio.Event,
) -> None:
    with guest, suppress(OSError):
        if not is_ours(guest):
            return
        parcel = pack(manifest.header)
        try:
            socket.send_fds(guest, [offer], [parcel, last.arena])
        finally:
            os.close(parcel)
        if await asyncio.get_running_loop().sock_recv(guest, 64) == _DONE:
            taken.set()


@contextmanager
def _listening(
    runtime_dir: str, name: str
) -> Iterator[tuple[socket.socket, Callable[[], bool]]]:
    """Listen at a name; give the socket, and whether the name is still the socket's.

    Raises:
        OSError: nobody can listen there.
    """
    path = os.path.join(runtime_dir, name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(0)
        with _private_directory(runtime_dir) as fd:
            own = f"{name}.{os.getpid()}"
            listener.bind(_address(fd, runtime_dir, own))
            listener.listen()
            # In one step: there is always a predecessor's socket, or this one.
            os.replace(own, name, src_dir_fd=fd, dst_dir_fd=fd)
            inode = os.stat(name, dir_fd=fd).st_ino

        def is_there() -> bool:
            with suppress(OSError):
                return os.lstat(path).st_ino == inode
            return False

        try:
            yield listener, is_there
        finally:
            if is_there():
                with suppress(OSError):
                    os.unlink(path)


def _sealed(held: SharedSnapshot) -> Manifest:
    snapshot = held.mapped()
    try:
        return WritableSnapshot(snapshot).seal()
    finally:
        snapshot.close()


# -------------------------------------------------------------------- where they meet


def socket_directory(configured: str | None) -> str:
    """Return the directory of the sockets: this user's, gone after a reboot."""
    if configured is not None:
        return os.path.abspath(expanded(configured))
    if own := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(own, "aiockpt")
    try:
        parent = tempfile.gettempdir()
    except OSError as error:
        detail = (
            "a checkpoint process that keeps the last snapshot needs a directory for "
            "its socket: set runtime_dir, or XDG_RUNTIME_DIR"
        )
        raise StorageError("no temporary directory can be written", detail) from error
    return os.path.join(parent, f"aiockpt-{os.geteuid()}")


@contextmanager
def _private_directory(path: str) -> Iterator[int]:
    """Make and open the directory, which nobody else may enter; give its descriptor.

    Raises:
        StorageError: it belongs to another user, or others may enter it.
    """
    with named(Path(path)):
        os.makedirs(path, mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags)
    try:
        owner = os.fstat(fd)
        if owner.st_uid != os.geteuid() or stat.S_IMODE(owner.st_mode) & 0o077:
            detail = "it must belong to this user, who alone may enter it (mode 0700)"
            raise StorageError(path, detail)
        yield fd
    finally:
        os.close(fd)


def _socket_name(directory: str, rank: int) -> str:
    place = absolute(directory, follow_links=True)
    where = f"{place}\0{rank}".encode(errors="surrogateescape")
    return f"{hashlib.sha256(where).hexdigest()[:32]}.sock"


def _address(directory_fd: int, directory: str, name: str) -> str:
    """Return an address within an open directory: a path may be too long for one."""
    through = f"/proc/self/fd/{directory_fd}"
    return os.path.join(through if os.path.exists(through) else directory, name)
