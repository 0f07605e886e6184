"""A snapshot that another process has staged, in memory that both have.

The two trust each other: one is the trainer, the other was started by it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.header import decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest

__all__ = ["TRUSTED", "MappedSnapshot", "trusted_header"]

# The trainer made it: nothing here is from a stranger.
TRUSTED: Final = Limits(
    max_header_bytes=1 << 40,
    max_depth=1 << 20,
    max_nodes=1 << 60,
    max_tensors=1 << 60,
)
"""What is accepted of the other one."""


class MappedSnapshot:
    """A snapshot in memory that another process has staged."""

    def __init__(self, manifest: Manifest, fd: int) -> None:
        self.manifest = manifest
        size = max(manifest.segment_bytes, 1)
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def __repr__(self) -> str:
        return f"<MappedSnapshot step={self.manifest.step}>"

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment as one view."""
        return [memoryview(self._map)[start:stop]] if stop > start else []

    def close(self) -> None:
        """Unmap; a view that somebody has kept keeps its pages."""
        with suppress(BufferError):
            self._map.close()


def trusted_header(header: bytes) -> Manifest:
    """Return the manifest of a header that the trainer sent."""
    manifest = decode_header(header, limits=TRUSTED)
    if not isinstance(manifest, Manifest):
        raise RemoteProtocolError("this is no header of a snapshot")
    return manifest
