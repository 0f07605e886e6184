"""What storage is made of: named errors, locks, names moved in one step, writes.

Everything here blocks. Nothing needs tensors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError

__all__ = [
    "after",
    "exchange",
    "is_at",
    "lock",
    "named",
    "remove_tree",
    "rename_to_new",
    "reserve",
    "saying_what_is_free",
    "start_writeback",
    "sync_directory",
    "trash",
    "write_at",
]

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_SYNC_FILE_RANGE_WRITE: Final = 2
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_MAX_VIEWS: Final = 1024  # of one call, by the kernel

_LONG: Final = 40

_libc = ctypes.CDLL(None, use_errno=True)


# -------------------------------------------------------------------------- errors


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Raise ``StorageError`` with the path where the system raises ``OSError``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(str(path), error.strerror or str(error)) from error


@contextmanager
def saying_what_is_free(path: Path, fd: int, size: int) -> Iterator[None]:
    """Turn a full disk into an error that says how much is needed, and how much free.

    The open file is emptied first: what was written would count as used.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, StorageError):
            raise
        os.ftruncate(fd, 0)
        system = os.fstatvfs(fd)
        free = system.f_bavail * system.f_frsize
        detail = (
            f"{os.strerror(error.errno)}: {size / 1e6:.1f} MB are needed and "
            f"{free / 1e6:.1f} MB are free"
        )
        raise StorageError(str(path), detail) from error


# --------------------------------------------------------------------------- names


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False where the system cannot."""
    return _renamed(one, other, _RENAME_EXCHANGE)


def rename_to_new(one: Path, other: Path) -> None:
    """Rename, but replace nothing. Where the system cannot, look before it renames.

    Raises:
        FileExistsError: the name is taken.
    """
    if not _renamed(one, other, _RENAME_NOREPLACE):
        if os.path.lexists(other):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(other))
        os.rename(one, other)


def _renamed(one: Path, other: Path, how: int) -> bool:
    if not hasattr(_libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if not _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], how):
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def trash(path: Path) -> Path:
    """Take a directory's name away in one step; return the path to remove."""
    name, suffix = path.name.removeprefix("."), f".{secrets.token_hex(4)}.trash"
    if len(name) > _LONG:  # or the new name might be too long for the file system
        name = name[: -len(f".{suffix}")]
    unused = path.with_name(f".{name}{suffix}")
    os.rename(path, unused)
    return unused


def remove_tree(path: Path) -> None:
    """Remove a directory as far as possible; a sweep removes the rest."""
    shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Have the disk confirm the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------- open files


def lock(fd: int) -> bool:
    """Lock a file against other processes; also True where files cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_at(path: Path, fd: int) -> bool:
    """Tell whether the open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    return False


def reserve(fd: int, size: int) -> None:
    """Allocate the blocks of a file at once, where the system can.

    Writing is faster then, and a full disk is noticed before a byte is written. (The C
    library's ``posix_fallocate`` would write zeros where the file system cannot.)
    """
    if not size or not hasattr(_libc, "fallocate64"):
        return
    offset = ctypes.c_int64
    if _libc.fallocate64(fd, 0, offset(0), offset(size)):
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin now to write what a later fsync would wait for."""
    if hasattr(_libc, "sync_file_range"):
        offset = ctypes.c_int64
        _libc.sync_file_range(fd, offset(start), offset(nbytes), _SYNC_FILE_RANGE_WRITE)


def write_at(fd: int, views: Sequence[memoryview], at: int) -> None:
    """Write views one after another at an offset, all of them."""
    for first in range(0, len(views), _MAX_VIEWS):
        left = [*views[first : first + _MAX_VIEWS]]
        while left:
            written = os.pwritev(fd, left, at)
            at += written
            left = after(left, written)


def after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of views after their first ``nbytes``."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
