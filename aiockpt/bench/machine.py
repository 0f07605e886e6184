"""What the figures were measured on, without naming the machine."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiockpt
from aiockpt.bench.raw import congestion_control

__all__ = ["describe_machine"]

_THP = Path("/sys/kernel/mm/transparent_hugepage")


def describe_machine() -> dict[str, str]:
    """Return facts by name, in the order to show them."""
    system, used = congestion_control()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(_cores()),
        "memory": f"{_memory() / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "aiockpt": aiockpt.__version__,
        **{name: _version(name) for name in ("torch", "aiohttp", "torchft")},
        "congestion control": f"{system} (raw copies and aiockpt: {used})",
        "transparent huge pages": _huge_pages("enabled"),
        "for memory to lend": _huge_pages("shmem_enabled"),
        "load average": _load(),
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _huge_pages(setting: str) -> str:
    with suppress(OSError):
        return (_THP / setting).read_text().partition("[")[2].partition("]")[0]
    return "unknown"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f} at the start"
