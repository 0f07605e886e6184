"""How much memory this process has, and has had."""

from __future__ import annotations

import gc
from pathlib import Path

__all__ = ["forget_the_peak", "mapped", "resident"]


def resident(field: str) -> int:
    """Return the bytes of memory that this process has, or has had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def forget_the_peak() -> int:
    """Return how much memory this process has now; its peak starts from there."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def mapped() -> int:
    """Return how many bytes of memory that can be lent this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:aiockpt" in line:
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            total += stop - start
    return total
