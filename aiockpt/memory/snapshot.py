"""What staging makes: a checkpoint in host memory that never changes."""

from __future__ import annotations

from collections.abc import Callable

from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena
from aiockpt.memory.copy import InPlace

__all__ = ["Snapshot"]


class Snapshot:
    """One staged checkpoint: bytes that never change, counted while they are read.

    It starts with one reference, its maker's. ``live`` says that the bytes are the
    state dict's own memory (``zero_copy``), which a writer may change once the
    reader-writer lock says so.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Arena | InPlace,
        *,
        live: bool,
        on_free: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self.live = live
        self._memory = memory
        self._references = 1
        self._on_free = on_free

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"<Snapshot step={manifest.step} bytes={manifest.segment_bytes} "
            f"references={self._references}>"
        )

    @property
    def arena(self) -> Arena | None:
        """The memory that holds it from its first byte on; None if it is elsewhere."""
        return self._memory if isinstance(self._memory, Arena) else None

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""
        return [view.toreadonly() for view in self.buffers(start, stop)]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the same as torch wants them: writable, though nobody writes."""
        return self._memory.buffers(start, stop)

    def changed(self) -> bool:
        """Say whether memory that is watched has changed, as far as torch knows."""
        return isinstance(self._memory, InPlace) and self._memory.changed()

    def relabelled(self, manifest: Manifest) -> Snapshot:
        """Return a snapshot of the same memory with another manifest."""
        self.acquire()
        return Snapshot(manifest, self._memory, live=self.live, on_free=self.release)

    def acquire(self) -> None:
        """Count one more reader of the memory."""
        assert self._references > 0, "the memory has another user already"
        self._references += 1

    def release(self) -> None:
        """Give one reference back; the last one frees the memory."""
        self._references -= 1
        if not self._references:
            self._on_free()
