"""A disk, or the shared memory, that is full."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt import StorageError
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.shmfull import UNAVAILABLE
from tests.support.shortages import FaultUnavailableError, small_disk

SUPPORT = Path(__file__).parents[1] / "support"
DISK = 8 << 20


def state(nbytes: int, fill: int) -> dict[str, Any]:
    """Return a state dict of that size."""
    return {"weight": torch.full((nbytes,), fill, dtype=torch.uint8), "fill": fill}


def failed(made: Any, new: Any, path: Path) -> StorageError | None:
    """Save; return why it could not be."""
    try:
        made.save(new, path)
    except StorageError as error:
        return error
    return None


@proves("fault 16")
def test_a_disk_that_is_full_keeps_the_old_checkpoint(
    tmp_path: Path, record: Record
) -> None:
    """Saves of all sizes, some of which fit beside it."""
    chance = random.Random(16)
    fits = {True: 0, False: 0}
    with (
        small_disk(tmp_path / "disk", DISK) as disk,
        aiockpt.make_sync_checkpointer() as made,
    ):
        old = state(1 << 20, 1)
        made.save(old, disk / "last")
        for _ in range(record.pick(20, 500)):
            new = state(chance.randrange(5 << 20, 9 << 20), 2)
            error = failed(made, new, disk / "last")
            assert_same(made.load(disk / "last"), old if error else new)
            assert [path.name for path in disk.iterdir()] == ["last"]
            if error:
                assert str(disk) in error.path
                assert "MB are needed and" in str(error)
            else:
                made.save(old, disk / "last")
            fits[not error] += 1
            record.ran()
    assert all(fits.values()), fits


@proves("fault 19")
def test_a_full_shm_kills_nobody(tmp_path: Path, record: Record) -> None:
    """Nothing of ours lies there: it works, and is not ended by SIGBUS."""
    program = [sys.executable, str(SUPPORT / "shmfull.py"), str(tmp_path)]
    done = subprocess.run(
        program,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        raise FaultUnavailableError("small /dev/shm", done.stderr)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr == ""
    record.ran()
    record.note("a send, a receive, a save and a load of 16 MiB")
