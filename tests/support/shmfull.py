"""Sends, receives and saves where ``/dev/shm`` is full: ``shmfull.py DIRECTORY``.

It has a small ``/dev/shm`` of its own, which nobody else notices.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from pathlib import Path

import aiockpt
from aiockpt.testing import assert_same
from tests.support.transports import pair, receive, weights

MIB_MOVED = 16
UNAVAILABLE = 77
"""The exit code where it may not mount one."""

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 1 << 14, 1 << 18


def mount(nbytes: int) -> None:
    """Give this process, and its children, a ``/dev/shm`` of that size."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={nbytes}".encode()
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options)
    ):
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
        sys.exit(UNAVAILABLE)


def fill(place: Path) -> int:
    """Take all that there is; return how much that was."""
    taken = 0
    with place.open("wb", buffering=0) as file:
        try:
            while True:
                taken += file.write(bytes(1 << 16))
        except OSError:
            return taken


async def move(directory: Path) -> None:
    """Send, receive, save in the background, and load."""
    state = weights(mib=MIB_MOVED)
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], 1, state)
        assert_same(await receive(sender, receiver), state)
    async with aiockpt.make_async_checkpointer() as checkpointer:
        handle = await checkpointer.save(state, directory / "step-1")
        assert await handle.written()
        assert_same(await checkpointer.load(directory / "step-1"), state)


if __name__ == "__main__":
    mount(4 << 20)
    taken = fill(Path("/dev/shm/filled"))
    assert taken < MIB_MOVED << 20, "it is not small"
    assert os.statvfs("/dev/shm").f_bavail == 0
    asyncio.run(move(Path(sys.argv[1])))
    print("done")
