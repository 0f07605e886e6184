"""What a checkpointer wrote, and what others put beside it.

A save removes and replaces only files that a checkpointer wrote. It knows them by their
name and by how they begin. Everything else in a directory stays, or moves along.

Everything here blocks, and needs no tensors.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiockpt.format.header import LENGTH_BYTES, PREFIX
from aiockpt.storage.directory import MARKER, RANK_FILE
from aiockpt.storage.files import regular_file, rename_to_new

logger = logging.getLogger("aiockpt")

_NAME: Final = re.compile(rf"({RANK_FILE.pattern}|{re.escape(MARKER)})(\.tmp)?")
_MARKED: Final = re.compile(rb'\{\s*"aiockpt"')
_HEAD_BYTES: Final = 64


def begins_as_ours(fd: int) -> bool:
    """Say whether an open file begins as a checkpoint file of this library does.

    A file of zeros does: its header is written last.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    start = os.pread(fd, LENGTH_BYTES + len(PREFIX), 0)
    known = start[LENGTH_BYTES:]
    return not any(start) or bool(known and PREFIX.startswith(known))


def is_ours(path: Path) -> bool:
    """Say whether a checkpointer wrote the file, by its name and how it begins."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return False
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
    except OSError:
        return False
    with suppress(OSError), regular_file(path, os.O_NOFOLLOW) as file:
        if found[1] != MARKER:
            return begins_as_ours(file.fileno())
        head = os.pread(file.fileno(), _HEAD_BYTES, 0)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return not head or _MARKED.match(head) is not None
    return False


def others_in(directory: Path) -> list[Path]:
    """Return what no checkpointer wrote in a directory.

    Another rank may rename, remove or make its file at the same time.
    """
    found = [each for each in sorted(directory.iterdir()) if not is_ours(each)]
    return [each for each in found if os.path.lexists(each) and not is_ours(each)]


def remove_ours(directory: Path) -> None:
    """Remove what a checkpointer wrote, and the directory if nothing else is left.

    It removes as much as it can, and raises nothing. A sweep removes the rest.
    """
    with suppress(OSError):
        if directory.is_symlink():
            return
        for each in sorted(directory.iterdir()):
            if is_ours(each):
                with suppress(OSError):
                    each.unlink()
        directory.rmdir()


def move_along(directory: Path, destination: Path) -> None:
    """Move what no checkpointer wrote from a replaced checkpoint to the new one.

    What the new one has already stays where it is, and a warning names it.
    """
    with suppress(FileNotFoundError):
        for each in others_in(directory):
            try:
                rename_to_new(each, destination / each.name)
            except OSError as error:
                with suppress(OSError):
                    if os.path.samefile(
                        each, destination / each.name
                    ):  # two links of it
                        each.unlink()
                        continue
                why = error.strerror or error
                logger.warning("%s did not move to %s: %s", each, destination, why)
