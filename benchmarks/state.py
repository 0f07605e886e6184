"""The state dicts that are moved, and the kinds of memory they are moved into."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from aiockpt.memory.arena import Arena

__all__ = [
    "FRESH",
    "KINDS",
    "SHAPES",
    "SMALL",
    "TOUCHED",
    "Shape",
    "State",
    "address_of",
    "available_memory",
    "await_cold_memory",
    "bytes_of",
    "cut",
    "forget_peak",
    "fresh",
    "looks_right",
    "numbered",
    "process_memory",
    "shape_of",
    "touch",
    "warm_host",
]

State = dict[str, torch.Tensor]

MANY = 100_000
SHAPES = ("1m", "256m", "one", "100k")
"""Tensors of 1 MiB; of 256 MiB; one tensor; 100,000 tensors of 4 KiB."""

TOUCHED = "touched"
FRESH = "fresh, as the library's"
HUGE = "fresh huge pages"
SMALL = "fresh 4 KiB pages"
KINDS = (TOUCHED, FRESH, HUGE, SMALL)
"""Kinds of memory to copy or receive into."""

_KIB, _MIB = 1 << 10, 1 << 20
_CHECKED = 32  # tensors that are looked at
_UNTIL_COLD = 6.0  # seconds; a host is told of free pages every 2 s
_SPARE = 3  # times the memory that is touched before a measurement
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@dataclass(frozen=True, slots=True)
class Shape:
    """A state dict of ``count`` tensors of ``tensor_bytes`` bytes each."""

    key: str
    count: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.count * self.tensor_bytes

    @property
    def is_large(self) -> bool:
        """Whether the bytes decide, and not the number of tensors."""
        return self.key != "100k"

    @property
    def has_many(self) -> bool:
        """Whether there are as many small tensors as the target is about."""
        return self.count == MANY

    def __str__(self) -> str:
        if self.tensor_bytes < _MIB:
            return f"{self.count:,} x {self.tensor_bytes / _KIB:.4g} KiB"
        return f"{self.count:,} x {self.tensor_bytes / _MIB:.4g} MiB"


def shape_of(key: str, size: int) -> Shape:
    """Return the shape that ``key`` means for about ``size`` bytes.

    If 100,000 tensors would be more than half of ``size``, there are fewer of them.
    """
    if key == "100k":
        return Shape(key, max(min(MANY, size // (8 * _KIB)), 1), 4 * _KIB)
    wanted = {"1m": _MIB, "256m": 256 * _MIB, "one": size}[key]
    each = min(wanted, size) // 8 * 8
    return Shape(key, size // each, each)


def numbered(nbytes: int) -> torch.Tensor:
    """Return touched memory whose 8-byte words count up: ``uint8``, ``[nbytes]``."""
    flat = torch.empty(nbytes, dtype=torch.uint8)
    torch.arange(nbytes // 8, out=flat[: nbytes // 8 * 8].view(torch.int64))
    return flat


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; the view keeps the tensor."""
    array = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    array.owner = flat  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return memoryview(array).cast("B")


def cut(flat: torch.Tensor, shape: Shape) -> State:
    """Return a state dict whose tensors lie in ``flat``, each a storage of its own."""
    buffer = bytes_of(flat)
    elements, each = shape.tensor_bytes // 4, shape.tensor_bytes
    return {
        f"layers.{i}.weight": torch.frombuffer(
            buffer, dtype=torch.float32, count=elements, offset=i * each
        )
        for i in range(shape.count)
    }


def looks_right(state: Mapping[str, torch.Tensor], shape: Shape) -> bool:
    """Return whether some tensors begin and end with the words of `numbered`."""
    words, step = shape.tensor_bytes // 8, max(shape.count // _CHECKED, 1)

    def word(number: int, index: int) -> int:
        address = state[f"layers.{number}.weight"].data_ptr() + 8 * index
        return ctypes.c_int64.from_address(address).value

    return len(state) == shape.count and all(
        word(i, 0) == i * words and word(i, words - 1) == (i + 1) * words - 1
        for i in (*range(0, shape.count, step), shape.count - 1)
    )


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


def touch(memory: memoryview) -> memoryview:
    """Write every byte; return the memory."""
    ctypes.memset(address_of(memory), 1, memory.nbytes)
    return memory


def warm_host(nbytes: int) -> None:
    """Make sure that the next ``nbytes`` of fresh memory cost page faults only.

    Some virtual machines return free pages to their host, and the first touch of such a
    page waits for the host. Pages that were in use a moment ago are still there, except
    those that the host takes meanwhile, so more pages are touched than are needed.
    """
    most = max(nbytes, available_memory() // 2)
    touch(fresh(HUGE, min(_SPARE * nbytes, most)))


def await_cold_memory() -> None:
    """Give the host time to take back what is free, if it does that; see `warm_host`.

    Nothing tells whether it has. Pages of several kinds, touched after the same wait,
    show it.
    """
    time.sleep(_UNTIL_COLD)


def available_memory() -> int:
    """Return the bytes that the kernel says are available."""
    return _kibibytes("/proc/meminfo", "MemAvailable")


def process_memory(*, peak: bool = False) -> int:
    """Return the resident bytes of this process now, or at most since `forget_peak`."""
    return _kibibytes("/proc/self/status", "VmHWM" if peak else "VmRSS")


def forget_peak() -> None:
    """Begin a new peak at what is resident now, where the kernel can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _kibibytes(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
