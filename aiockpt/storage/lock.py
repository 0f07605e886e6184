"""The lock of a checkpoint's path: one saver at a time, from opening to rename.

The lock is a file beside the checkpoint, ``.step-100.lock``. It exists while a process
saves to the path, or removes what is there. It says which process that is. A save of a
single file, such as ``model.pt``, has such a lock, too. Its lock also names the
temporary file or directory, which a later save removes if the process dies.

Everything here blocks, and needs no tensors.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from aiockpt.errors import StorageError
from aiockpt.storage.files import is_at, open_locked, regular_file, unlock

_MAX_BYTES: Final = 4096


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a lock: the process that made it."""

    aiockpt_lock: int
    process: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    host: str
    kernel: str
    nonce: Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]

    def is_dead(self) -> bool:
        """Say whether the process ran under this kernel, and has ended."""
        if self.kernel != _kernel():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def lock_of(destination: Path) -> Path:
    """Return the name of a checkpoint's lock."""
    return destination.with_name(f".{destination.name}.lock")


def temporary_of(path: Path, nonce: str) -> Path:
    """Return the temporary name of what is written under a lock."""
    return path.with_name(f"{path.name.removesuffix('.lock')}.{nonce}.tmp")


def remove_temporary(path: Path, nonce: str) -> None:
    """Remove what a dead process was writing under a lock.

    Raises:
        OSError: it cannot be removed.
    """
    left = temporary_of(path, nonce)
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left)
    else:
        left.unlink(missing_ok=True)


def holder_of(path: Path) -> Holder | None:
    """Return what a lock says; None if it is not there, or not a checkpointer's."""
    with suppress(OSError), regular_file(path) as file:
        return _said(file.fileno())
    return None


class SaveLock(AbstractContextManager["SaveLock"]):
    """The right to save to a path, or to remove what is there.

    Args:
        destination: The checkpoint's final path.
        wait: Seconds to wait for another process.

    Attributes:
        path: The lock.
        temporary: Where a file, or a directory, is written before it gets its name. No
            other process has this name.

    Raises:
        StorageError: another process has it, or the name belongs to something else.
        OSError: the lock cannot be made.
    """

    _fd = -1

    def __init__(self, destination: Path, *, wait: float) -> None:
        self.path = lock_of(destination)
        nonce = secrets.token_hex(4)
        self.temporary = temporary_of(self.path, nonce)
        try:
            self._fd = open_locked(self.path, busy="", wait=wait)
        except StorageError:
            raise StorageError(str(destination), _busy(self.path)) from None
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP):
                raise StorageError(str(self.path), _FOREIGN) from None
            raise
        try:
            self._take(nonce)
        except BaseException:  # a signal's handler may raise anything
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # A signal's handler has raised before anything else had it.
        self.release()

    def release(self) -> None:
        """Remove and unlock it. Idempotent. Never raises."""
        if self._fd >= 0:
            with suppress(OSError):
                if is_at(self.path, self._fd):
                    self.path.unlink()
            self._close()

    def _take(self, nonce: str) -> None:
        """Write whose lock it is, unless the file is not a checkpointer's."""
        found = os.fstat(self._fd)
        empty = stat.S_ISREG(found.st_mode) and not found.st_size
        dead = None if empty else _said(self._fd)
        if not empty and dead is None:
            raise StorageError(str(self.path), _FOREIGN)
        with suppress(OSError):  # a full disk: it locks without saying whose it is
            if dead is not None and dead.is_dead():
                remove_temporary(self.path, dead.nonce)
            text = _own(nonce)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        unlock(fd)


_FOREIGN: Final = "no checkpointer wrote it; move it away, or save to another path"


def _busy(path: Path) -> str:
    holder = holder_of(path)
    who = f" (process {holder.process} on {holder.host})" if holder else ""
    return (
        f"another process is writing it{who}; wait until it has finished, or save to "
        "another path"
    )


_HOLDER: Final = msgspec.json.Decoder(Holder)


def _said(fd: int) -> Holder | None:
    with suppress(msgspec.MsgspecError):
        return _HOLDER.decode(os.pread(fd, _MAX_BYTES, 0))
    return None


def _own(nonce: str) -> bytes:
    name = os.uname().nodename
    return msgspec.json.encode(Holder(1, os.getpid(), name, _kernel(), nonce)) + b"\n"


@functools.cache
def _kernel() -> str:
    """Return what tells this running kernel from every other one.

    Containers share a kernel, and each may count its processes anew.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename
