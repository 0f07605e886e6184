"""Host memory: reusable arenas, and maps from the data segment to where it lies.

Page faults, not copies, dominate a receive into fresh memory, so an arena asks for
huge pages and is reused where its owner can. Every view of memory here is a
``memoryview`` that keeps its owner alive.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from aiockpt.format.limits import enforce
from aiockpt.runtime.system import allocating, spare_memory

if sys.platform == "linux":
    import fcntl

__all__ = [
    "CAN_LEND",
    "LENT_SEALS",
    "Arena",
    "ArenaPool",
    "Borrowed",
    "Loan",
    "Memory",
    "WarmArena",
    "lend",
    "return_freed",
    "view_of_address",
]

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

CAN_LEND: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether other processes can be handed the memory of an arena."""

# F_SEAL_SHRINK, F_SEAL_GROW, and F_SEAL_FUTURE_WRITE of Linux 5.1, which not all
# versions of Python name.
LENT_SEALS: Final = 0x2 | 0x4 | 0x10

# Linux 5.14; the mmap module does not know it, and would keep the interpreter lock.
_MADV_POPULATE_WRITE = 23
# Whoever maps memory meanwhile waits until one call has ended.
_HUGE_PAGE = 2 << 20
_STRIDE = 8 << 20
_QUICK = 1e-3


class Memory(Protocol):
    """Memory that holds a data segment, or has at least a place for each byte."""

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)``, in order."""


class Lendable(Protocol):
    """Memory of which another process may get a descriptor.

    Attributes:
        fd: What it lies in; negative if it cannot be lent.
        spent: Whether a process that was lent it keeps it: its owner reuses it no more.
    """

    fd: int
    spent: bool

    def lend(self) -> int:
        """Return a descriptor that only reads, and stays ours; see `sealed`."""


def sealed(fd: int) -> int:
    """Return a new descriptor of shared memory that can only read; for a thread.

    Seals tell who has it that the size stays, and that nobody else can write either,
    but the owner through the mapping that it has.

    Raises:
        OSError: the kernel cannot seal it.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, LENT_SEALS)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class _Staging(mmap.mmap):
    """A mapping that forked children do not have."""

    file: tuple[int, int] | None = None
    left_out = False

    def leave_out_of_forks(self, fd: int) -> None:
        """Have children that are forked from now on neither map it nor open ``fd``."""
        if fd >= 0:
            self.file = _file_of(fd)
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)
            _staged.add(self)

    def forget(self) -> None:
        """Never unmap it: in this child something else may lie at its address."""
        self.left_out = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        """Unmap it where it is mapped."""
        if not self.left_out:
            super().close()


_forking = threading.RLock()
_staged: weakref.WeakSet[_Staging] = weakref.WeakSet()


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _forget_staged() -> None:
    """Let go of the parent's staging memory in a forked child."""
    _forking.release()
    left_out = [mapping for mapping in _staged if not mapping.left_out]
    for mapping in left_out:
        mapping.forget()
    files = {mapping.file for mapping in left_out} - {None}
    if not files:
        return
    # Each has several descriptors, of which Python hides that of the mapping, and
    # their owners close them again: so their numbers stay taken.
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
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


class Arena:
    """One allocation of host memory, page-aligned and zeroed when new.

    Args:
        nbytes: Its size. Pages cost nothing until they are touched.
        shared: Back it by an anonymous file, so that its descriptor can be handed
            to another process; else it is private and asks for huge pages.
        staging: Leave it out of forked children, which would keep its pages. Only for
            memory that no caller gets to see.
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
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._unpin: Callable[[], object] | None = None

    def __repr__(self) -> str:
        kind = "shared" if self.fd >= 0 else "private"
        return f"<Arena bytes={self.nbytes} {kind}>"

    @property
    def buffer(self) -> memoryview:
        """All of it, for those who take a buffer (``torch.frombuffer``)."""
        # Not the map itself: torch keeps the object but does not lock it, and memory
        # that tensors lie in must not be unmapped.
        return memoryview(self._map)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)`` as one view."""
        return [memoryview(self._map)[start:stop]] if stop > start else []

    def populate(self, start: int, stop: int, *, every: bool = False) -> None:
        """Have the pages of ``[start, stop)`` mapped now, not when bytes arrive.

        It only saves time, mostly that of a loop: on a virtual machine that gives free
        memory back to its host, each first touch may take milliseconds. A first touch
        that is quick is left to whoever brings the bytes, which then are still in the
        cache; so a sample decides, unless ``every`` page is asked for. For threads; the
        interpreter lock is free meanwhile.
        """
        if sys.platform != "linux":
            return
        for at in range(start - start % _STRIDE, stop, _STRIDE):
            began = time.perf_counter()
            self._touch(at)
            if every or time.perf_counter() - began > _QUICK:
                for rest in range(at + _HUGE_PAGE, min(at + _STRIDE, stop), _HUGE_PAGE):
                    self._touch(rest)

    def _touch(self, at: int) -> None:
        # An older kernel, or no memory: whoever brings the bytes will see.
        size = min(_HUGE_PAGE, len(self._map) - at)
        _libc.madvise(self.address + at, size, _MADV_POPULATE_WRITE)

    def discard(self, start: int, stop: int) -> None:
        """Give back the whole pages of ``[start, stop)``; they read as zeros then."""
        first, last = start + -start % mmap.PAGESIZE, stop - stop % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < last:
            _libc.madvise(self.address + first, last - first, mmap.MADV_DONTNEED)

    def empty(self) -> None:
        """Give all pages back, whoever has a view, which reads zeros. For threads."""
        if not self.closed:
            self.discard(0, len(self._map))

    def pin(self, pin: Callable[[Arena], Callable[[], None]]) -> None:
        """Page-lock it once, until it is closed, or nobody has it any more.

        ``pin`` returns what undoes it, which must not refer to the arena.
        """
        if self._unpin is None:
            # A driver takes other memory at this address for what it has locked.
            self._unpin = end = weakref.finalize(self, pin(self))
            end.atexit = False

    def lend(self) -> int:
        """Return a descriptor for another process, which can only read; for a thread.

        It is the arena's own; see `sealed`.

        Raises:
            OSError: the kernel cannot seal it.
        """
        if self._lent < 0:
            self._lent = sealed(self.fd)
        return self._lent

    def revoke(self) -> None:
        """Let no other process read it any more; only for shared memory, in a thread.

        It shrinks to nothing: what a system call would read elsewhere fails (EFAULT),
        and other reads there end that process (SIGBUS), as they would here. So it can
        only be closed, and counts as spent.

        Raises:
            OSError: it was lent, and its size is sealed.
        """
        self.spent = True
        os.ftruncate(self.fd, 0)

    @property
    def closed(self) -> bool:
        """Whether the pages have gone, and no view can be left."""
        return self._map.closed

    def close(self) -> None:
        """Unmap; views that still live keep their pages until they go. Idempotent."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        with suppress(BufferError):
            self._map.close()
        for fd in (self.fd, self._lent):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lent = -1


class Borrowed(Arena):
    """Memory of another process: what is written to it here, is copied first.

    It must be sealed against shrinking, or reading it could end this process.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._adopt(nbytes, -1, mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY))

    def populate(self, start: int, stop: int, *, every: bool = False) -> None:
        """Do nothing: a page that is made writable is a copy."""


class ArenaPool:
    """Keeps free arenas warm for the next staging of about the same size.

    ``keep`` says how many; those that came back last stay. ``dispose`` closes an arena
    somewhere else: unmapping gigabytes takes a while. Every method may be called from
    any thread.
    """

    def __init__(
        self, *, shared: bool, keep: int, dispose: Callable[[Arena], None]
    ) -> None:
        self._shared = shared
        self._keep = keep
        self._dispose = dispose
        self._lock = threading.Lock()
        self._free: list[Arena] = []
        self._idle = self._closed = False

    def take(self, nbytes: int) -> Arena:
        """Return an arena of at least ``nbytes``, reused if one is free and fits.

        If none fits, the one that came back last makes room for the new one.
        """
        with self._lock:
            self._idle = False
            fits = [a for a in self._free if nbytes <= a.nbytes <= 2 * nbytes]
            found = fits[-1:] or self._free[-1:]
            for arena in found:
                self._free.remove(arena)
        if fits:
            return fits[-1]
        self._dispose_all(found)
        return Arena(nbytes, shared=self._shared, staging=True)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back; the oldest free one returns to the system for it.

        One that is spent, since another process keeps it, is closed here only.
        """
        if arena.spent:
            self._dispose(arena)
            return
        with self._lock:
            self._free.append(arena)
            most = 0 if self._idle or self._closed else self._keep
            surplus = self._free[: len(self._free) - most]
            self._free = self._free[len(surplus) :]
        self._dispose_all(surplus)

    def trim(self) -> None:
        """Return to the system what is free, or comes back before the next `take`."""
        with self._lock:
            self._idle = True
            unused, self._free = self._free, []
        self._dispose_all(unused)

    def close(self) -> None:
        """Keep nothing from now on: what comes back returns to the system."""
        with self._lock:
            self._closed = True
        self.trim()

    def _dispose_all(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            self._dispose(arena)


class Loan:
    """An arena for one receive; ``buffer`` is for whoever keeps its bytes.

    It comes back only if it was ``finished``: after a receive that has failed somebody
    might still write to it.
    """

    __slots__ = ("__weakref__", "_finished", "arena", "buffer")

    def __init__(self, arena: Arena, returned: deque[Arena] | None = None) -> None:
        self.arena = arena
        self.buffer = arena.buffer
        self._finished: list[bool] = []
        if returned is not None:
            end = weakref.finalize(
                self.buffer, _come_back, arena, self._finished, returned
            )
            end.atexit = False

    def __repr__(self) -> str:
        return f"<Loan {self.arena}>"

    def finish(self) -> None:
        """Say that nobody writes to it any more."""
        self._finished.append(True)

    @property
    def finished(self) -> bool:
        """Whether it comes back, where it is kept."""
        return bool(self._finished)


class WarmArena:
    """Lends arenas, and keeps the last one that came back."""

    def __init__(self) -> None:
        self._returned: deque[Arena] = deque(maxlen=1)

    def __repr__(self) -> str:
        return f"<WarmArena {[*self._returned]}>"

    def lend(self, nbytes: int) -> Loan:
        """Return an arena of at least ``nbytes``: the one that is kept, if it fits.

        It does if it is not more than twice as large.
        """
        try:
            kept = self._returned.pop()
        except IndexError:
            kept = None
        if kept is not None and not _fits(kept, nbytes):
            kept.close()
            kept = None
        return Loan(kept or Arena(nbytes), self._returned)

    def kept_for(self, nbytes: int) -> int:
        """Return how much memory `lend` would not have to take from the system."""
        kept = [*self._returned]
        return kept[0].touched if kept and _fits(kept[0], nbytes) else 0

    def close(self) -> None:
        """Keep nothing from now on; what is lent lives as long as it is used."""
        returned, self._returned = self._returned, deque(maxlen=0)
        while returned:
            returned.pop().close()


def lend(nbytes: int, *, used: int, most: int | None, warm: WarmArena | None) -> Loan:
    """Return an arena for a checkpoint, of which ``used`` bytes are going to be used.

    Raises:
        LimitExceededError: they are more than ``most`` (None: what the host can spare).
        StagingError: the system refuses the memory.
    """
    if most is None:
        most = spare_memory(kept=warm.kept_for(nbytes) if warm else 0)
    enforce("the checkpoint's size", used, most)
    with allocating("a checkpoint", nbytes):
        loan = warm.lend(nbytes) if warm else Loan(Arena(nbytes))
    loan.arena.touched = max(loan.arena.touched, used)
    return loan


def _fits(kept: Arena, nbytes: int) -> bool:
    return nbytes <= kept.nbytes <= 2 * nbytes


def _come_back(arena: Arena, finished: list[bool], returned: deque[Arena]) -> None:
    if finished:
        returned.append(arena)  # one that is pushed out goes with its last view


def view_of_address(address: int, nbytes: int, owner: object) -> memoryview:
    """Return the writable bytes at ``address``; the view keeps ``owner`` alive."""
    array = (ctypes.c_char * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return memoryview(array).cast("B")


def return_freed() -> None:
    """Give freed memory back to the system, where the C library would keep it.

    After megabytes of small objects that is as much again as what is left of them. It
    takes milliseconds; the interpreter lock is free meanwhile.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
