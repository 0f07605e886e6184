"""The disk fails while ``aiockpt fetch`` or ``follow`` writes a file."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.numpy import load_file

from aiockpt.testing import Drip, FaultProxy
from tests.support.commandline import (
    ENVIRONMENT,
    aiockpt_command,
    beside,
    run_aiockpt,
    start_aiockpt,
    the_error,
    until,
)
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.shortages import SystemCallFault, system_call_faults
from tests.support.transports import MIB, port_of, publish, transport, weights

pytestmark = pytest.mark.timeout(3000)

CHANGES = (
    "fallocate",
    "fchmod",
    "flock",
    "fsync",
    "ftruncate",
    "mmap",
    "openat",
    "rename,renameat2",
)
"""What a command asks of the system to make a file."""

LOOKS = ("close", "fstat,newfstatat", "read,pread64,preadv")
ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS")
FEW = (("ftruncate", "EIO"), ("mmap", "EDQUOT"), ("fsync", "EIO"), ("openat", "EROFS"))
EVERY = [(calls, what) for calls in CHANGES for what in ERRORS]
EVERY += [(calls, "EIO") for calls in LOOKS]


@asynccontextmanager
async def offered() -> AsyncIterator[str]:
    """Offer a checkpoint; give its URL."""
    async with transport(chunk_bytes=MIB, insecure=True) as sender:
        await sender.send_checkpoint([], 1, weights(2.0, mib=2))
        yield f"http://127.0.0.1:{port_of(sender)}/checkpoint/1"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that nothing else is in."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def faults(record: Record, place: Path) -> Iterator[SystemCallFault]:
    """Yield one fault after another in what a command does in a place."""
    paths = [place, place / "f", place / "f.part"]
    for calls, what in record.pick([*FEW], EVERY):
        yield from system_call_faults(calls, what, paths=paths)


def says_it_is_there(error: str) -> bool:
    """Tell whether an error says that the new file is in its place."""
    return "in its place, but the disk did not confirm it" in error


@proves("fault 71")
def test_a_call_of_a_fetch_fails(record: Record, place: Path) -> None:
    """The file is the old one or the new one, as the command says; the next works."""
    with beside(offered()) as url:
        fetch = aiockpt_command("fetch", url, "-q", "--overwrite", "-o", place / "f")
        for fault in faults(record, place):
            target, part = place / "f", place / "f.part"
            target.write_text("old")
            done = fault.run(fetch, env=ENVIRONMENT)
            assert done.returncode in (0, 1), (fault, done.stderr)
            error = the_error(done.stderr) if done.returncode else ""
            assert (target.read_bytes() == b"old") is (
                done.returncode == 1 and not says_it_is_there(error)
            ), (fault, error)
            if error:
                assert str(place) in error
                # A part that nothing was verified of is worth nothing.
                is_kept = "what was verified is in" in error
                size = part.stat().st_size if part.exists() else 0
                assert bool(size) is is_kept, (fault, error)
            again = run_aiockpt(*fetch[3:])
            assert again.returncode == 0, again.stderr
            assert (load_file(target)["w0"] == 2).all()
            assert [*place.iterdir()] == [target]
            record.ran(fault.struck)


@asynccontextmanager
async def training() -> AsyncIterator[str]:
    """Publish one step after another; give the metadata."""
    async with transport(chunk_bytes=MIB) as sender:

        async def train() -> None:
            for step in range(1, 100_000):
                await publish(sender, step)
                await asyncio.sleep(0.05)

        task = asyncio.create_task(train())
        await settle(lambda: sender.statistics().step)
        yield sender.metadata()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def follow(fault: SystemCallFault, url: str, place: Path) -> CompletedProcess[str]:
    """Follow until the first file is there, or that fails."""
    command = aiockpt_command("follow", url, "-q", "-o", place)
    return fault.run(command, env=ENVIRONMENT, reads=False)


@proves("fault 71")
def test_a_call_of_a_follower_fails(record: Record, place: Path) -> None:
    """Each file that is there is whole; the error says what failed, and where."""
    few = [("fallocate", "ENOSPC"), ("rename,renameat2", "EIO")]
    with beside(training()) as url:
        every = [*few, *((calls, "EIO") for calls in (*CHANGES, *LOOKS))]
        for calls, what in record.pick(few, every):
            steps = [place / f"step-{step}.safetensors" for step in range(400)]
            parts = [Path(f"{each}.part") for each in steps]
            shutil.rmtree(place)
            fault = SystemCallFault(calls, what, 1, [*steps, *parts])
            done = follow(fault, url, place)
            whole = [*place.glob("*.safetensors")]
            for each in whole:
                step = int(each.stem.removeprefix("step-"))
                assert (load_file(each)["w"] == step).all()
            if not done.stdout:
                assert str(place) in the_error(done.stderr)
                assert not whole or says_it_is_there(done.stderr)
            assert "Traceback" not in done.stderr
            record.ran(fault.struck)


@proves("fault 71")
@pytest.mark.parametrize("command", ["fetch", "follow"])
def test_the_directory_goes_away(record: Record, place: Path, command: str) -> None:
    """An error that says so, and nothing in another place."""
    with beside(offered()) as url:
        port = int(url.split(":")[2].partition("/")[0])
        slow = Drip(rate=2e6, burst=64 << 10)
        with beside(FaultProxy("127.0.0.1", port, otherwise=slow)) as proxy:
            file = place / "f" if command == "fetch" else place
            step = "1" if command == "fetch" else ""
            process = start_aiockpt(
                command, proxy.url(f"/checkpoint/{step}"), "-q", "-o", file
            )
            until(lambda: [*place.glob("*.part")])
            shutil.rmtree(place)
            _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert str(place) in the_error(error)
    assert "removed" in error
    assert not place.exists()
    record.ran()
