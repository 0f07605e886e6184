"""Which checkpoints stay, and what dead processes left behind. Everything blocks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from aiockpt.commit import is_at, lock, remove_tree, trash
from aiockpt.directory import Checkpoint, StrPath, list_checkpoints
from aiockpt.storage import named

__all__ = ["retire", "superfluous", "sweep"]

_LEFTOVER = re.compile(r"\.(.+)\.(part|old|trash)", re.DOTALL)

# On a file system whose locks other hosts do not see, age has to do.
_ABANDONED: Final = 3600.0


def superfluous(
    checkpoints: Sequence[Checkpoint],
    *,
    keep_last: int,
    keep_every: int | None,
    spare: Path | None,
) -> list[Checkpoint]:
    """Return which of ``checkpoints`` (by ascending step) need not stay.

    The last ``keep_last`` stay, those whose step is a multiple of ``keep_every``, and
    the one at ``spare``; never none of them.
    """
    stay = {checkpoint.path for checkpoint in checkpoints[-max(keep_last, 1) :]}
    return [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.path not in stay
        and checkpoint.path != spare
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

    Whatever is being read from one can be read on.

    Raises:
        StorageError: one cannot be removed.
    """
    found = superfluous(
        list_checkpoints(directory),
        keep_last=keep_last,
        keep_every=keep_every,
        spare=spare,
    )
    for checkpoint in found:
        with named(checkpoint.path):
            remove_tree(trash(checkpoint.path))
    return found


def sweep(directory: StrPath, *, shared: bool) -> list[Path]:
    """Remove what saves that died left behind; return what is gone.

    What a process of this host is writing is locked, and stays. With ``shared``, other
    hosts may be writing whose locks this one cannot see: an hour must have passed.
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
        if found is None:
            continue
        if found[2] == "part":
            _sweep_part(path, age)
        elif found[2] == "trash":
            remove_tree(path)
        elif (place / found[1]).exists():  # else it is the checkpoint
            with suppress(OSError):
                remove_tree(trash(path))
        if not path.exists():
            yield path


def _sweep_part(path: Path, age: float) -> None:
    """Remove what a dead save has written, if nobody writes any of it."""
    with suppress(OSError), ExitStack() as stack:
        files: dict[Path, int] = {}
        for each in sorted(path.iterdir()):
            files[each] = os.open(each, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, files[each])
        newest = max(each.stat().st_mtime for each in (path, *files))
        young = time.time() - newest < age
        if young or not all(map(lock, files.values())):
            return
        for each, fd in files.items():
            if is_at(each, fd):  # and not one that has taken its place
                each.unlink()
        path.rmdir()
