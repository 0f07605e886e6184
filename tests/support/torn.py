"""A writer of checkpoints that is killed, or fails, at a chosen system call.

As a program it does that many times and prints what it saw::

    python tests/support/torn.py --runs 400
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiockpt
from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.directory import checkpoint_at, find_checkpoint, list_checkpoints
from aiockpt.errors import StorageError
from aiockpt.storage import read_header, verify_chunks
from aiockpt.wire.chunks import digest
from aiockpt.wire.layout import Storage
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import Manifest, build_manifest

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

ERRORS = ("EIO", "ENOSPC")

SIZE, CHUNK = 300_000, 64 << 10
FAILED = 3
_NAMES = ("last", "step-2")


class Bytes:
    """A snapshot of one tensor of equal bytes; no torch is needed."""

    def __init__(self, value: int) -> None:
        self._segment = memoryview(bytes([value]) * SIZE)
        chunks = range(0, SIZE, CHUNK)
        self.manifest = build_manifest(
            step=value,
            chunk_bytes=CHUNK,
            storages=[Storage("a", "U8", (SIZE,), SIZE, align=1)],
            tree=["tensors", ["a"], [0]],
            digests=[digest([self._segment[at : at + CHUNK]]) for at in chunks],
        )

    def views(self, start: int, stop: int) -> list[memoryview]:
        return [self._segment[start:stop]]


def write(directory: Path, value: int) -> None:
    """Save under both names."""
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1))
    for name in _NAMES:
        writer.write_snapshot(directory / name, Bytes(value))


def prepare(directory: Path) -> None:
    """Leave an old checkpoint under the first name, and nothing under the second."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(0, 1))
    writer.write_snapshot(directory / _NAMES[0], Bytes(1))


def writing(directory: Path, *strace: str) -> subprocess.Popen[bytes]:
    """Start a process that replaces the first one and makes the second one."""
    paths = [str(Path(aiockpt.__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, str(Path(__file__)), "--write", str(directory)]
    if strace:
        command = ["strace", "-f", "-qq", "-o", os.devnull, *strace, *command]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.PIPE,
    )


def only_below(directory: Path) -> Iterator[str]:
    """Yield strace's words for everything that a writer may make or look at there."""
    files = ["checkpoint_0.safetensors", "commit.json"]
    files += ["", *(f"{name}.tmp" for name in files)]
    for name in _NAMES:
        for place in (directory, directory / name, directory / f".{name}.part"):
            for file in files:
                yield from ("-P", str(place / file))


def at_call(directory: Path, calls: str, what: str, number: int) -> int:
    """Have the writer killed (or failed) at the ``number``-th call; give its code."""
    prepare(directory)
    how = "signal=KILL" if what == "KILL" else f"error={what}"
    inject = f"inject={calls}:{how}:when={number}"
    where = only_below(directory) if calls in LOOKS else ()
    process = writing(directory, *where, "-e", f"trace={calls}", "-e", inject)
    _, said = process.communicate()
    code = process.returncode
    if code not in (0, FAILED, -signal.SIGKILL, 128 + signal.SIGKILL):
        raise AssertionError(f"{calls} {what} {number}: {code} {said.decode()}")
    return code


def at_each_call(directory: Path, calls: str, what: str) -> Iterator[int]:
    """Do so at every call that it makes; yield its codes."""
    number = 1
    while True:
        code = at_call(directory, calls, what, number)
        yield code
        if not code and what == "KILL":
            return
        if not code and not happens(directory, calls, number):
            return
        number += 1


def happens(directory: Path, calls: str, number: int) -> bool:
    """Tell whether the writer makes as many of these calls."""
    return at_call(directory, calls, "KILL", number) != 0


def at_a_moment(directory: Path, seconds: float) -> int:
    """Have it killed so long after it has begun to write."""
    prepare(directory)
    process = writing(directory)
    while process.poll() is None and not any(directory.glob(".*")):
        time.sleep(0.0002)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return process.returncode


def outcome(directory: Path) -> str:
    """Say which checkpoint each name has; raise where one is torn."""
    first = _value(directory / _NAMES[0])
    found = find_checkpoint(directory / _NAMES[1])
    second = None if found is None else _value(directory / _NAMES[1])
    listed = [checkpoint.name for checkpoint in list_checkpoints(directory)]
    assert sorted(listed) == sorted(_NAMES if found else _NAMES[:1])
    assert second in (None, 2)
    assert second is None or first == 2
    return f"{'old' if first == 1 else 'new'} {second or '-'}"


def _value(path: Path) -> int:
    """Return what a checkpoint was saved with, having looked at every byte."""
    checkpoint = checkpoint_at(path)
    file = checkpoint.file_of(0)
    manifest = read_header(file, limits=Limits())
    assert isinstance(manifest, Manifest)
    assert manifest.snapshot_id == checkpoint.files[file.name].snapshot
    assert list(verify_chunks(file, manifest)) == []
    expected = Bytes(checkpoint.step)
    assert manifest.snapshot_id == expected.manifest.snapshot_id
    return checkpoint.step


def recovers(directory: Path) -> None:
    """Check that the next writer cleans up and saves."""
    write(directory, 2)
    assert outcome(directory) == "new 2"
    assert sorted(os.listdir(directory)) == sorted(_NAMES)


def can_trace() -> bool:
    """Tell whether strace is there and may be used."""
    if shutil.which("strace") is None:
        return False
    done = subprocess.run(
        ["strace", "-o", os.devnull, "true"], capture_output=True, check=False
    )
    return done.returncode == 0


def main() -> int:
    """Write, or run the whole table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--runs", type=int, default=300, help="kills at random moments")
    arguments = parser.parse_args()
    if arguments.write is not None:
        try:
            write(arguments.write, 2)
        except StorageError as error:
            print(error, file=sys.stderr)
            return FAILED
        return 0
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "checkpoints"
        for what in ("KILL", *ERRORS):
            for calls in (*CALLS, *LOOKS):
                for _ in at_each_call(directory, calls, what):
                    seen[f"{what} at a call: {outcome(directory)}"] += 1
                    recovers(directory)
        for _ in range(arguments.runs):
            at_a_moment(directory, random.uniform(0, 0.03))
            seen[f"KILL at a moment: {outcome(directory)}"] += 1
            recovers(directory)
    for what, count in sorted(seen.items()):
        print(f"{count:5}  {what}")
    print(f"{seen.total():5}  runs, 0 torn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
