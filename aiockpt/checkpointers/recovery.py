"""`recover`: the last snapshot of a trainer that has died, without reading a disk."""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from aiockpt.checkpointers.barriers import default_rank_info
from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.rendezvous import (
    DONE,
    Kept,
    address,
    private_directory,
    socket_name,
)
from aiockpt.checkpointers.rendezvous import runtime_dir as runtime_of
from aiockpt.errors import CheckpointNotFoundError, IntegrityError, WorkerError
from aiockpt.format.chunks import digest
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.memory.mapped import trusted_header
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.channel import receive, unpack
from aiockpt.runtime.packets import is_ours
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.transport import Timeout, seconds

__all__ = ["Recovered", "recover"]

_CLOSING: Final = 5.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a trainer that has died staged last.

    Attributes:
        state_dict: It, in memory that is this process's alone.
        step: Its step.
        path: Where it was saved to; whether it is whole there, ``latest`` knows.
    """

    state_dict: Any
    step: int
    path: str


async def recover(
    directory: str | os.PathLike[str],
    *,
    rank_info: RankInfo | None = None,
    runtime_dir: str | None = None,
    timeout: Timeout = 30.0,
    allow_pickle: bool = False,
) -> Recovered:
    """Take over the last snapshot that was to be saved below ``directory``.

    The checkpoint process of a trainer that has died keeps it for
    ``keep_last_seconds``. It ends when the snapshot was taken over, which happens
    once. Every digest is verified; not a byte is copied, or read from a disk.

    Args:
        directory: The parent of the checkpoint's directory.
        rank_info: Which rank's; found from ``torch.distributed`` by default.
        runtime_dir: As in the config of the trainer that has died.
        timeout: How long the process may take to answer.
        allow_pickle: Also rebuild leaves that were staged as pickles.

    Raises:
        CheckpointNotFoundError: nobody keeps one.
        IntegrityError: it is damaged; it stays where it is.
        WorkerError: who keeps it does not answer, or is of another user.

    If cancelled, it stays where it is, for a later call.
    """
    rank = (rank_info or default_rank_info()).global_rank
    bridge = Bridge(threads=1, name="aiockpt-recover")
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.settimeout(seconds(timeout))
    place = os.fspath(directory), rank, runtime_of(runtime_dir)
    take = partial(_take, keeper, *place, allow_pickle=allow_pickle)
    try:
        try:
            taken = await bridge.run(take)
        finally:
            await bridge.aclose(timeout=_CLOSING)
        keeper.settimeout(0)
        with suppress(ConnectionError):  # who has died keeps nothing either
            # Behind the last await: now the caller gets it for certain.
            keeper.send(DONE)
    finally:
        keeper.close()
    return taken


def _take(
    keeper: socket.socket,
    directory: str,
    rank: int,
    runtime: str,
    *,
    allow_pickle: bool,
) -> Recovered:
    _connect(keeper, directory, rank, runtime)
    try:
        data, fds = receive(keeper)
    except TimeoutError:
        limit = keeper.gettimeout()
        raise WorkerError(
            f"the process that keeps the snapshot said nothing for {limit:g} s"
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
    kept = msgspec.json.decode(data, type=Kept)
    return Recovered(state, kept.step, os.fsdecode(kept.path))


def _connect(keeper: socket.socket, directory: str, rank: int, runtime: str) -> None:
    if not os.path.isdir(runtime):
        raise _nothing(directory, rank)
    try:
        with private_directory(runtime) as fd:
            keeper.connect(address(fd, socket_name(directory, rank)))
    except (FileNotFoundError, ConnectionRefusedError):
        raise _nothing(directory, rank) from None
    if not is_ours(keeper):
        raise WorkerError("the process that keeps the snapshot is another user's")


def _nothing(directory: str, rank: int) -> CheckpointNotFoundError:
    detail = f"no process keeps a snapshot of rank {rank} that belongs there"
    return CheckpointNotFoundError(directory, detail)


def _rebuilt(
    manifest: Manifest, arena: int, directory: str, *, allow_pickle: bool
) -> object:
    size = max(manifest.segment_bytes, 1)
    # What is written to is copied then, page by page: nobody else's memory changes.
    held = mmap.mmap(arena, size, access=mmap.ACCESS_COPY)
    whole = memoryview(held)
    for chunk, expected in enumerate(manifest.digests):
        start, stop = manifest.grid.range(chunk)
        actual = digest([whole[start:stop]])
        if actual != expected:
            raise IntegrityError(
                chunk=chunk, expected=expected, actual=actual, url=directory
            )
    tensors = tensors_over(manifest, held)
    limits = replace(FILE_LIMITS, max_header_bytes=1 << 40)
    return assemble(
        Frame.of(manifest), tensors, limits=limits, allow_pickle=allow_pickle
    )
