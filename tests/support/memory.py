"""How much memory this process has, and has had."""

from __future__ import annotations

import gc
from pathlib import Path

__all__ = ["arenas", "forget_the_peak", "mapped", "resident"]


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


def _lendable() -> list[list[str]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split() for line in lines if "/memfd:aiockpt" in line]


def mapped() -> int:
    """Return how many bytes of memory that can be lent this process has mapped."""
    bounds = [[int(each, 16) for each in found[0].split("-")] for found in _lendable()]
    return sum(stop - start for start, stop in bounds)


def arenas() -> set[str]:
    """Return which memory that can be lent this process has mapped."""
    return {found[4] for found in _lendable()}
