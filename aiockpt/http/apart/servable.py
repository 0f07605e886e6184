"""What the trainer has staged, in the process that serves it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from aiockpt.format.manifest import Manifest
from aiockpt.http.apart.messages import Released, Spent
from aiockpt.http.handlers import SMALL_BYTES
from aiockpt.memory.arena import sealed
from aiockpt.memory.mapped import MappedSnapshot

__all__ = ["Servable"]

Say: TypeAlias = Callable[[Released | Spent], None]


class Servable:
    """A snapshot of the trainer's, until its last reader is gone.

    Args:
        manifest: What describes it.
        arena: A descriptor of its memory, which stays the caller's.
        number: What the trainer calls it.
        say: Tells the trainer.
        lends: Whether other processes of this host may map the memory.
    """

    live = False

    def __init__(
        self, manifest: Manifest, arena: int, number: int, say: Say, *, lends: bool
    ) -> None:
        self.manifest = manifest
        self._mapped = MappedSnapshot(manifest, arena)
        self._fd = os.dup(arena)
        self.arena = TrainersArena(arena, number, say) if lends else None
        self._references = 1
        self._number = number
        self._say = say

    def __repr__(self) -> str:
        return f"<Servable number={self._number} references={self._references}>"

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment.

        The trainer may take the memory back at any time (see `Arena.revoke`). A system
        call that reads it fails then; so few bytes that a handler would read them
        itself, which would end the process, are a copy.

        Raises:
            ConnectionResetError: the trainer has taken the memory back.
        """
        nbytes = stop - start
        if not 0 < nbytes <= SMALL_BYTES:
            return self._mapped.views(start, stop)
        data = os.pread(self._fd, nbytes, start)
        if len(data) < nbytes:
            raise ConnectionResetError("the trainer has taken the memory back")
        return [memoryview(data)]

    def acquire(self) -> None:
        """Keep the memory as it is until :meth:`release`; counted."""
        self._references += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`; after the last one the trainer may reuse it."""
        self._references -= 1
        if not self._references:
            if self.arena is not None:
                self.arena.close()
            self._mapped.close()
            os.close(self._fd)
            self._say(Released(self._number))


class TrainersArena:
    """The memory of a snapshot, to lend; the trainer is told when it is spent."""

    def __init__(self, fd: int, number: int, say: Say) -> None:
        self.fd = os.dup(fd)
        self._number = number
        self._say = say
        self._spent = False
        self._lent = -1

    def __repr__(self) -> str:
        return f"<TrainersArena number={self._number} spent={self.spent}>"

    @property
    def spent(self) -> bool:
        """Whether a process that was lent it keeps it."""
        return self._spent

    @spent.setter
    def spent(self, spent: bool) -> None:
        if spent and not self._spent:
            self._say(Spent(self._number))
        self._spent = spent

    def lend(self) -> int:
        """Return a descriptor that only reads, and stays ours; for a thread.

        Raises:
            OSError: the kernel cannot seal the memory.
        """
        if self._lent < 0:
            self._lent = sealed(self.fd)
        return self._lent

    def close(self) -> None:
        """Close the descriptors; who was lent the memory has one of his own."""
        for fd in (self.fd, self._lent):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lent = -1
