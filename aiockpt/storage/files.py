"""System calls on files: named errors, names moved in one step, locks, space, writes.

Everything here blocks. Nothing needs tensors. No other module of this package locks a
file, reserves space, or says that a disk is full.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError
from aiockpt.runtime.system import is_callers, is_programs

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = {
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP),
    errno.EPERM,  # a seccomp filter hides it
    errno.EXDEV,  # the directory is in a lower layer of an overlay
}

_REMEDIES: Final = {
    errno.EBUSY: "if it is a mount point, name a directory below it",
    errno.EXDEV: "the file system cannot rename this directory, so choose another name",
    errno.EROFS: "name a directory on a file system that can be written",
}
"""What to do about an error of the system whose text does not say it."""

_SYNC_FILE_RANGE_WRITE: Final = 2
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_MAX_VIEWS: Final = 1024  # the kernel's limit for one call

_MAX_NAME_BESIDE: Final = 40  # characters; a longer name is cut for a name beside it

_LOCK_PAUSE_S: Final = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


# -------------------------------------------------------------------------- errors


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Raise ``StorageError`` with the path where the system raises ``OSError``.

    An error of the caller's own code stays what it is: one of a callback, or of a
    signal's handler.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if is_callers(error) or is_programs(error):
            raise
        detail = error.strerror or str(error)
        if (remedy := _REMEDIES.get(error.errno or 0)) is not None:
            detail += f"; {remedy}"
        raise StorageError(str(path), detail) from error


@contextmanager
def saying_what_is_free(
    path: Path, fd: int, size: int, *, keep: int = 0
) -> Iterator[None]:
    """Raise `StorageError` for a full disk, with the bytes needed and the bytes free.

    The open file is first truncated to ``keep`` bytes, so that the bytes added to it do
    not count as used.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, StorageError):
            raise
        os.ftruncate(fd, keep)
        system = os.fstatvfs(fd)
        free = system.f_bavail * system.f_frsize
        detail = (
            f"{os.strerror(error.errno)}: {size / 1e6:.1f} MB are needed and "
            f"{free / 1e6:.1f} MB are free; make room or choose another place"
        )
        raise StorageError(str(path), detail) from error


@contextmanager
def in_place(path: Path) -> Iterator[None]:
    """Run what follows a rename: if it fails, the error says that ``path`` is there.

    Raises:
        StorageError: the system raised an ``OSError``. ``may_be_committed`` is true.
    """
    try:
        yield
    except OSError as error:
        if is_programs(error):
            raise
        detail = (
            "it is in its place, but the disk did not confirm it: "
            f"{error.strerror or error}; a power failure may undo it"
        )
        failure = StorageError(str(path), detail)
        failure.may_be_committed = True
        raise failure from error


# --------------------------------------------------------------------------- names


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False where the system cannot."""
    return _renamed(one, other, _RENAME_EXCHANGE)


def rename_to_new(one: Path, other: Path) -> None:
    """Rename without replacing. If the system cannot do that, check first.

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


def move_directory(one: Path, other: Path, *, first: str) -> None:
    """Rename a directory to a free name, or copy and remove it.

    An overlay cannot rename the directories of its lower layers, such as those of a
    container image. The copy appears in one step, on the disk. Only then the directory
    is removed, and its file ``first`` before all others.
    """
    try:
        os.rename(one, other)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        os.rename(_copy_directory(one), other)
        sync_directory(other.parent)
        with suppress(FileNotFoundError):
            os.unlink(one / first)
        sync_directory(one)
        shutil.rmtree(one)


def _copy_directory(path: Path) -> Path:
    """Copy a directory to a name of our own beside it, synced; return the copy.

    The copy has the same files, as further links, where the file system allows that.
    """
    copy = _aside(path, "part")
    try:
        shutil.copytree(path, copy, symlinks=True, copy_function=_link_or_copy)
        for directory, _, _ in os.walk(copy):
            sync_directory(Path(directory))
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def _link_or_copy(source: str, copy: str) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(copy, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(path: Path, suffix: str, *, like: Path | None = None) -> Path:
    """Rename to a name of our own in one step; return it.

    The name is ``.NAME.`` with eight random hexadecimal digits and ``suffix``. NAME is
    that of ``like``, or of the path. No other process knows the name, so nobody else
    touches what is there.
    """
    aside = _aside(like or path, suffix)
    os.rename(path, aside)
    return aside


def _aside(path: Path, suffix: str) -> Path:
    name, end = path.name.removeprefix("."), f".{secrets.token_hex(4)}.{suffix}"
    if (
        len(name) > _MAX_NAME_BESIDE
    ):  # or the new name might be too long for the file system
        name = name[: -len(f".{end}")]
    return path.with_name(f".{name}{end}")


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------- open files


def lock(fd: int) -> bool:
    """Lock a file against other processes; True if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def unlock(fd: int) -> None:
    """Unlock and close a file. Never raises."""
    with suppress(OSError):
        # A mapping, or a process that was forked meanwhile, has a duplicate.
        fcntl.flock(fd, fcntl.LOCK_UN)
    with suppress(OSError):
        os.close(fd)


def open_locked(path: Path, *, busy: str, wait: float = 0.0) -> int:
    """Open or create a file, and lock it; return its descriptor.

    `unlock` closes it.

    Args:
        path: The file; a symbolic link is refused.
        busy: The error's detail if another process has locked the file.
        wait: Seconds to retry for.

    Raises:
        StorageError: another process has it locked, or it is no regular file.
        OSError: it cannot be opened.
    """
    until = time.monotonic() + wait
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            locked = lock(fd)
            if locked and is_at(path, fd):
                ours, fd = fd, -1
                return ours
        finally:
            if fd >= 0:
                os.close(fd)
        # If the file was renamed or removed meanwhile, open the new one.
        if not locked:
            if time.monotonic() >= until:
                raise StorageError(str(path), busy)
            time.sleep(_LOCK_PAUSE_S)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file without waiting; return its descriptor.

    Args:
        path: The file.
        flags: As of ``os.open``. By default, it is opened for reading.
        mode: The permissions of a file that the call creates.

    Raises:
        StorageError: it is something else, such as a FIFO, which would block.
        OSError: it cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise StorageError(str(path), "it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def regular_file(path: Path, flags: int = 0) -> FileIO:
    """Open a regular file for reading, with more flags; see `open_regular`."""

    def opened(_: str, given: int) -> int:
        return open_regular(path, given | flags)

    return open(path, "rb", buffering=0, opener=opened)


def is_at(path: Path, fd: int) -> bool:
    """Say whether the open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    return False


def reserve(fd: int, size: int, *, always: bool = False) -> None:
    """Allocate the blocks of a file in advance, if the file system supports it.

    Writing is then faster, and a full disk is noticed before the first write. With
    ``always``, the C library writes zeros if the file system cannot allocate. A mapping
    of the file needs that: a write to a mapping on a full disk kills the process.
    """
    if always:
        os.posix_fallocate(fd, 0, size)
        return
    if not size or not hasattr(_libc, "fallocate64"):
        return
    offset = ctypes.c_int64
    if _libc.fallocate64(fd, 0, offset(0), offset(size)):
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Start to write dirty pages to the disk, so that a later fsync waits less."""
    if hasattr(_libc, "sync_file_range"):
        offset = ctypes.c_int64
        _libc.sync_file_range(fd, offset(start), offset(nbytes), _SYNC_FILE_RANGE_WRITE)


def read_at(path: Path, fd: int, views: Sequence[memoryview], at: int) -> None:
    """Fill views one after another from an offset, all of them.

    Raises:
        StorageError: the file ends too early; ``path`` is for the message.
    """
    for first in range(0, len(views), _MAX_VIEWS):
        left = [*views[first : first + _MAX_VIEWS]]
        while left:
            got = os.preadv(fd, left, at)
            if not got:
                raise StorageError(str(path), f"it ends at byte {at}")
            at += got
            left = _after(left, got)


def write_at(fd: int, views: Sequence[memoryview], at: int) -> None:
    """Write views one after another at an offset, all of them."""
    for first in range(0, len(views), _MAX_VIEWS):
        left = [*views[first : first + _MAX_VIEWS]]
        while left:
            written = os.pwritev(fd, left, at)
            at += written
            left = _after(left, written)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the views without their first ``nbytes`` bytes."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
