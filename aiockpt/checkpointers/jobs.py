"""One write: a staged snapshot, sealed and given to the writer. It blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import msgspec

from aiockpt._channel import unpack
from aiockpt._mapped import TRUSTED
from aiockpt.checkpointers.messages import Write
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.wire.chunks import digest
from aiockpt.wire.manifest import Manifest
from aiockpt.wire.registry import REGISTRY
from aiockpt.wire.relabel import with_digests
from aiockpt.wire.tree import encode_tree
from aiockpt.wire.untree import decode_tree

__all__ = [
    "Job",
    "Staged",
    "decode_keywords",
    "encode_keywords",
    "perform",
    "sealed",
]


class Staged(Protocol):
    """What a writer needs of a snapshot."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of the data segment, in order."""


@dataclass(slots=True)
class Job:
    """A write that was handed over; it owns the arena's descriptor."""

    request: Write
    header: bytes
    keywords: bytes
    arena: int

    @classmethod
    def of(cls, request: Write, fds: list[int]) -> Self:
        """Take what came with the message."""
        parcel, arena = fds
        content = unpack(parcel)
        cut = request.header_bytes
        return cls(request, content[:cut], content[cut:], arena)

    def close(self) -> None:
        """Let go of the arena. Idempotent."""
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


class _Watched:
    """A snapshot that tells how far its reader is."""

    def __init__(self, snapshot: Staged, report: Callable[[int], object]) -> None:
        self.manifest = snapshot.manifest
        self._snapshot = snapshot
        self._report = report

    def __repr__(self) -> str:
        return f"<Watched {self._snapshot!r}>"

    def views(self, start: int, stop: int) -> list[memoryview]:
        self._report(start)
        return self._snapshot.views(start, stop)


def sealed(snapshot: Staged) -> Manifest:
    """Return the manifest with the digest of every chunk."""
    manifest = snapshot.manifest
    grid = manifest.grid
    chunks = range(len(grid))
    digests = [digest(snapshot.views(*grid.range(chunk))) for chunk in chunks]
    return with_digests(manifest, digests)


def encode_keywords(keywords: Mapping[str, object]) -> bytes:
    """Return keyword arguments as data.

    Raises:
        UnsupportedLeafError: one cannot travel; ``path`` says which.
    """
    tree = encode_tree(
        dict(keywords), registry=REGISTRY, leaf=lambda _, __: None, limits=TRUSTED
    )
    return msgspec.json.encode(tree)


def decode_keywords(text: bytes) -> dict[str, Any]:
    """Return what `encode_keywords` encoded."""
    node = msgspec.json.decode(text)
    found = decode_tree(node, registry=REGISTRY, tensors=(), limits=TRUSTED)
    return cast("dict[str, Any]", found)


def perform(
    writer: Any,
    path: str,
    snapshot: Staged,
    keywords: Mapping[str, Any],
    *,
    memory: Callable[[], mmap.mmap | memoryview],
    report: Callable[[int], object],
) -> None:
    """Have the writer write a sealed snapshot.

    One that has a ``write`` of its own gets a state dict over ``memory()``, which is
    its until it returns.
    """
    if getattr(type(writer), "write", None) is CheckpointWriter.write:
        writer.write_snapshot(path, _Watched(snapshot, report), **keywords)
        return
    from aiockpt.rebuild import Frame, assemble, tensors_over

    tensors = tensors_over(snapshot.manifest, memory())
    state = assemble(Frame.of(snapshot.manifest), tensors, limits=TRUSTED)
    writer.write(path=path, state_dict=state, **keywords)
