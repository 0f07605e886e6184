"""Staged checkpoints in host memory that never change.

A `Snapshot` is staged by this process and counts its readers. A `MappedSnapshot` was
staged by another process, whose shared memory this process maps. The two processes
trust each other, because one is the trainer and has started the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.header import decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena

if TYPE_CHECKING:  # needs torch, which the checkpoint process does not import
    from aiockpt.memory.copies import InPlace

TRUSTED: Final = Limits(
    max_header_bytes=1 << 40,
    max_depth=1 << 20,
    max_nodes=1 << 60,
    max_tensors=1 << 60,
)
"""Limits for a header from a process that this one trusts: practically none."""


class Snapshot:
    """A staged checkpoint: a manifest and immutable bytes, with a count of its users.

    Args:
        manifest: Describes the bytes.
        memory: The memory of the data segment.
        live: Whether the bytes are the state dict's own memory (``zero_copy``), which
            a writer may change when the reader-writer lock permits it.
        on_free: Called when the last reference is released. The caller of the
            constructor has the first one.

    Attributes:
        have: The chunks that are there, all of them: bit i is chunk i.
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
        self.have = (1 << len(manifest.grid)) - 1
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
        """The arena that holds the data segment; None if the state dict holds it."""
        return self._memory if isinstance(self._memory, Arena) else None

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""
        return [view.toreadonly() for view in self.buffers(start, stop)]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes as writable views, as torch requires; nobody may write."""
        return self._memory.buffers(start, stop)

    def check(self, start: int, stop: int) -> None:
        """Check that the bytes are still there; see `Memory`."""
        self._memory.check(start, stop)

    def changed(self) -> bool:
        """Say whether torch has written to a watched live state dict since staging."""
        return not isinstance(self._memory, Arena) and self._memory.changed()

    def relabelled(self, manifest: Manifest) -> Snapshot:
        """Return a snapshot of the same memory with another manifest."""
        self.acquire()
        return Snapshot(manifest, self._memory, live=self.live, on_free=self.release)

    def acquire(self) -> None:
        """Count one more reader of the memory."""
        assert self._references > 0, "the memory has another user already"
        self._references += 1

    def release(self) -> None:
        """Release one reference; the last release frees the memory."""
        self._references -= 1
        if not self._references:
            self._on_free()


class MappedSnapshot:
    """A snapshot that another process has staged, mapped read-only.

    Args:
        manifest: Describes the bytes.
        fd: The descriptor of the shared memory; the caller closes it.
    """

    def __init__(self, manifest: Manifest, fd: int) -> None:
        self.manifest = manifest
        size = max(manifest.segment_bytes, 1)
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment as one view."""
        return [memoryview(self._map)[start:stop]] if stop > start else []

    buffers = views  # though nobody can write to them

    def check(self, start: int, stop: int) -> None:
        """Do nothing: a view keeps the mapping."""

    def close(self) -> None:
        """Unmap the memory; existing views keep their pages."""
        with suppress(BufferError):
            self._map.close()


def trusted_header(header: bytes) -> Manifest:
    """Return the manifest of a header that a trusted process sent.

    Raises:
        RemoteProtocolError: the header is not that of a snapshot.
    """
    manifest = decode_header(header, limits=TRUSTED)
    if not isinstance(manifest, Manifest):
        raise RemoteProtocolError("the header is not that of a snapshot")
    return manifest
