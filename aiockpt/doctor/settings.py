"""What the system says of itself, where it says it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aiockpt.runtime.system import available_memory, usable_cores

__all__ = ["Settings", "read_settings"]

_TCP = Path("/proc/sys/net/ipv4")
_NETWORK = Path("/sys/class/net")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHM = Path("/dev/shm")  # noqa: S108 - it is only asked for its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes are in bytes; what is unknown is None, or empty.

    Attributes:
        cores: On which this process may run.
        quota: How many of them its control group lets it use.
        memory: What it could still take.
        congestion: The system's congestion control.
        allowed: What a process may choose instead.
        buffers: The largest that the kernel gives a TCP connection to receive, to send.
        networks: Speed of each interface that is up, in Mb/s; 0: it does not say.
        huge_pages: The setting for transparent huge pages.
        shared_huge_pages: That for memory which processes share.
        shared: Size of ``/dev/shm`` and what is free of it.
        files: How many files this process may have open.
        uvloop: Its version.
        switch: Seconds after which Python passes the interpreter lock on.
    """

    cores: int
    quota: float | None
    memory: int
    congestion: str
    allowed: tuple[str, ...]
    buffers: tuple[int, int] | None
    networks: dict[str, int]
    huge_pages: str
    shared_huge_pages: str
    shared: tuple[int, int] | None
    files: int
    uvloop: str
    switch: float


def read_settings() -> Settings:
    """Return them as they are now."""
    return Settings(
        cores=usable_cores(),
        quota=_quota(),
        memory=available_memory(),
        congestion=_text(_TCP / "tcp_congestion_control"),
        allowed=tuple(_text(_TCP / "tcp_allowed_congestion_control").split()),
        buffers=_buffers(),
        networks=dict(_networks()),
        huge_pages=_chosen(_HUGE_PAGES / "enabled"),
        shared_huge_pages=_chosen(_HUGE_PAGES / "shmem_enabled"),
        shared=_shared(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        uvloop=_version("uvloop"),
        switch=sys.getswitchinterval(),
    )


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _chosen(path: Path) -> str:
    return _text(path).partition("[")[2].partition("]")[0]


def _quota() -> float | None:
    with suppress(ValueError):
        most, period = _text(_QUOTA).split()
        return int(most) / int(period)
    return None


def _buffers() -> tuple[int, int] | None:
    with suppress(ValueError, IndexError):
        names = ("tcp_rmem", "tcp_wmem")
        receive, send = (int(_text(_TCP / name).split()[2]) for name in names)
        return receive, send
    return None


def _networks() -> Iterable[tuple[str, int]]:
    with suppress(OSError):
        for place in sorted(_NETWORK.iterdir()):
            if place.name != "lo" and _text(place / "operstate") != "down":
                speed = _text(place / "speed")
                yield place.name, int(speed) if speed.isdecimal() else 0


def _shared() -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.statvfs(_SHM)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""
