"""How much memory there is to be had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

__all__ = ["available_memory", "spare_memory"]

_ROOT: Final = Path("/")
_MOUNT: Final = "sys/fs/cgroup"

# A process that leaves less to others would take the host down with it.
_SHARE: Final = 0.9


class _Names(NamedTuple):
    """The files of a version of cgroups, and what its statistics call reclaimable."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]


_VERSION_1: Final = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",)
)
_VERSION_2: Final = _Names(
    "memory.max", "memory.current", ("inactive_file", "slab_reclaimable")
)


def spare_memory(kept: int = 0, *, root: Path = _ROOT) -> int:
    """Return the bytes that a receive or a load may take.

    Args:
        kept: Bytes that this process has already and is going to use for it.
        root: See `available_memory`.
    """
    return int(available_memory(root) * _SHARE) + kept


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process could still take, by the kernel and cgroups.

    Page cache and caches of the kernel that a cgroup would give back count as free. Of
    the process's cgroup and its ancestors, the one that has least left counts.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    known = [*_meminfo_available(root), *_cgroups_available(root)]
    return min(known, default=1 << 62)


def _meminfo_available(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _cgroups_available(root: Path) -> Iterator[int]:
    for base, path, names in _own_groups(root):
        # A container may see its own group as the root, under whatever path the host
        # has it: directories that are not there are passed over.
        inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(inside) + 1):
            with suppress(OSError, ValueError):
                yield _available_in(base.joinpath(*inside[:depth]), names)


def _own_groups(root: Path) -> Iterator[tuple[Path, str, _Names]]:
    """Give the mounted hierarchies that may bound memory, and the own path in each."""
    mount, lines = root / _MOUNT, ["0::/"]
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield mount, path, _VERSION_2
        elif "memory" in controllers.split(","):
            yield mount / "memory", path, _VERSION_1


def _available_in(group: Path, names: _Names) -> int:
    limit = int((group / names.limit).read_text())  # "max" is none
    used = int((group / names.used).read_text())
    return max(limit - used + _reclaimable_in(group, names), 0)


def _reclaimable_in(group: Path, names: _Names) -> int:
    found = 0
    with suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names.reclaimable and value.isdecimal():
                found += int(value)
    return found
