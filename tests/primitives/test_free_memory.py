"""Memory that the kernel would give back counts as free, as does what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiockpt.errors import LimitExceededError
from aiockpt.runtime.system import available_memory, spare_memory
from aiockpt.testing import assert_same
from tests.support.transports import MIB, pair, receive, weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")


HOST = 100 * MIB


class Root:
    """A file system as the kernel would show it to a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {HOST >> 10} kB\n")

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def version_2(
        self, group: str, *, limit: int | str, used: int, cache: int = 0, slab: int = 0
    ) -> None:
        """Make a group of the unified hierarchy."""
        at = f"sys/fs/cgroup/{group}"
        self.write(f"{at}/memory.max", f"{limit}\n")
        self.write(f"{at}/memory.current", f"{used}\n")
        stat = f"anon 1\ninactive_file {cache}\nactive_file 7\n"
        self.write(f"{at}/memory.stat", f"{stat}slab_reclaimable {slab}\nslab 9\n")

    def version_1(self, group: str, *, limit: int, used: int, cache: int) -> None:
        """Make a group of the older memory controller."""
        at = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        stat = f"inactive_file 3\ntotal_inactive_file {cache}\n"
        self.write(f"{at}/memory.stat", stat)

    def available(self) -> int:
        """Return what is free there."""
        return available_memory(self.path)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Give a system without cgroups."""
    return Root(tmp_path)


def test_without_cgroups_it_is_what_the_kernel_says(root) -> None:
    """Some of it is left to others; memory that is kept is there already."""
    assert root.available() == HOST
    spare = spare_memory(root=root.path)
    assert HOST // 2 < spare < HOST
    assert spare_memory(kept=7 * MIB, root=root.path) == spare + 7 * MIB


@pytest.mark.parametrize("group", ["/", "/../../docker/0123"])
def test_a_container_of_its_own_namespace(root, group: str) -> None:
    """Its group is the root of what it sees; a cache full of checkpoints is free."""
    root.write("proc/self/cgroup", f"0::{group}\n")
    for limit, used, cache, free in [
        (f"{50 * MIB}", 20, 0, 30),
        (f"{10 * MIB}", 20, 0, 0),
        (f"{50 * MIB}", 50, 30, 35),
        ("max", 20, 0, 100),
    ]:
        slab = 5 * MIB if cache else 0
        root.version_2("", limit=limit, used=used * MIB, cache=cache * MIB, slab=slab)
        assert root.available() == free * MIB


def test_the_own_group_is_found_without_a_namespace(root) -> None:
    """The process's own group is found, and the tightest of its ancestors counts."""
    root.write("proc/self/cgroup", "0::/kube/pod/main\n")
    root.version_2("kube/pod/main", limit=80 * MIB, used=10 * MIB)
    root.version_2("kube/other", limit=1 * MIB, used=1 * MIB)
    assert root.available() == 70 * MIB
    root.version_2("kube/pod", limit=60 * MIB, used=30 * MIB, cache=5 * MIB)
    assert root.available() == 35 * MIB
    root.version_2("kube", limit="max", used=90 * MIB)
    assert root.available() == 35 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_the_older_controller(root, path: str) -> None:
    """Alone, or beside a unified hierarchy that does not control memory."""
    root.write(
        "proc/self/cgroup", f"9:name=systemd:/x\n4:cpu,memory:{path}\n0::/elsewhere\n"
    )
    root.version_1(path, limit=50 * MIB, used=45 * MIB, cache=15 * MIB)
    root.version_1("", limit=(1 << 63) - 4096, used=90 * MIB, cache=0)
    if path == "/":
        assert root.available() == HOST
    else:
        assert root.available() == 20 * MIB


def test_files_that_make_no_sense_bound_nothing(root) -> None:
    """A file system of another kernel, or none that may be read."""
    root.write("proc/self/cgroup", "what\n0::/a\n:::\n")
    root.version_2("a", limit="many", used=1)
    assert root.available() == HOST
    root.write("sys/fs/cgroup/a/memory.max", f"{50 * MIB}")
    root.write("sys/fs/cgroup/a/memory.current", f"{20 * MIB}")
    root.write("sys/fs/cgroup/a/memory.stat", "inactive_file\nslab_reclaimable x\n")
    assert root.available() == 30 * MIB


@pytest.mark.asyncio
async def test_memory_that_is_kept_for_the_next_receive_is_free(monkeypatch) -> None:
    """It needs no other, so a full host does not matter; as far as it fits."""
    free = 64 * MIB
    monkeypatch.setattr("aiockpt.runtime.system.available_memory", lambda _: free)
    async with pair(keep_arena=True) as (sender, receiver):
        await sender.send_checkpoint([], 1, weights(mib=8))
        assert_same(await receive(sender, receiver), weights(mib=8))
        free = 0
        assert_same(await receive(sender, receiver), weights(mib=8))
        await sender.send_checkpoint([], 2, weights(mib=9))
        with pytest.raises(LimitExceededError, match="size"):
            await receive(sender, receiver, 2)


FILLS = """
import os, sys
from pathlib import Path
from aiockpt.runtime.system import available_memory
with Path(sys.argv[1]).open("wb") as file:
    for _ in range(192):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
print(available_memory())
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """Give a real group of 256 MiB below this process's own; it is removed again."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = Path("/sys/fs/cgroup", "memory" if controllers else "")
        name = f"aiockpt-{uuid.uuid4().hex[:8]}"
        group = mount / path.strip("/") / name
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(256 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no cgroup that bounds memory may be made here")


def test_a_real_group_that_has_written_a_file(limited: Path, tmp_path: Path) -> None:
    """Its page cache is full of the file, and counts as free."""

    def join() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))

    said = subprocess.run(
        [sys.executable, "-c", FILLS, str(tmp_path / "file")],
        preexec_fn=join,
        capture_output=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert 160 * MIB < int(said.stdout) < 256 * MIB
