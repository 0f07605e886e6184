"""A writer of checkpoints dies, or its system calls fail: nothing is ever torn."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import torn
from tests.support.commandline import ENVIRONMENT
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.shortages import in_overlay

pytestmark = [pytest.mark.torch_free, pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"

FEW = {
    "KILL": ("fsync", "pwritev,pwritev2", "rename", "renameat2", "write"),
    "EIO": ("fsync", "openat", "pwritev,pwritev2", "rename", "write"),
    "ENOSPC": ("fallocate", "pwritev,pwritev2"),
    "EINTR": ("fsync", "write"),
}
"""What is tried, here and there, where there is no time for everything."""


def calls_for(record: Record, what: str) -> tuple[str, ...]:
    """Return which system calls are tried."""
    return record.pick(FEW[what], (*torn.CALLS, *torn.LOOKS))


@proves("cell SyncCheckpointer.save: this process dies")
@proves("invariant 7")
@proves("fault 18")
def test_a_writer_that_is_killed_leaves_nothing_torn(
    tmp_path: Path, record: Record
) -> None:
    """Killed at each call, it leaves the old one or the new one (C1).

    The next save cleans up.
    """
    directory = tmp_path / "checkpoints"
    for calls in calls_for(record, "KILL"):
        struck = 0
        for fault, saved in torn.at_each_call(
            directory, calls, "KILL", every=record.pick(6, 1)
        ):
            assert saved != fault.struck
            seen = torn.outcome(directory)
            assert seen == "new 2" or not saved
            torn.recovers(directory)
            struck += fault.struck
            record.ran(fault.struck)
        assert struck, calls
    record.within("torn checkpoints", 0, 0, unit="")


@proves("cell SyncCheckpointer.save: this process dies")
@proves("fault 18")
def test_nor_at_any_moment(tmp_path: Path, record: Record) -> None:
    """Killed from outside."""
    directory = tmp_path / "checkpoints"
    chance = random.Random(18)
    for _ in range(record.pick(4, 300)):
        torn.at_a_moment(directory, chance.uniform(0, 0.03))
        torn.outcome(directory)
        torn.recovers(directory)
        record.ran()


@proves("fault 17")
@pytest.mark.parametrize("what", torn.ERRORS)
def test_a_call_that_fails_leaves_nothing_torn(
    tmp_path: Path, record: Record, what: str
) -> None:
    """What says that it has saved has; what has not raises ``StorageError``."""
    directory = tmp_path / "checkpoints"
    for calls in calls_for(record, what):
        struck = 0
        for fault, saved in torn.at_each_call(
            directory, calls, what, every=record.pick(6, 1)
        ):
            seen = torn.outcome(directory)
            assert seen == "new 2" or not saved, fault
            # A disk that did not take it stays so: to ask again proves nothing.
            assert not (saved and fault.struck and calls == "fsync") or what == "EINTR"
            torn.recovers(directory)
            struck += fault.struck
            record.ran(fault.struck)
        assert struck, calls
    record.within("torn checkpoints", 0, 0, unit="")


@proves("fault 17")
@pytest.mark.parametrize("what", ["EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM", "EXDEV"])
def test_a_checkpoint_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, record: Record, what: str
) -> None:
    """The file system, or a filter of system calls, may refuse in any words."""
    directory = tmp_path / "checkpoints"
    fault, saved = next(torn.at_each_call(directory, "renameat2", what))
    assert (fault.struck, saved) == (True, True)
    assert torn.outcome(directory) == "new 2"
    torn.recovers(directory)
    record.ran()


@proves("fault 18")
def test_an_overlay_that_cannot_rename_its_directories(
    tmp_path: Path, record: Record
) -> None:
    """In a container image, checkpoints are replaced and retired, and stay whole."""
    image, spare = tmp_path / "image", tmp_path / "spare"
    spare.mkdir()
    torn.prepare(image)
    for number in range(30):
        shutil.copytree(image / "last", image / f"step-{number}")
    shutil.rmtree(image / "last")
    program = [sys.executable, str(SUPPORT / "overlaid.py"), str(image)]
    done = subprocess.run(
        in_overlay(image, spare, program),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    died, halfway = map(int, done.stdout.split())
    assert died >= 10
    assert halfway >= 2  # some have begun to remove what they replace
    record.ran(died)


@proves("fault 16")
@pytest.mark.parametrize("calls", ["fallocate", "pwritev,pwritev2", "write", "fsync"])
def test_the_first_time_that_there_is_no_space_ends_the_save(
    tmp_path: Path, record: Record, calls: str
) -> None:
    """The old one is there, and not one file more."""
    directory = tmp_path / "checkpoints"
    fault, saved = next(torn.at_each_call(directory, calls, "ENOSPC"))
    assert (fault.struck, saved) == (True, False)
    assert torn.outcome(directory) == "old -"
    assert [path.name for path in directory.iterdir()] == ["last"]
    torn.recovers(directory)
    record.ran()
