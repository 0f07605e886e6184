"""A checkpoint that is offered, from its publication until its last reader is gone."""

from __future__ import annotations

from typing import Protocol

from aiockpt._rwlock import RWLock
from aiockpt.memory import Lendable
from aiockpt.wire.manifest import Manifest

__all__ = ["Published", "Servable"]


class Servable(Protocol):
    """A checkpoint in memory, as the server sees it."""

    @property
    def manifest(self) -> Manifest:
        """What describes it; sealed."""

    @property
    def live(self) -> bool:
        """Whether the memory belongs to the trainer, who will change it."""

    @property
    def arena(self) -> Lendable | None:
        """The memory that holds the data segment from its first byte on, if any."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""

    def acquire(self) -> None:
        """Keep the memory as it is until :meth:`release`; counted."""

    def release(self) -> None:
        """Undo one :meth:`acquire`."""


class Published:
    """One checkpoint from its publication until its last reader is gone."""

    __slots__ = ("_held", "lock", "servable")

    def __init__(self, servable: Servable) -> None:
        servable.acquire()
        self._held = True
        self.servable = servable
        self.lock = RWLock()

    def __repr__(self) -> str:
        return f"<Published step={self.step} readers={self.lock.statistics().readers}>"

    @property
    def step(self) -> int:
        """The step that names it."""
        return self.servable.manifest.step

    @property
    def snapshot_id(self) -> str:
        """The identity of its content."""
        return self.servable.manifest.snapshot_id

    @property
    def on_shelf(self) -> bool:
        """Whether the shelf still holds a reference, so that readers may come."""
        return self._held

    def let_go(self) -> None:
        """Give up the shelf's reference; readers keep theirs. Idempotent."""
        if self._held:
            self._held = False
            self.servable.release()
