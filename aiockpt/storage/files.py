"""What commits and removals are made of: names taken, given and swapped in one step.

Everything here blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["exchange", "is_at", "lock", "remove_tree", "rename_to_new", "trash"]

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_LONG: Final = 40

_libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    return _renamed(one, other, _RENAME_EXCHANGE)


def rename_to_new(one: Path, other: Path) -> None:
    """Rename, but replace nothing; where the system cannot, it looks first.

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
    """Take a directory's name away in one step; return what to remove."""
    name, suffix = path.name.removeprefix("."), f".{secrets.token_hex(4)}.trash"
    if len(name) > _LONG:  # so as not to become longer, which may be too long
        name = name[: -len(f".{suffix}")]
    unused = path.with_name(f".{name}{suffix}")
    os.rename(path, unused)
    return unused


def remove_tree(path: Path) -> None:
    """Remove a directory as far as that is possible; a sweep does the rest."""
    shutil.rmtree(path, ignore_errors=True)


def lock(fd: int) -> bool:
    """Lock a file against other processes; True where it cannot be locked."""
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
