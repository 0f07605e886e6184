"""Remove old checkpoints, and the remains of dead processes. All functions block."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError
from aiockpt.storage.directory import (
    MARKER,
    Checkpoint,
    StrPath,
    checkpoints_in,
    complete_at,
    resolve_target,
)
from aiockpt.storage.files import (
    is_at,
    lock,
    named,
    rename_to_new,
    set_aside,
    unlock,
)
from aiockpt.storage.lock import SaveLock, holder_of, lock_of, remove_temporary
from aiockpt.storage.ours import is_ours, move_along, others_in, remove_ours

logger = logging.getLogger("aiockpt")

_LEFTOVER = re.compile(
    r"\.(?P<name>.+?)(?P<aside>\.[0-9a-f]{8})?\.(?P<kind>part|old|trash|lock)",
    re.DOTALL,
)

# Where other hosts do not see this host's locks, only age tells what is abandoned.
_ABANDONED_AFTER_S: Final = 3600.0


def superfluous(
    checkpoints: Sequence[Checkpoint],
    *,
    keep_last: int,
    keep_every: int | None,
    spare: Collection[Path],
) -> list[Checkpoint]:
    """Return the checkpoints that may be removed, from a list in the order of commits.

    These are kept: the last ``keep_last`` (at least one), those whose step is a
    multiple of ``keep_every``, and those at ``spare``.
    """
    stay = {checkpoint.path for checkpoint in checkpoints[-max(keep_last, 1) :]}
    return [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.path not in stay
        and checkpoint.path not in spare
        and not (keep_every and checkpoint.step % keep_every == 0)
    ]


def retire(
    directory: StrPath,
    *,
    keep_last: int,
    keep_every: int | None = None,
    spare: Path | None = None,
) -> list[Checkpoint]:
    """Remove the `superfluous` checkpoints of a directory, each in one step.

    The order is that of the commits. A process that reads a removed checkpoint can
    finish. A checkpoint that a symbolic link in the directory names is kept, and so is
    one that a process is replacing. Checkpoints in other directories do not count
    and are not touched. Files that no checkpointer wrote stay where they are.

    Raises:
        StorageError: one cannot be removed; the others are removed nevertheless.
    """
    resolved, linked = resolve_target(directory), set(_linked_from(directory))
    every = {each.path: each for each in checkpoints_in(resolved)}
    found = superfluous(
        [each for path, each in every.items() if path.parent == resolved],
        keep_last=keep_last,
        keep_every=keep_every,
        spare=linked if spare is None else {spare, *linked},
    )
    return remove_each(found, _remove)


def remove_each(
    checkpoints: Sequence[Checkpoint], remove: Callable[[Checkpoint], bool]
) -> list[Checkpoint]:
    """Remove checkpoints; return those of which ``remove`` says that it has.

    Raises:
        StorageError: one cannot be removed; the others are removed nevertheless.
    """
    removed: list[Checkpoint] = []
    failures: list[StorageError] = []
    for checkpoint in checkpoints:
        try:
            if remove(checkpoint):
                removed.append(checkpoint)
        except StorageError as error:  # the others are removed all the same
            failures.append(error)
    for failure in failures:
        raise failure
    return removed


def _remove(checkpoint: Checkpoint) -> bool:
    """Remove a checkpoint; return False if a process is replacing it, or did."""
    path = checkpoint.path
    with named(path), ExitStack() as stack:
        # Without this right, the files would stay in the trash.
        if path.is_symlink() or not path.exists():
            return False
        if not os.access(path, os.W_OK | os.X_OK):
            raise StorageError(str(path), os.strerror(errno.EACCES))
        try:
            stack.enter_context(SaveLock(path.with_name(checkpoint.name), wait=0))
        except StorageError:
            return False
        except OSError:
            pass  # perhaps the disk is full, and needs this removal
        if not _is_still(checkpoint, path):
            return False
        try:
            unused = set_aside(path, "trash")
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _empty(path)  # a directory of an overlay's lower layer cannot be renamed
            return True
        # The sweep of another save may remove it from the trash, too.
        with suppress(FileNotFoundError, FileExistsError):
            if not _is_still(checkpoint, unused):
                # Where locks do not work, it may have been replaced just now.
                rename_to_new(unused, path)
                return False
            _remove_from_trash(unused, path)
    return True


def _is_still(checkpoint: Checkpoint, path: Path) -> bool:
    """Say whether the path still has this checkpoint."""
    said = checkpoint.serial, checkpoint.files
    with suppress(StorageError):
        found = complete_at(resolve_target(path))
        return found is not None and (found.serial, found.files) == said
    return False


def _remove_from_trash(unused: Path, path: Path) -> None:
    """Remove a checkpoint; what is not ours gets its old name again.

    The marker stays with it, so that a later save may replace the directory.
    """
    if not _empty(unused):
        try:
            rename_to_new(unused, path)
        except OSError as error:
            why = error.strerror or error
            logger.warning("%s keeps files of others: %s", unused, why)


def _empty(directory: Path) -> bool:
    """Remove what is ours; return False if files of others stay, with the marker."""
    if not others_in(directory):
        (directory / MARKER).unlink(missing_ok=True)  # first: it is no checkpoint then
        remove_ours(directory)
        return True
    for each in sorted(directory.iterdir()):
        if each.name != MARKER and is_ours(each):
            with suppress(OSError):
                each.unlink()
    return False


def _linked_from(directory: StrPath) -> Iterator[Path]:
    """Yield the targets of the links in a directory."""
    with named(Path(directory)):
        links = [each.path for each in os.scandir(directory) if each.is_symlink()]
    for link in links:
        with suppress(StorageError):
            yield resolve_target(link)


def sweep(directory: StrPath, *, shared: bool) -> list[Path]:
    """Remove what dead saves left behind; return the removed paths.

    Files that no checkpointer wrote stay, whatever their directory is called. What a
    process of this host is writing is locked, and stays. Other hosts may not see this
    host's locks. So what is younger than an hour stays, unless its lock names a process
    of this host that has ended. With ``shared``, several ranks write into one
    directory, and only the hour counts.
    """
    parent = Path(directory)
    with suppress(OSError):
        names = [each.name for each in os.scandir(parent) if each.name.startswith(".")]
        found = [match for each in names if (match := _LEFTOVER.fullmatch(each))]
        # Before the first one is removed, as a lock goes with what it protected.
        dead = {name for name in names if _left_by_the_dead(parent / name)}
        # The locks come last, as they tell other sweeps whose the rest is.
        found.sort(key=lambda match: match["kind"] == "lock")
        swept = (_swept(parent, each, dead, shared=shared) for each in found)
        return [path for path in swept if path is not None]
    return []


def _swept(
    parent: Path, found: re.Match[str], locks: Collection[str], *, shared: bool
) -> Path | None:
    path, kind = parent / found[0], found["kind"]
    if path.is_symlink():
        return None
    destination = parent / found["name"]
    whole = parent / f"{found['name']}{found['aside'] or ''}"  # it may end in a number
    dead = any(lock_of(each).name in locks for each in (destination, whole))
    age = 0.0 if dead and not shared else _ABANDONED_AFTER_S
    with suppress(OSError):
        if kind == "lock":
            _sweep_lock(path, age)
        elif not path.is_dir():
            return None
        elif kind == "part":
            _sweep_part(path, destination if found["aside"] else None, age, dead=dead)
        elif kind == "trash" and found["aside"]:
            remove_ours(path)
        elif kind == "old" and (whole / MARKER).exists() and is_ours(path / MARKER):
            _sweep_old(path, whole)
    return None if path.exists() else path


def _left_by_the_dead(path: Path) -> bool:
    """Say whether this is the lock of a process of this host that has ended."""
    holder = holder_of(path) if path.name.endswith(".lock") else None
    return holder is not None and holder.is_dead()


def _is_young(paths: Collection[Path], age: float) -> bool:
    newest = max(each.stat(follow_symlinks=False).st_mtime for each in paths)
    return time.time() - newest < age


def _sweep_lock(path: Path, age: float) -> None:
    """Remove the lock of a dead process."""
    holder = holder_of(path)
    if holder is None or _is_young([path], age):
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(fd) and is_at(path, fd):
            remove_temporary(path, holder.nonce)
            path.unlink()
    finally:
        unlock(fd)


def _sweep_old(path: Path, destination: Path) -> None:
    """Remove the predecessor of a whole checkpoint, unless it is being replaced."""
    with suppress(StorageError), SaveLock(destination, wait=0):
        # If the new one were not there, this would be the checkpoint.
        if (destination / MARKER).exists():
            move_along(path, destination)
            remove_ours(set_aside(path, "trash"))


def _sweep_part(
    path: Path, destination: Path | None, age: float, *, dead: bool
) -> None:
    """Remove what a dead save has written, if no process writes any of it.

    Args:
        path: The directory.
        destination: The checkpoint that it may have been, before a save replaced it.
        age: How many seconds it must be old.
        dead: Whether a lock says that a dead process has left it.
    """
    with ExitStack() as stack:
        others = others_in(path)
        files: dict[Path, int] = {}
        for each in sorted({*path.iterdir()}.difference(others)):
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            files[each] = os.open(each, flags)
            stack.callback(unlock, files[each])
        known = bool(files) or dead or destination is not None
        if not known or (others and destination is None):
            return
        if _is_young([path, *files], age):
            return
        if not all(lock(fd) for fd in files.values()):
            return
        if others and destination is not None and is_ours(destination / MARKER):
            move_along(path, destination)
        for each, fd in files.items():
            if is_at(each, fd):  # and not a new file that has taken its place
                each.unlink()
        path.rmdir()
