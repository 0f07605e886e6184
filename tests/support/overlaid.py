"""Saves over checkpoints of an overlay's lower layer: ``overlaid.py DIRECTORY``.

The directory has the checkpoints ``step-0`` to ``step-29``, copies of one that
`torn.prepare` leaves. Each save over one of them dies one change of a directory later
than the one before, until one does not die. It prints how many have died, and how many
of them had begun to remove what they replace.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from aiockpt.checkpointers import CheckpointWriter, CheckpointWriterConfig, RankInfo
from aiockpt.storage.directory import MARKER, step_of
from tests.support.torn import Bytes, value_at

CHANGES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
"""The events that come before a change of a directory."""


def save(path: Path, step: int = 2, keep_last: int | None = None) -> None:
    """Save what no checkpoint of the image holds."""
    config = CheckpointWriterConfig(keep_last=keep_last)
    CheckpointWriter(config, RankInfo(0, 1)).write_staged(path, Bytes(step), step)


def dies(path: Path, after: int) -> bool:
    """Save in a fork, which dies after so many changes; say whether it made more."""
    child = os.fork()
    if not child:
        left = after

        def count(event: str, _: object) -> None:
            nonlocal left
            left -= event in CHANGES
            if left < 0:
                os._exit(9)

        sys.addaudithook(count)
        save(path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), code
    return code == 9


def main(place: Path) -> None:
    """Overwrite checkpoints, and let a save remove those that are left."""
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        os.rename(place / "step-0", place / "renamed")
    died = halfway = 0
    for path in sorted(place.iterdir(), key=step_of):
        is_dead = dies(path, died)
        died += is_dead
        halfway += not (path / MARKER).exists()
        assert value_at(path) in (1, 2)  # all of it is there
        save(path)
        assert value_at(path) == 2
        if not is_dead:
            break
    else:
        raise AssertionError("too few checkpoints")
    save(place / "step-100", step=100, keep_last=1)
    assert [each.name for each in place.iterdir()] == ["step-100"]
    print(died, halfway)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
