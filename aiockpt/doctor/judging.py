"""What the figures mean, and what to do about them. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiockpt.bench.memory import HUGE, SMALL
from aiockpt.doctor.measuring import Measures
from aiockpt.doctor.settings import Settings

__all__ = ["Finding", "judge"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_FAR: Final = 0.05  # seconds there and back, of a long way
_FEW_CORES: Final = 4
_FEW_FILES: Final = 4096
_SMALL_BUFFER: Final = 8 * _MIB
_SMALL_SHARED: Final = 256 * _MIB
_SLOW_TOUCH: Final = 2.0  # GB/s
_MUCH: Final = 1.5
_LATE: Final = 2e-3
_SHM: Final = "/dev/shm"  # noqa: S108 - a name in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: Of what.
        value: What is the case, in words.
        remedy: What to set, where it limits; empty if all is well.
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


def judge(settings: Settings, measures: Measures) -> list[Finding]:
    """Return the findings, in the order to show them."""
    return [
        _cores(settings),
        _memory(settings),
        _copy(measures),
        _faults(settings, measures),
        _lent(settings),
        _digest(measures),
        _loopback(settings, measures),
        _congestion(settings),
        _buffers(settings),
        *_networks(settings),
        _interpreter(settings, measures),
        _loop(settings),
        _shared(settings),
        _files(settings),
    ]


def _cores(settings: Settings) -> Finding:
    usable = min(settings.cores, settings.quota or settings.cores)
    quota = "" if settings.quota is None else f", quota {settings.quota:g}"
    few = "give the process 4 cores: an end of a transfer keeps one or two busy"
    return Finding(
        name="cores",
        value=f"{settings.cores}{quota}",
        remedy=few if usable < _FEW_CORES else "",
        figures={"cores": settings.cores, "quota": settings.quota},
    )


def _memory(settings: Settings) -> Finding:
    free = settings.memory / _GIB
    return Finding(
        name="memory", value=f"{free:.1f} GiB to be had", figures={"free_gib": free}
    )


def _copy(measures: Measures) -> Finding:
    return Finding(
        name="memory copy",
        value=f"{measures.copy:.1f} GB/s by one thread",
        figures={"gb_per_s": measures.copy},
    )


def _faults(settings: Settings, measures: Measures) -> Finding:
    small, huge = measures.faults[SMALL], measures.faults[HUGE]
    kernel = settings.huge_pages or "unknown"
    remedy = ""
    if kernel == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    elif max(small, huge) < _SLOW_TOUCH:
        remedy = "receive into memory that is there: into=, and direct=True"
    return Finding(
        name="fresh memory",
        value=f"{small:.1f} GB/s by 4 KiB pages, {huge:.1f} by huge ones ({kernel})",
        remedy=remedy,
        figures={
            "small_gb_per_s": small,
            "huge_gb_per_s": huge,
            "huge_pages": kernel,
        },
    )


def _lent(settings: Settings) -> Finding:
    kernel = settings.shared_huge_pages or "unknown"
    place = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    remedy = f"for same_host=True: echo advise > {place}"
    return Finding(
        name="memory to lend",
        value=f"huge pages: {kernel}",
        remedy=remedy if kernel in ("never", "deny") else "",
        figures={"huge_pages": kernel},
    )


def _digest(measures: Measures) -> Finding:
    return Finding(
        name="digests",
        value=f"{measures.digest:.1f} GB/s by one thread",
        figures={"gb_per_s": measures.digest},
    )


def _loopback(settings: Settings, measures: Measures) -> Finding:
    plain = max(speed for speed, _ in measures.loopback.values())
    asked = max(speed for _, speed in measures.loopback.values())
    slow = plain < asked / _MUCH
    # The library asks for it by itself, where it may.
    remedy = ""
    if slow and "reno" not in settings.allowed:
        remedy = "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
    return Finding(
        name="loopback",
        value=f"{plain:.1f} GB/s, {asked:.1f} with what is asked for on the same host",
        remedy=remedy,
        figures={"system_gb_per_s": plain, "asked_gb_per_s": asked},
    )


def _congestion(settings: Settings) -> Finding:
    system = settings.congestion or "unknown"
    allowed = " ".join(settings.allowed) or "unknown"
    lossy = "on lossy ways: sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return Finding(
        name="congestion control",
        value=f"{system}; a process may choose {allowed}",
        remedy=lossy if system in ("cubic", "reno") else "",
        figures={"system": system, "allowed": allowed},
    )


def _buffers(settings: Settings) -> Finding:
    if settings.buffers is None:
        return Finding(name="socket buffers", value="unknown")
    receive, send = settings.buffers
    most = min(receive, send) / _FAR / 1e6
    remedy = (
        "on long ways: sysctl -w net.ipv4.tcp_rmem='4096 131072 33554432' "
        "net.ipv4.tcp_wmem='4096 16384 33554432', or more Receive(connections=)"
    )
    return Finding(
        name="socket buffers",
        value=f"to {receive / _MIB:.0f} MiB in, {send / _MIB:.0f} MiB out: at most "
        f"{most:.0f} MB/s a connection at {1e3 * _FAR:.0f} ms",
        remedy=remedy if min(receive, send) < _SMALL_BUFFER else "",
        figures={"receive": receive, "send": send, "far_mb_per_s": most},
    )


def _networks(settings: Settings) -> Iterator[Finding]:
    if not settings.networks:
        return
    words = [
        f"{name} {speed / 1000:g} Gb/s" if speed else f"{name} does not say"
        for name, speed in settings.networks.items()
    ]
    yield Finding(
        name="networks",
        value=", ".join(words[:_FEW_CORES]),
        figures={**settings.networks},
    )


def _interpreter(settings: Settings, measures: Measures) -> Finding:
    idle, busy = measures.idle, measures.busy
    remedy = (
        f"send by Server(process=True), or call sys.setswitchinterval"
        f"({settings.switch / 10:g})"
    )
    return Finding(
        name="a busy Python thread",
        value=f"makes the loop {1e3 * busy.lag:.1f} ms late (alone "
        f"{1e3 * idle.lag:.1f}), a short C call {1e3 * busy.call:.2f} ms (alone "
        f"{1e3 * idle.call:.2f})",
        remedy=remedy if busy.lag > idle.lag + _LATE else "",
        figures={
            "idle_lag": idle.lag,
            "busy_lag": busy.lag,
            "idle_call": idle.call,
            "busy_call": busy.call,
        },
    )


def _loop(settings: Settings) -> Finding:
    found = settings.uvloop
    return Finding(
        name="uvloop",
        value=found or "not installed",
        remedy=""
        if found
        else "pip install 'aiockpt[uvloop]', and run your loop on it",
        figures={"version": found or None},
    )


def _shared(settings: Settings) -> Finding:
    remedy = "docker run --shm-size=1g: gloo and data loaders use it, this library not"
    if settings.shared is None:
        return Finding(name=_SHM, value="is not there", remedy=remedy)
    size, free = settings.shared
    return Finding(
        name=_SHM,
        value=f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} free",
        remedy=remedy if size < _SMALL_SHARED else "",
        figures={"size": size, "free": free},
    )


def _files(settings: Settings) -> Finding:
    remedy = f"ulimit -n {1 << 16}: each reader of a sender is an open file"
    few = 0 <= settings.files < _FEW_FILES
    return Finding(
        name="open files",
        value=f"{settings.files} at most",
        remedy=remedy if few else "",
        figures={"limit": settings.files},
    )
