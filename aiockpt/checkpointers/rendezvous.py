"""Where a restarted trainer and the process that its predecessor left behind meet.

A Unix socket in a directory that belongs to this user alone. Its name comes from the
directory of the checkpoints and the rank, which the restarted trainer knows.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from aiockpt.errors import StorageError
from aiockpt.storage.checkpoint_file import named

__all__ = [
    "DONE",
    "Kept",
    "address",
    "private_directory",
    "runtime_dir",
    "socket_name",
]

DONE = b"done"
"""What a restarted trainer says when the snapshot is its own."""


class Kept(msgspec.Struct, frozen=True):
    """What is handed over with a parcel of the sealed header, and the arena."""

    path: bytes
    step: int


def runtime_dir(configured: str | None) -> str:
    """Return the directory of the sockets: this user's, gone after a reboot."""
    if configured is not None:
        return os.path.abspath(configured)
    if own := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(own, "aiockpt")
    return os.path.join(tempfile.gettempdir(), f"aiockpt-{os.geteuid()}")


@contextmanager
def private_directory(path: str) -> Iterator[int]:
    """Make and open the directory, which nobody else may enter; give its descriptor.

    Raises:
        StorageError: it belongs to somebody else, or others may enter it.
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


def socket_name(directory: str, rank: int) -> str:
    """Return the name of the socket for a directory of checkpoints and a rank."""
    where = f"{os.path.realpath(directory)}\0{rank}".encode(errors="surrogateescape")
    return f"{hashlib.sha256(where).hexdigest()[:32]}.sock"


def address(directory_fd: int, name: str) -> str:
    """Return an address within an open directory: a path may be too long for one."""
    return f"/proc/self/fd/{directory_fd}/{name}"
