"""Host memory: reusable arenas, and the pool that keeps them.

Page faults, not copies, dominate a receive into fresh memory. So owners reuse arenas if
they can. For new memory, `PageChooser` samples which kind of page is faster. Every view
of memory here is a ``memoryview`` that keeps its owner alive.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeAlias

from aiockpt.format.limits import enforce
from aiockpt.runtime.system import FREE_MEMORY, allocating, spare_memory

if sys.platform == "linux":
    import fcntl

Touch: TypeAlias = Callable[[int, int, bool], float]
"""``touch(start, stop, huge)`` maps pages of one kind; it returns the CPU's seconds."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

CAN_LEND: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether the memory of an arena can be shared with other processes."""

# F_SEAL_SHRINK, F_SEAL_GROW, and F_SEAL_FUTURE_WRITE of Linux 5.1, which not all
# versions of Python name.
LEND_SEALS: Final = 0x2 | 0x4 | 0x10

# Linux 5.14; the mmap module does not know it, and would keep the interpreter lock.
_MADV_POPULATE_WRITE: Final = 23

# Bytes per call, since other threads that map memory wait until the call has ended.
_SAMPLE_BYTES: Final = 2 << 20  # one huge page
_STRIDE_BYTES: Final = 8 << 20
# Half of the first distance between comparisons of both kinds of pages: where small
# pages are slow, and where they are quick.
_COMPARED_AFTER_COLD_BYTES: Final = 32 << 20
_COMPARED_AFTER_WARM_BYTES: Final = 8 << 20
_MAX_DISTANCE_BYTES: Final = 256 << 20
_QUICK_S: Final = 1e-3  # for a sample, that is 2 GB/s
_MIN_SPEEDUP: Final = 1.5  # times as fast as huge pages, so that chance does not decide
_MAX_TRUST_BYTES: Final = 32 << 20


class Memory(Protocol):
    """Memory that holds a data segment."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)``, in order."""

    def check(self, start: int, stop: int) -> None:
        """Raise an error if views of ``[start, stop)`` must not be used any more."""


def _address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_bytes(
    destinations: Iterable[memoryview], sources: Iterable[memoryview]
) -> None:
    """Copy bytes from views to views of the same total size, split differently.

    What lies at the same address already is not copied.
    """
    given, source = iter(sources), memoryview(b"")
    for destination in destinations:
        rest = destination
        while rest.nbytes:
            while not source.nbytes:
                source = next(given)
            count = min(rest.nbytes, source.nbytes)
            to, start = _address_of(rest), _address_of(source)
            if to != start:
                # A foreign function, which releases the interpreter lock.
                ctypes.memmove(to, start, count)
            rest, source = rest[count:], source[count:]


class Lendable(Protocol):
    """Memory of which another process may get a descriptor.

    Attributes:
        fd: The descriptor of the memory; negative if it cannot be lent.
        spent: Whether another process keeps the memory, so that its owner must not
            reuse it.
    """

    fd: int
    spent: bool

    def lend(self) -> int:
        """Return a read-only descriptor, which the memory owns; see `sealed`."""


def sealed(fd: int) -> int:
    """Return a new, read-only descriptor of shared memory; for a thread.

    Its seals guarantee to the receiver that the size stays, and that only the owner can
    write, through its existing mapping.

    Raises:
        OSError: the kernel cannot seal it.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, LEND_SEALS)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class _Staging(mmap.mmap):
    """A mapping that forked children do not get."""

    file: tuple[int, int] | None = None
    left_out = False

    def leave_out_of_forks(self, fd: int) -> None:
        """Keep the mapping and ``fd`` from children that are forked from now on."""
        if fd >= 0:
            self.file = _file_of(fd)
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)
            _staged.add(self)

    def forget(self) -> None:
        """Never unmap it: in this child, something else may be at its address."""
        self.left_out = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Unmap the memory, unless this is a forked child."""
        if not self.left_out:
            super().close()


_forking = threading.RLock()
_staged: weakref.WeakSet[_Staging] = weakref.WeakSet()


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _descriptors() -> Iterable[int]:
    """Return the open descriptors; without /proc, all numbers that they may have."""
    try:
        return [*map(int, os.listdir("/proc/self/fd"))]
    except OSError:
        return range(min(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def _forget_staged() -> None:
    """Drop the parent's staging memory in a forked child."""
    _forking.release()
    left_out = [mapping for mapping in _staged if not mapping.left_out]
    for mapping in left_out:
        mapping.forget()
    files = {mapping.file for mapping in left_out} - {None}
    if not files:
        return
    # A mapping has several descriptors, and Python hides one of them. Their owners
    # close them again, so their numbers must stay in use.
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in _descriptors():
        with suppress(OSError):
            if _file_of(number) in files:
                os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forking.acquire,
        after_in_parent=_forking.release,
        after_in_child=_forget_staged,
    )


class PageChooser:
    """Maps pages before bytes arrive, and chooses their kind by sampling.

    Warm huge pages are several times faster than small ones. But a virtual machine that
    gives free memory back to its host has cold ones, and each first touch of a cold
    huge page takes milliseconds: here huge pages came at 0.5 GB/s then, small ones at
    1.7, and warm huge ones at 3.4 to 12. Nothing tells which pages come next. So one
    huge page is timed. If it is quick, memory is warm, and the writer of the bytes maps
    the pages itself, up to the next sample. If it is slow, the rest of a stride is
    mapped ahead, and the same number of bytes in small pages is timed. Small pages are
    used, until the next comparison, only if they are much faster.

    A comparison costs a huge page that may be cold. So the distance between comparisons
    doubles. It is short where small pages come quickly, too: they are cut from memory
    that is warm, and the huge pages behind a few cold ones are often warm again.
    """

    def __init__(self) -> None:
        self._huge = True
        self._since = math.inf  # bytes since the kinds were compared
        self._cold = _COMPARED_AFTER_COLD_BYTES
        self._warm = _COMPARED_AFTER_WARM_BYTES
        self._trust = _STRIDE_BYTES  # bytes from a quick sample to the next one

    def map(self, touch: Touch, start: int, stop: int, *, every: bool) -> int:
        """Map ``[start, stop)``, rounded to samples, as far as it saves time.

        Pages that are mapped quickly are left to the thread that writes the bytes, so
        that they are still in its cache.

        Args:
            touch: Maps pages.
            start: The first byte.
            stop: The end.
            every: Whether to map quick pages, too.

        Returns:
            Where to continue; behind ``stop`` if the memory there is trusted to be
            warm.
        """
        # A sample must not begin with pages that the range before has mapped.
        at = min(start + -start % _SAMPLE_BYTES, stop)
        if every and start < at:
            touch(start, at, self._huge)
        while at < stop:
            end = min(at + _STRIDE_BYTES, stop)
            self._since += end - at
            if not self._huge:
                took = touch(at, end, False) * _SAMPLE_BYTES / (end - at)  # noqa: FBT003
                if self._since >= (self._warm if took <= _QUICK_S else self._cold):
                    self._huge, self._since = True, math.inf
            elif self._is_warm(touch, at, end):
                if not every:
                    end = at + self._trust
                    self._trust = min(2 * self._trust, _MAX_TRUST_BYTES)
                elif at + _SAMPLE_BYTES < end:
                    touch(at + _SAMPLE_BYTES, end, True)  # noqa: FBT003
            at = end
        return at

    def _is_warm(self, touch: Touch, at: int, end: int) -> bool:
        """Time a huge page; map the rest of the stride if it was slow."""
        mapped = at + _SAMPLE_BYTES
        took = touch(at, mapped, True)  # noqa: FBT003 - the kind of the pages
        if took <= _QUICK_S:
            self._warm = _COMPARED_AFTER_WARM_BYTES
            return True
        self._trust = _STRIDE_BYTES
        if self._since >= self._cold and mapped + _SAMPLE_BYTES <= end:
            small = touch(mapped, mapped + _SAMPLE_BYTES, False)  # noqa: FBT003
            mapped += _SAMPLE_BYTES
            self._huge, self._since = took < _MIN_SPEEDUP * small, 0
            self._cold = min(2 * self._cold, _MAX_DISTANCE_BYTES)
            self._warm = min(2 * self._warm, _MAX_DISTANCE_BYTES)
        if mapped < end:
            touch(mapped, end, self._huge)
        return False


class Arena:
    """One allocation of host memory, page-aligned and zeroed when new.

    Args:
        nbytes: Its size. Pages cost nothing until they are touched.
        shared: Back it by an anonymous file, whose descriptor can be sent to another
            process.
        staging: Do not map it in forked children, which would keep its pages. Only for
            memory that is never exposed to a caller.

    Attributes:
        nbytes: Its size.
        fd: The descriptor of shared memory, else -1.
        address: The address of its first byte.
        spent: Whether another process keeps it, so that it must not be reused.
        touched: How many of its bytes have been used so far.
    """

    def __init__(
        self, nbytes: int, *, shared: bool = False, staging: bool = False
    ) -> None:
        fd = -1
        size = max(nbytes, mmap.PAGESIZE)
        with _forking:  # a child is forked before all of this, or after it
            if shared:
                fd = os.memfd_create("aiockpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, size)
            # A duplicate belongs to the mapping, so the arena may close its own.
            kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = (_Staging if staging else mmap.mmap)(fd, size, flags=kind)
            if isinstance(mapping, _Staging):
                mapping.leave_out_of_forks(fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a shared one needs shmem_enabled, too
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._adopt(nbytes, fd, mapping)

    def _adopt(self, nbytes: int, fd: int, mapping: mmap.mmap) -> None:
        self.nbytes, self.fd, self._map = nbytes, fd, mapping
        self.spent, self.touched = False, 0
        self._lent = -1
        self._pages = PageChooser()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._unpin: Callable[[], object] | None = None

    @property
    def buffer(self) -> memoryview:
        """All of it, for functions that take a buffer (``torch.frombuffer``)."""
        # Not the map itself: torch keeps the object but does not lock it, and memory
        # of tensors must not be unmapped.
        return memoryview(self._map)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)`` as one view."""
        return [memoryview(self._map)[start:stop]] if stop > start else []

    def check(self, start: int, stop: int) -> None:
        """Do nothing: a view of the arena keeps its memory."""

    def populate(self, start: int, stop: int, *, every: bool = False) -> int:
        """Map the pages of ``[start, stop)`` now, not when bytes arrive.

        It only saves time, mostly that of an event loop; see `PageChooser`. For
        threads: the interpreter lock is free meanwhile. Returns where to continue.
        """
        if sys.platform != "linux":
            return sys.maxsize
        return self._pages.map(self._touch, start, stop, every=every)

    def _touch(self, start: int, stop: int, huge: bool) -> float:  # noqa: FBT001 - a kind
        # Not the wall clock: another process may have the core meanwhile.
        began, stop = time.thread_time(), min(stop, len(self._map))
        kind = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
        # An error (an old kernel, or no memory) is left to the writer of the bytes.
        _libc.madvise(self.address + start, stop - start, kind)
        for at in range(start, stop, _SAMPLE_BYTES):
            size = min(_SAMPLE_BYTES, stop - at)
            _libc.madvise(self.address + at, size, _MADV_POPULATE_WRITE)
        return time.thread_time() - began

    def discard(self, start: int, stop: int) -> None:
        """Return the whole pages of ``[start, stop)`` to the system; they read as 0."""
        first, last = start + -start % mmap.PAGESIZE, stop - stop % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < last:
            _libc.madvise(self.address + first, last - first, mmap.MADV_DONTNEED)

    def empty(self) -> None:
        """Return all pages to the system; remaining views read 0. For threads."""
        if not self.closed:
            self.discard(0, len(self._map))

    def pin(self, pin: Callable[[Arena], Callable[[], None]]) -> None:
        """Page-lock the memory once, until it is closed or garbage.

        ``pin`` returns the function that undoes it, which must not refer to the arena.
        """
        if self._unpin is None:
            # Else a driver would take later memory at this address for locked memory.
            self._unpin = end = weakref.finalize(self, pin(self))
            end.atexit = False

    def lend(self) -> int:
        """Return a read-only descriptor for another process; for a thread.

        The arena owns it; see `sealed`.

        Raises:
            OSError: the kernel cannot seal it.
        """
        if self._lent < 0:
            self._lent = sealed(self.fd)
        return self._lent

    @property
    def closed(self) -> bool:
        """Whether the pages are gone, so that no view can be left."""
        return self._map.closed

    def close(self) -> None:
        """Unmap the memory; a view that is left keeps the pages. Idempotent."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        with suppress(BufferError):
            self._map.close()
        for fd in (self.fd, self._lent):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lent = -1


class AttachedArena(Arena):
    """A private mapping of another process's memory; writes copy the page first.

    The memory must be sealed against shrinking, or reading it could kill this process.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._adopt(nbytes, -1, mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY))

    def populate(self, start: int, stop: int, *, every: bool = False) -> int:
        """Do nothing, because making a page writable would copy it."""
        return sys.maxsize


class ArenaPool:
    """Keeps free arenas for the next checkpoint of about the same size.

    An arena returns explicitly (`take`, `give_back`), or when its buffer is freed
    (`lease`). Pages that were touched before are several times faster to write.

    All methods may be called from any thread and at any moment, because the garbage
    collector may free a buffer. So the pool has no lock. Each operation on its deque is
    atomic.

    Args:
        keep: How many free arenas to keep; the most recent ones stay.
        shared: See `Arena`.
        staging: See `Arena`.
        dispose: Closes an arena in another thread, since unmapping gigabytes takes a
            while; None: the calling thread closes it.
    """

    def __init__(
        self,
        *,
        keep: int,
        shared: bool = False,
        staging: bool = True,
        dispose: Callable[[Arena], object] | None = None,
    ) -> None:
        self._keep = keep
        self._shared, self._staging = shared, staging
        self._dispose = dispose or (lambda arena: arena.close())
        self._free: deque[Arena] = deque()  # the most recent one is last
        self._idle = self._closed = False

    @property
    def free(self) -> Sequence[Arena]:
        """The unused arenas, oldest first."""
        return [*self._free]

    def take(self, nbytes: int) -> Arena:
        """Return an arena of at least ``nbytes``, reused if a free one fits.

        An arena fits if it is at most twice as large. If none fits, the most recent one
        is freed for the new one.
        """
        self._idle = False
        free = self._take_all()
        fits = [arena for arena in free if _fits(arena, nbytes)]
        for found in fits[-1:] or free[-1:]:
            free.remove(found)
            self._free.extendleft(reversed(free))
            if fits:
                return found
            self._dispose(found)
        return Arena(nbytes, shared=self._shared, staging=self._staging)

    def give_back(self, arena: Arena) -> None:
        """Keep an arena for reuse; free the oldest one if there are too many.

        An arena that another process keeps (``spent``) is closed instead.
        """
        if arena.spent:
            self._dispose(arena)
            return
        self._free.append(arena)
        self._limit(0 if self._idle or self._closed else self._keep)

    def lease(self, nbytes: int) -> ArenaLease:
        """Return an arena, as `take` does, that returns when its buffer is freed."""
        return ArenaLease(self.take(nbytes), self)

    def kept_for(self, nbytes: int) -> int:
        """Return how many bytes `take` could reuse instead of allocating."""
        return max((a.touched for a in self.free if _fits(a, nbytes)), default=0)

    def trim(self) -> None:
        """Free all arenas that are unused now or return before the next `take`."""
        self._idle = True
        self._limit(0)

    def close(self) -> None:
        """Free all arenas, also those that return later."""
        self._closed = True
        self.trim()

    def _take_all(self) -> list[Arena]:
        found: list[Arena] = []
        with suppress(IndexError):  # empty
            while True:
                found.append(self._free.popleft())
        return found

    def _limit(self, most: int) -> None:
        with suppress(IndexError):  # another thread was faster
            while len(self._free) > most:
                self._dispose(self._free.popleft())


class ArenaLease:
    """An arena for one receive; its tensors refer to ``buffer``.

    When the last tensor and so the buffer is freed, the arena returns to its pool, if
    `finish` was called. After a failed receive it does not return, because something
    might still write to the memory.

    Args:
        arena: The memory.
        pool: The pool to return to; None: the memory is freed.
    """

    __slots__ = ("__weakref__", "_finished", "arena", "buffer")

    def __init__(self, arena: Arena, pool: ArenaPool | None = None) -> None:
        self.arena = arena
        self.buffer = arena.buffer
        self._finished: list[bool] = []
        if pool is not None:
            end = weakref.finalize(self.buffer, _come_back, arena, self._finished, pool)
            end.atexit = False

    def finish(self) -> None:
        """Declare that nothing writes to the memory any more."""
        self._finished.append(True)

    @property
    def finished(self) -> bool:
        """Whether the arena returns to its pool, if it has one."""
        return bool(self._finished)


def lease_arena(
    nbytes: int, *, used: int, most: int | None, pool: ArenaPool | None
) -> ArenaLease:
    """Return memory for a checkpoint.

    Args:
        nbytes: The size of the data segment.
        used: How many of its bytes will be used.
        most: The largest accepted ``used``; None: the spare memory of the host.
        pool: The pool that the memory comes from and returns to; None: the system.

    Raises:
        LimitExceededError: ``used`` is more than ``most``.
        StagingError: the system refuses the memory.
    """
    if most is None:
        spare = spare_memory(kept=pool.kept_for(nbytes) if pool else 0)
        enforce("the checkpoint's size", used, spare, remedy=FREE_MEMORY)
    enforce("the checkpoint's size", used, most, "max_bytes")
    with allocating("a checkpoint", nbytes):
        lease = pool.lease(nbytes) if pool else ArenaLease(Arena(nbytes))
    lease.arena.touched = max(lease.arena.touched, used)
    return lease


def _fits(arena: Arena, nbytes: int) -> bool:
    return nbytes <= arena.nbytes <= 2 * nbytes


def _come_back(arena: Arena, finished: list[bool], pool: ArenaPool) -> None:
    if finished:
        pool.give_back(arena)


def view_of_address(address: int, nbytes: int, owner: object) -> memoryview:
    """Return the writable bytes at ``address``; the view keeps ``owner`` alive."""
    array = (ctypes.c_char * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return memoryview(array).cast("B")


def return_freed() -> None:
    """Return freed memory from the C library to the system.

    After megabytes of small objects, the C library may keep as much free memory as the
    remaining objects use. The call takes milliseconds, without the interpreter lock.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
