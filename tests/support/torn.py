"""A writer of checkpoints that is killed, or fails, at a chosen system call.

As a program, ``torn.py --write DIRECTORY``, it is that writer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from aiockpt import Limits, list_checkpoints
from aiockpt.checkpointers import CheckpointWriter, CheckpointWriterConfig, RankInfo
from aiockpt.errors import StorageError
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest
from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import opened, read_header, verify_chunks
from aiockpt.storage.directory import checkpoint_at
from aiockpt.storage.interface import find_checkpoint
from tests.support.headers import entries_of
from tests.support.shortages import SystemCallFault, system_call_faults

CALLS = (
    "fallocate",
    "flock",
    "fsync",
    "ftruncate",
    "mkdir",
    "pwritev,pwritev2",
    "rename",
    "renameat2",
    "rmdir",
    "sync_file_range",
    "unlink,unlinkat",
    "write",
)
"""What a writer asks of the system, and may not live to see done."""

LOOKS = (
    "close",
    "fstat,newfstatat",
    "getdents64",
    "openat",
    "read,pread64,preadv",
)
"""What it does to look at its directory; Python does so too, so only there."""

ERRORS = ("EIO", "ENOSPC", "EINTR")

SIZE, CHUNK = 300_000, 64 << 10
FAILED = 3
_NAMES = ("last", "step-2")


class Bytes:
    """One tensor of equal bytes as a source; no torch is needed."""

    def __init__(self, value: int) -> None:
        self._segment = memoryview(bytes([value]) * SIZE)
        chunks = range(0, SIZE, CHUNK)
        self.manifest = build_manifest(
            step=value,
            chunk_bytes=CHUNK,
            entries=entries_of(("a", "U8", (SIZE,), SIZE)),
            tree=["tensors", ["a"], [0]],
            digests=[digest([self._segment[at : at + CHUNK]]) for at in chunks],
        )

        self.header_bytes = self.manifest.header_bytes
        self.segment_bytes = SIZE

    def views(self, start: int, stop: int) -> list[memoryview]:
        return [self._segment[start:stop]]

    def seal(self) -> Manifest:
        return self.manifest


def write(directory: Path, value: int) -> None:
    """Save under both names."""
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1))
    for name in _NAMES:
        writer.write_staged(directory / name, Bytes(value), value)


def prepare(directory: Path) -> None:
    """Leave an old checkpoint under the first name, and nothing under the second."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1))
    writer.write_staged(directory / _NAMES[0], Bytes(1), 1)


def command(directory: Path) -> list[str]:
    """Return the program that replaces the first one and makes the second one."""
    return [sys.executable, str(Path(__file__)), "--write", str(directory)]


def environment() -> dict[str, str]:
    """Return its variables."""
    return dict(os.environ)


def below(directory: Path) -> list[Path]:
    """Return everything that a writer may make or look at there."""
    files = ["checkpoint_0.safetensors", "commit.json"]
    files += ["", *(f"{name}.tmp" for name in files)]
    places = [directory]
    places += [
        directory / place for name in _NAMES for place in (name, f".{name}.part")
    ]
    return [place / file for place in places for file in files]


def at_each_call(
    directory: Path, calls: str, what: str, *, every: int = 1
) -> Iterator[tuple[SystemCallFault, bool]]:
    """Have a writer killed, or failed, at each such call; tell whether it saved."""
    paths = below(directory) if calls in LOOKS else ()
    for fault in system_call_faults(calls, what, paths=paths, every=every):
        prepare(directory)
        done = fault.run(command(directory), env=environment())
        code = done.returncode
        if code not in (0, FAILED, -signal.SIGKILL):
            raise AssertionError(f"{fault}: {code} {done.stderr}")
        yield fault, not code


def at_a_moment(directory: Path, seconds: float) -> None:
    """Have it killed so long after it has begun to write."""
    prepare(directory)
    process = subprocess.Popen(command(directory), env=environment())
    while process.poll() is None and not any(directory.glob(".*")):
        time.sleep(0.0002)
    time.sleep(seconds)
    process.kill()
    process.wait()


def outcome(directory: Path) -> str:
    """Say which checkpoint each name has; raise where one is torn."""
    first = value_at(directory / _NAMES[0])
    found = find_checkpoint(directory / _NAMES[1])
    second = None if found is None else value_at(directory / _NAMES[1])
    listed = [checkpoint.name for checkpoint in list_checkpoints(directory)]
    assert sorted(listed) == sorted(_NAMES if found else _NAMES[:1])
    assert second in (None, 2)
    assert second is None or first == 2
    return f"{'old' if first == 1 else 'new'} {second or '-'}"


def value_at(path: Path) -> int:
    """Return what a checkpoint was saved with, having looked at every byte."""
    checkpoint = checkpoint_at(path)
    file = checkpoint.file_of(0)
    manifest = read_header(file, limits=Limits())
    assert isinstance(manifest, Manifest)
    assert manifest.snapshot_id == checkpoint.files[file.name].snapshot
    with opened(file) as held:
        assert list(verify_chunks(held, manifest)) == []
    expected = Bytes(checkpoint.step)
    assert manifest.snapshot_id == expected.manifest.snapshot_id
    return checkpoint.step


def recovers(directory: Path) -> None:
    """Check that the next writer cleans up and saves."""
    write(directory, 2)
    assert outcome(directory) == "new 2"
    assert sorted(os.listdir(directory)) == sorted(_NAMES)


def main() -> int:
    """Write."""
    try:
        write(Path(sys.argv[2]), 2)
    except StorageError as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
