"""What a response sends: some bytes of the file that a checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aiockpt.http.store import Servable

__all__ = ["Body", "FileBody"]


class Body(Protocol):
    """A run of bytes in memory."""

    @property
    def nbytes(self) -> int:
        """How many."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)``, in order; asked for slice by slice."""


@dataclass(frozen=True, slots=True)
class FileBody:
    """``[start, stop)`` of the file that a servable is: its header, its segment."""

    servable: Servable
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of this body, in order."""
        start, stop = start + self.start, stop + self.start
        header = self.servable.manifest.header
        split = len(header)
        views = [memoryview(header)[start:stop]] if start < split else []
        if stop > split:
            views += self.servable.views(max(start - split, 0), stop - split)
        return views
