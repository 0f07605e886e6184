"""How much memory there is to be had."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory"]

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that this process could still take, by the kernel and cgroup."""
    known = [_meminfo_available(), _cgroup_available()]
    return min((n for n in known if n is not None), default=1 << 62)


def _meminfo_available() -> int | None:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        return max(limit - int((_CGROUP / "memory.current").read_text()), 0)
    return None
