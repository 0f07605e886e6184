"""One write: a staged snapshot is given to the writer, and digested. It blocks."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import msgspec

from aiockpt.checkpointers.messages import Write
from aiockpt.checkpointers.writer import CheckpointWriter, Written
from aiockpt.format.chunks import ChunkHasher, digest
from aiockpt.format.header import with_digests
from aiockpt.format.manifest import Manifest
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import decode_tree, encode_tree
from aiockpt.memory.mapped import TRUSTED
from aiockpt.runtime.channel import unpack
from aiockpt.transfer.repeats import content_of

__all__ = [
    "Job",
    "Staged",
    "Watch",
    "decode_keywords",
    "encode_keywords",
    "forsake",
    "perform",
    "sealed",
]

logger = logging.getLogger("aiockpt")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a write looks at, and who looks at it.

    Attributes:
        report: Hears how many bytes the writer has taken.
        on_seal: Hears of the manifest with the digests, as soon as it is known.
    """

    report: Callable[[int], object]
    on_seal: Callable[[Manifest], object]


class _Whole:
    """A sealed snapshot that tells how far its reader is."""

    def __init__(self, snapshot: Staged, watch: Watch) -> None:
        self.manifest = sealed(snapshot)
        watch.on_seal(self.manifest)
        self._snapshot, self._watch = snapshot, watch

    def __repr__(self) -> str:
        return f"<Whole {self._snapshot!r}>"

    def views(self, start: int, stop: int) -> list[memoryview]:
        self._watch.report(start)
        return self._snapshot.views(start, stop)


class _Digested:
    """A snapshot as a `snapshotfile.Source`: digested as it is written."""

    def __init__(self, snapshot: Staged, watch: Watch) -> None:
        manifest = snapshot.manifest
        self.header_bytes = manifest.header_bytes
        self.segment_bytes = manifest.segment_bytes
        self._snapshot, self._watch = snapshot, watch
        self._hasher = ChunkHasher(manifest.grid)
        self._digests: list[str] = []

    def __repr__(self) -> str:
        return f"<Digested {self._snapshot!r}>"

    def views(self, start: int, stop: int) -> list[memoryview]:
        self._watch.report(start)
        views = self._snapshot.views(start, stop)
        self._digests += [each.digest for each in self._hasher.update(start, *views)]
        return views

    def seal(self) -> Manifest:
        manifest = with_digests(self._snapshot.manifest, self._digests)
        self._watch.on_seal(manifest)
        return manifest


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
    watch: Watch,
) -> Written:
    """Have the writer write a snapshot; return what is to be said of it.

    One that has a ``write_snapshot`` of its own gets it with its digests; one that has
    a ``write`` a state dict over ``memory()``, which is its until it returns.
    """
    own = _own_methods(writer)
    if not own:
        source = _Digested(snapshot, watch)
        told = writer.write_source(path, source, snapshot.manifest.step, **keywords)
        return told if isinstance(told, Written) else Written()
    whole = _Whole(snapshot, watch)
    unwatched = Written(content=content_of(whole.manifest))
    if "write" not in own:
        told = writer.write_snapshot(path, whole, **keywords)
        return told if isinstance(told, Written) else unwatched
    from aiockpt.state.rebuild import Frame, assemble, tensors_over

    tensors = tensors_over(whole.manifest, memory())
    state = assemble(Frame.of(whole.manifest), tensors, limits=TRUSTED)
    writer.write(path=path, state_dict=state, **keywords)
    return unwatched


def forsake(
    writer: Any, path: str, step: int, reason: str, *, begun: bool = False
) -> None:
    """Have the writer tell the other ranks, if it knows how, that nothing will come."""
    if callable(abandon := getattr(writer, "abandon", None)):
        # A writer of the user's own need not know the difference.
        known = (
            {"begun": True} if begun and isinstance(writer, CheckpointWriter) else {}
        )
        try:
            abandon(path, step, reason, **known)
        except Exception:
            logger.warning("the other ranks were not told", exc_info=True)


def _own_methods(writer: Any) -> set[str]:
    """Return which of the writer's ways to write are not `CheckpointWriter`'s."""
    return {
        name
        for name in ("write", "write_snapshot")
        if getattr(type(writer), name, None) is not getattr(CheckpointWriter, name)
    }
