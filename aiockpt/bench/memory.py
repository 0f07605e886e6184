"""Memory to copy and receive into, by kind, and how much of it a process has had."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

from aiockpt.memory.arena import Arena
from aiockpt.runtime.system import available_memory

__all__ = [
    "FRESH",
    "KINDS",
    "TOUCHED",
    "address_of",
    "forget_peak",
    "fresh",
    "peak",
    "resident",
    "touch",
    "warm_host",
]

TOUCHED = "touched"
FRESH = "fresh, as the library's"
HUGE = "fresh huge pages"
SMALL = "fresh 4 KiB pages"
KINDS = (TOUCHED, FRESH, HUGE, SMALL)
"""Kinds of memory to copy or receive into."""

_SPARE = 3
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def fresh(kind: str, nbytes: int) -> memoryview:
    """Return memory that nobody has touched; it lives as long as the view."""
    if kind == FRESH:
        return Arena(nbytes).buffer
    memory = mmap.mmap(-1, nbytes, flags=_PRIVATE)
    advice = "MADV_HUGEPAGE" if kind == HUGE else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without huge pages has one kind only
            memory.madvise(getattr(mmap, advice))
    return memoryview(memory)


def address_of(memory: memoryview) -> int:
    """Return where writable memory starts; it must outlive the use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def warm_host(nbytes: int) -> None:
    """Make sure that the next ``nbytes`` of fresh memory cost page faults only.

    Some virtual machines return free pages to their host, and the first touch of such
    a page waits for the host. Pages that were in use a moment ago are still there, but
    for those that the host gets meanwhile; so there are more than are needed.
    """
    most = max(nbytes, available_memory() // 2)
    touch(fresh(HUGE, min(_SPARE * nbytes, most)))


def touch(memory: memoryview) -> memoryview:
    """Write every byte; return the memory."""
    ctypes.memset(address_of(memory), 1, memory.nbytes)
    return memory


def resident() -> int:
    """Return the bytes that this process has in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that this process had in memory since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Start a new peak at what is in memory now, where the kernel can do that."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
