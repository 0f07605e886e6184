"""``aiockpt doctor``: what the system allows here, and what to set.

It reads settings and measures nothing; `aiockpt bench` measures. A finding that limits
transfers has a remedy, which says first for whom it matters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import aiockpt
from aiockpt.runtime.system import available_memory, usable_cores
from aiockpt.runtime.words import printable

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_LONG_TRIP_S: Final = 0.05  # of a round trip on a long line
_MIN_CORES: Final = 4
_MIN_FILES: Final = 4096
_MIN_BUFFER_BYTES: Final = 8 * _MIB
_MIN_SHARED_BYTES: Final = 256 * _MIB
_TCP: Final = Path("/proc/sys/net/ipv4")
_NETWORK: Final = Path("/sys/class/net")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_SHM: Final = "/dev/shm"  # noqa: S108 - it is only asked for its size


def run(arguments: argparse.Namespace) -> int:
    """Read the settings, and print what they mean."""
    findings = judge(read_settings())
    if arguments.json:
        facts = [asdict(each) | {"limits": each.limits} for each in findings]
        print(json.dumps({"machine": describe_machine(), "findings": facts}))
        return 0
    for line in as_text(findings).splitlines():
        print(printable(line))
    return 0


def describe_machine() -> dict[str, str]:
    """Return what figures were measured on, without naming the machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    packages = ("torch", "aiohttp", "torchft")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(usable_cores()),
        "memory": f"{memory / _GIB:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "aiockpt": aiockpt.__version__,
        **{name: _version(name) or "not installed" for name in packages},
        "congestion control": _text(_TCP / "tcp_congestion_control") or "unknown",
        "transparent huge pages": _chosen(_HUGE_PAGES / "enabled") or "unknown",
        "huge pages for shared memory": _chosen(_HUGE_PAGES / "shmem_enabled")
        or "unknown",
        "load average": f"{os.getloadavg()[0]:.1f} at the start",
    }


# ------------------------------------------------------------------ what is the case


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Sizes are in bytes; what is unknown is None, or empty.

    Attributes:
        cores: On which this process may run.
        quota: How many of them its control group lets it use.
        memory: What it could still take.
        congestion: The system's congestion control.
        allowed: What a process may choose instead.
        buffers: The largest that the kernel gives a TCP connection to receive, to send.
        networks: Speed of each interface that is up, in Mb/s; 0 if it is not known.
        huge_pages: The setting for transparent huge pages.
        shared_huge_pages: The setting for memory that processes share.
        shared: Size of ``/dev/shm`` and what is free of it.
        files: How many files this process may have open.
        uvloop: Its version.
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


def read_settings() -> HostSettings:
    """Return the settings as they are now."""
    quota, buffers, shared = None, None, None
    with suppress(ValueError):
        most, period = _text(_QUOTA).split()
        quota = int(most) / int(period)
    with suppress(ValueError, IndexError):
        names = ("tcp_rmem", "tcp_wmem")
        receive, send = (int(_text(_TCP / name).split()[2]) for name in names)
        buffers = receive, send
    with suppress(OSError):
        found = os.statvfs(_SHM)
        shared = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return HostSettings(
        cores=usable_cores(),
        quota=quota,
        memory=available_memory(),
        congestion=_text(_TCP / "tcp_congestion_control"),
        allowed=tuple(_text(_TCP / "tcp_allowed_congestion_control").split()),
        buffers=buffers,
        networks=dict(_networks()),
        huge_pages=_chosen(_HUGE_PAGES / "enabled"),
        shared_huge_pages=_chosen(_HUGE_PAGES / "shmem_enabled"),
        shared=shared,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        uvloop=_version("uvloop"),
    )


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _chosen(path: Path) -> str:
    return _text(path).partition("[")[2].partition("]")[0]


def _networks() -> Iterator[tuple[str, int]]:
    with suppress(OSError):
        for place in sorted(_NETWORK.iterdir()):
            if place.name != "lo" and _text(place / "operstate") != "down":
                speed = _text(place / "speed")
                yield place.name, int(speed) if speed.isdecimal() else 0


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


# --------------------------------------------------------------------- what it means


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: Of what.
        value: What is the case, in words.
        remedy: What to do, where it limits; empty if all is well.
        figures: The same as numbers.
    """

    name: str
    value: str
    remedy: str = ""
    figures: Mapping[str, float | str | None] = field(default_factory=dict)

    @property
    def limits(self) -> bool:
        """Whether there is something to gain."""
        return bool(self.remedy)


def judge(settings: HostSettings) -> list[Finding]:
    """Return the findings, in the order to show them."""
    return [*_machine(settings), *_network(settings), *_process(settings)]


def _machine(settings: HostSettings) -> Iterator[Finding]:
    quota = "" if settings.quota is None else f", quota {settings.quota:g}"
    few = min(settings.cores, settings.quota or settings.cores) < _MIN_CORES
    cores = (
        "give the process 4 cores; a sender or receiver keeps one or two of them busy"
    )
    yield Finding(
        name="cores",
        value=f"{settings.cores}{quota}",
        remedy=cores if few else "",
        figures={"cores": settings.cores, "quota": settings.quota},
    )
    free = settings.memory / _GIB
    yield Finding(
        name="memory",
        value=f"{free:.1f} GiB available",
        figures={"free_gib": free},
    )
    sharing = "if you use same_host=True or save in the background"
    for name, kernel, off, remedy in (
        (
            "huge pages",
            settings.huge_pages or "unknown",
            ("never",),
            f"as root: echo madvise > {_HUGE_PAGES}/enabled",
        ),
        (
            "huge pages to share",
            settings.shared_huge_pages or "unknown",
            ("never", "deny"),
            f"{sharing}, as root: echo advise > {_HUGE_PAGES}/shmem_enabled",
        ),
    ):
        yield Finding(
            name=name,
            value=f"off ({kernel})" if kernel in off else kernel,
            remedy=remedy if kernel in off else "",
            figures={"huge_pages": kernel},
        )


def _network(settings: HostSettings) -> Iterator[Finding]:
    system = settings.congestion or "unknown"
    allowed = " ".join(settings.allowed) or "unknown"
    lossy = (
        "if lines lose packets, as root: sysctl -w net.ipv4.tcp_congestion_control=bbr"
    )
    local = (
        "if both ends are on one host, as root: sysctl -w "
        "net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
    )
    remedy = lossy if system in ("cubic", "reno") else ""
    if system == "bbr" and settings.allowed and "reno" not in settings.allowed:
        remedy = local  # the library then asks for it by itself
    yield Finding(
        name="congestion control",
        value=f"{system}; a process may choose {allowed}",
        remedy=remedy,
        figures={"system": system, "allowed": allowed},
    )
    if settings.buffers is None:
        yield Finding(name="socket buffers", value="unknown")
    else:
        receive, send = settings.buffers
        most = min(receive, send) / _LONG_TRIP_S / 1e6
        larger = (
            "if hosts are far apart, receive over Receive(connections=16), or as root: "
            "sysctl -w net.ipv4.tcp_rmem='4096 131072 33554432' "
            "net.ipv4.tcp_wmem='4096 16384 33554432'"
        )
        yield Finding(
            name="socket buffers",
            value=f"{receive / _MIB:.0f} MiB in, {send / _MIB:.0f} MiB out: at most "
            f"{most:.0f} MB/s per connection at {1e3 * _LONG_TRIP_S:.0f} ms round trip",
            remedy=larger if min(receive, send) < _MIN_BUFFER_BYTES else "",
            figures={"receive": receive, "send": send, "far_mb_per_s": most},
        )
    if settings.networks:
        words = [
            f"{name} {speed / 1000:g} Gb/s" if speed else f"{name} (speed unknown)"
            for name, speed in settings.networks.items()
        ]
        yield Finding(
            name="networks", value=", ".join(words[:4]), figures={**settings.networks}
        )


def _process(settings: HostSettings) -> Iterator[Finding]:
    loop = "pip install 'aiockpt[uvloop]', and call uvloop.run(main())"
    yield Finding(
        name="uvloop",
        value=settings.uvloop or "not installed",
        remedy="" if settings.uvloop else loop,
        figures={"version": settings.uvloop or None},
    )
    larger = "if you use gloo or data loaders, start the container with --shm-size=1g"
    if settings.shared is None:
        yield Finding(name=_SHM, value="does not exist", remedy=larger)
    else:
        size, free = settings.shared
        yield Finding(
            name=_SHM,
            value=f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} free",
            remedy=larger if size < _MIN_SHARED_BYTES else "",
            figures={"size": size, "free": free},
        )
    more = f"before you start a sender: ulimit -n {1 << 16}; each receiver takes a file"
    yield Finding(
        name="open files",
        value=f"{settings.files} at most",
        remedy=more if 0 <= settings.files < _MIN_FILES else "",
        figures={"limit": settings.files},
    )


def as_text(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, and below what to do."""
    findings = [*findings]
    width = max(len(finding.name) for finding in findings)
    lines = [
        f"{'!' if finding.limits else ' '} {finding.name.ljust(width)}  {finding.value}"
        for finding in findings
    ]
    remedies = [f"  {each.name}: {each.remedy}" for each in findings if each.limits]
    advice = ["", "What to do:", *remedies] if remedies else ["", "Nothing to do."]
    return "\n".join([*lines, *advice]) + "\n"
