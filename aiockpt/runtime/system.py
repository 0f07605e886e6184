"""The limits of this host: memory, cores, descriptors, and garbage collection.

`available_memory` is the only function that measures free memory. All code that
allocates for a checkpoint calls `spare_memory` first, and reports a refused allocation
through `allocating`.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, ParamSpec, TypeVar

from aiockpt.errors import AiockptError, LimitExceededError, StagingError

if sys.platform != "win32":
    import resource

P = ParamSpec("P")
T = TypeVar("T")

_ROOT: Final = Path("/")
_MOUNT: Final = "sys/fs/cgroup"

# A process that takes more would leave the host without memory.
_MAX_FRACTION: Final = 0.9

_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_MAX_FILES: Final = 65_536  # descriptors; more would help nobody
_HOSTS: Final = (*_DESCRIPTORS, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
_LIBRARIES: Final = {
    *(*sys.stdlib_module_names, "aiockpt", "msgspec", "numpy", "torch"),
    *("obstore", "pyo3_runtime"),  # the latter has obstore's panics
}
_CALLERS: Final = "_aiockpt_callers"

# Scanning fewer objects is faster than asking whether anything is frozen.
_MANY_OBJECTS: Final = 20_000


# ---------------------------------------------------------------------- free memory


class _Names(NamedTuple):
    """The file names of one cgroup version, and which statistics are reclaimable."""

    limit: str
    used: str
    reclaimable: tuple[str, ...]


_VERSION_1: Final = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",)
)
_VERSION_2: Final = _Names(
    "memory.max", "memory.current", ("inactive_file", "slab_reclaimable")
)


FREE_MEMORY: Final = "free memory on this host, or take a part of it by select="
"""What to do where the limit is the host's memory."""


def spare_memory(kept: int = 0, *, root: Path = _ROOT) -> int:
    """Return how many bytes a receive or a load may take.

    Args:
        kept: Bytes that this process has already and will reuse.
        root: See `available_memory`.
    """
    return int(available_memory(root) * _MAX_FRACTION) + kept


def available_memory(root: Path = _ROOT) -> int:
    """Return how many more bytes this process could take.

    The kernel and the cgroups of the process both set a bound; the lowest one counts.
    Page cache and kernel caches that a cgroup would give back count as free.

    Args:
        root: The directory that contains ``proc`` and ``sys``.
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
        # A container may see its own group as the root, under the path that the host
        # has for it. Directories that do not exist are skipped.
        inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(inside) + 1):
            with suppress(OSError, ValueError):
                yield _available_in(base.joinpath(*inside[:depth]), names)


def _own_groups(root: Path) -> Iterator[tuple[Path, str, _Names]]:
    """Yield each mounted hierarchy that may limit memory, with this process's path."""
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
    limit = int((group / names.limit).read_text())  # "max" means no limit
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


@contextmanager
def allocating(what: str, nbytes: int) -> Iterator[None]:
    """Translate a failed allocation in the block into an error with the reason.

    Args:
        what: What the memory is for, as in "no memory for {what}".
        nbytes: How much memory the block asks for.

    Raises:
        LimitExceededError: ``nbytes`` is more than this host has free.
        StagingError: the system refuses the memory although it is free.
    """
    try:
        yield
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        free = available_memory()
        if nbytes > free:
            raise LimitExceededError(
                what, limit=free, actual=nbytes, detail=FREE_MEMORY
            ) from error
        reason = str(error) or type(error).__name__
        raise StagingError(
            f"no memory for {what} of {nbytes} bytes on this host: {reason}; {free} "
            "bytes are free, so look at `ulimit -v` and vm.overcommit_memory"
        ) from error


# ------------------------------------------------------- whose error a failure is


@contextmanager
def failing_here(what: str) -> Iterator[None]:
    """Raise `StagingError` if the system, or its memory, fails the block."""
    try:
        yield
    except AiockptError:
        raise  # some of them are OSErrors as well
    except (OSError, MemoryError) as error:
        if is_callers(error):
            raise
        raise refused_by_host(what, error) from error


def is_hosts(error: BaseException) -> bool:
    """Say whether this host, and not a peer, caused a system error."""
    return isinstance(error, OSError) and error.errno in _HOSTS


def refused_by_host(what: str, error: BaseException) -> StagingError:
    """Return the error to raise for an operation that this host refused."""
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS:
        most = descriptor_limit()
        reason += f"; this process may open {most} files: raise it with `ulimit -n`"
    return StagingError(f"{what} failed on this host: {reason}")


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    if sys.platform == "win32":
        return _MAX_FILES
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_FILES if most == resource.RLIM_INFINITY else most


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as its hard limit allows.

    Call it only in a process of our own: children inherit the limit, and what uses
    ``select`` fails with descriptors above 1023.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some systems allow fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def of_caller(fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of the caller, so that `is_callers` recognizes its errors."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            with suppress(AttributeError):  # an exception class with slots
                setattr(error, _CALLERS, True)
            raise

    return call


def is_callers(error: BaseException) -> bool:
    """Say whether a function that `of_caller` wrapped has raised this error."""
    return hasattr(error, _CALLERS)


def is_programs(error: BaseException) -> bool:
    """Say whether neither the system nor a library that is used here raises this error.

    A signal's handler may raise anything in the middle of any call: an error of the
    program's own class, or a built-in ``OSError`` without a number of the system, such
    as ``TimeoutError("too late")``.
    """
    module, _, _ = type(error).__module__.partition(".")
    if module == "builtins" and isinstance(error, OSError):
        return error.errno is None
    return module not in _LIBRARIES


# ------------------------------------------------------------------ this process


class Crowding(NamedTuple):
    """What keeps a nice thread waiting: its niceness, and the load on its cores."""

    niceness: int
    load: float
    cores: int


def crowding() -> Crowding | None:
    """Say how the calling thread fares, if it is nice on a host that is busy."""
    if sys.platform != "linux":  # elsewhere, a priority is that of the process
        return None
    try:
        niceness, load = os.getpriority(os.PRIO_PROCESS, 0), os.getloadavg()[0]
    except OSError:  # without /proc, nobody knows the load
        return None
    cores = usable_cores()
    return Crowding(niceness, load, cores) if niceness > 0 and load > cores else None


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copying_threads() -> int:
    """Return how many threads should copy, read or digest memory at once.

    Half of the cores stay for the program. More than four threads would often have the
    interpreter lock, for which a training loop waits between two steps.
    """
    return min(max(usable_cores() // 2, 2), 4)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the cyclic collector off for a block that makes no cycles.

    The collector would scan every new object repeatedly while it holds the interpreter
    lock. That takes half of the time of describing 100,000 tensors. Reference counting
    goes on.

    Afterwards the new objects count as old. A scan of them as young objects would come
    at once and hold the interpreter lock for 20 ms, or for 100 ms if it became a full
    collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Objects frozen by others must stay frozen. Counting them visits each one.
            if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
