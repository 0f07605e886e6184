"""Remove old checkpoints, and the remains of dead processes. All functions block."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from aiockpt.errors import StorageError
from aiockpt.storage.directory import (
    MARKER,
    Checkpoint,
    StrPath,
    list_checkpoints,
    resolve_target,
)
from aiockpt.storage.files import is_at, lock, named, remove_tree, trash

__all__ = ["retire", "superfluous", "sweep"]

_LEFTOVER = re.compile(r"\.(.+)\.(part|old|[0-9a-f]{8}\.trash)", re.DOTALL)

_OURS = re.compile(r"(checkpoint_[0-9]+\.safetensors|commit\.json)(\.tmp)?")

# Where other hosts do not see this host's locks, only age tells what is abandoned.
_ABANDONED: Final = 3600.0


def superfluous(
    checkpoints: Sequence[Checkpoint],
    *,
    keep_last: int,
    keep_every: int | None,
    spare: Collection[Path],
) -> list[Checkpoint]:
    """Return the checkpoints that may be removed, from a list by ascending step.

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

    A process that reads a removed checkpoint can finish. A checkpoint that a symbolic
    link in the directory names is kept. Checkpoints in other directories do not count
    and are not touched.

    Raises:
        StorageError: one cannot be removed; the others are removed nevertheless.
    """
    place, linked = resolve_target(directory), set(_linked_from(directory))
    every = {each.path: each for each in list_checkpoints(directory)}
    found = superfluous(
        [each for path, each in every.items() if path.parent == place],
        keep_last=keep_last,
        keep_every=keep_every,
        spare=linked if spare is None else {spare, *linked},
    )
    failures: list[StorageError] = []
    for checkpoint in found:
        try:
            _remove(checkpoint.path)
        except StorageError as error:  # the others are removed all the same
            failures.append(error)
    for failure in failures:
        raise failure
    return found


def _remove(path: Path) -> None:
    with named(path):
        # Without this right, the files would stay in the trash.
        if not os.access(path, os.W_OK | os.X_OK):
            raise StorageError(str(path), os.strerror(errno.EACCES))
        remove_tree(trash(path))


def _linked_from(directory: StrPath) -> Iterator[Path]:
    """Yield the targets of the links in a directory."""
    with named(Path(directory)):
        links = [each.path for each in os.scandir(directory) if each.is_symlink()]
    for link in links:
        with suppress(StorageError):
            yield resolve_target(link)


def sweep(directory: StrPath, *, shared: bool) -> list[Path]:
    """Remove what dead saves left behind; return the removed paths.

    Directories with other files in them stay, whatever their name. What a process of
    this host is writing is locked, and stays. With ``shared``, other hosts may be
    writing, whose locks this one cannot see: what is younger than an hour stays.
    """
    place = Path(directory)
    with suppress(OSError):
        names = [each.name for each in os.scandir(place) if each.name.startswith(".")]
        return [*_swept(place, names, _ABANDONED if shared else 0.0)]
    return []


def _swept(place: Path, names: Iterable[str], age: float) -> Iterable[Path]:
    for name in names:
        found = _LEFTOVER.fullmatch(name)
        path = place / name
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        if found[2] == "part":
            _sweep_part(path, age)
        elif found[2] != "old":
            remove_tree(path)
        elif (path / MARKER).exists() and (place / found[1] / MARKER).exists():
            # If the new one were not there, this would be the checkpoint.
            with suppress(OSError):
                remove_tree(trash(path))
        if not path.exists():
            yield path


def _sweep_part(path: Path, age: float) -> None:
    """Remove what a dead save has written, if no process writes any of it."""
    with suppress(OSError), ExitStack() as stack:
        files: dict[Path, int] = {}
        for each in sorted(path.iterdir()):
            if not _OURS.fullmatch(each.name):
                return
            files[each] = os.open(each, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, files[each])
        newest = max(each.stat().st_mtime for each in (path, *files))
        young = time.time() - newest < age
        if young or not all(map(lock, files.values())):
            return
        for each, fd in files.items():
            if is_at(each, fd):  # and not a new file that has taken its place
                each.unlink()
        path.rmdir()
