"""State dicts to move, and the kinds of memory that they are moved into."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from aiockpt.memory.arena import Arena

State = dict[str, torch.Tensor]

_CHECKED = 32  # tensors that are looked at
_SPARE = 3  # times the memory that is touched before a measurement
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def numbered(nbytes: int) -> torch.Tensor:
    """Return touched memory whose 8-byte words count up: ``uint8``, ``[nbytes]``."""
    flat = torch.empty(nbytes, dtype=torch.uint8)
    torch.arange(nbytes // 8, out=flat.view(torch.int64))
    return flat


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; the view keeps the tensor."""
    array = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    array.owner = flat  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return memoryview(array).cast("B")


def cut(flat: torch.Tensor, count: int) -> State:
    """Return ``count`` tensors that lie in ``flat``, each a storage of its own."""
    buffer, each = bytes_of(flat), flat.nbytes // count
    return {
        f"layers.{i}.weight": torch.frombuffer(
            buffer, dtype=torch.float32, count=each // 4, offset=i * each
        )
        for i in range(count)
    }


def looks_right(state: Mapping[str, torch.Tensor], count: int, each: int) -> bool:
    """Return whether some tensors begin and end with the words of `numbered`."""
    words = each // 8

    def word(number: int, index: int) -> int:
        address = state[f"layers.{number}.weight"].data_ptr() + 8 * index
        return ctypes.c_int64.from_address(address).value

    return len(state) == count and all(
        word(i, 0) == i * words and word(i, words - 1) == (i + 1) * words - 1
        for i in (*range(0, count, max(count // _CHECKED, 1)), count - 1)
    )


def fresh(kind: str, nbytes: int) -> memoryview:
    """Return untouched memory: ``like ours``, of ``huge`` pages, or ``small`` ones."""
    if kind == "like ours":
        return Arena(nbytes).buffer
    memory = mmap.mmap(-1, nbytes, flags=_PRIVATE)
    with suppress(OSError):  # a kernel without huge pages has one kind only
        memory.madvise(mmap.MADV_HUGEPAGE if kind == "huge" else mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)


def touch(memory: memoryview) -> memoryview:
    """Write every byte; return the memory."""
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, memory.nbytes)
    return memory


def ready(memory: str | float, nbytes: int) -> None:
    """Put the host's free memory into a known condition before a measurement.

    Some virtual machines return free pages to their host, and the first touch of such a
    page waits for the host. ``warm``: the next ``nbytes`` cost page faults only, since
    more than that was in use a moment ago. A number: the host has had so many seconds
    to take back what is free.
    """
    if not isinstance(memory, str):
        time.sleep(memory)
    elif memory == "warm":
        most = max(nbytes, available_memory() // 2)
        touch(fresh("huge", min(_SPARE * nbytes, most)))


def available_memory() -> int:
    """Return the bytes that the kernel says are available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) * 1024
