"""HTTP peers as the source of one receive: the sender's memory, else its server.

A sender of this host may lend the memory of its snapshot; `Attach` asks for it.
Everything else, and what is bad of that memory, is downloaded from the peers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from aiockpt.errors import Advice, AiockptError, advice
from aiockpt.format.chunks import ChunkHasher, HashedChunk
from aiockpt.format.limits import enforce
from aiockpt.format.manifest import Manifest, Outline
from aiockpt.http.download import Download, ReceiveExtension
from aiockpt.http.peers import Peers
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.same_host import format_probe, identity
from aiockpt.runtime.tasks import Over, map_in_threads
from aiockpt.transfer.deltas import is_available
from aiockpt.transfer.source import ChunkDestination, OnProgress, Source

_HTTP: Final = "HTTP"
_MEMORY: Final = "shared memory"
_TAKING_THREADS: Final = 2
_TAKEN_BYTES: Final = 64 << 20  # at a time: a cancel waits for the end


class Attached(Protocol):
    """The memory of a data segment that another process of this host lends."""

    @property
    def arena(self) -> Arena:
        """The mapping; only pages that are written here are copied."""

    @property
    def has_ended(self) -> bool:
        """Whether the lender has taken the memory back."""

    def take(
        self, views: Sequence[memoryview], start: int, hasher: ChunkHasher
    ) -> list[HashedChunk]:
        """Copy bytes from ``start`` on into ``views``; return the chunks that ended.

        For threads.
        """

    def give_back(self) -> None:
        """Unmap the memory unless tensors lie in it; then `close`. For threads."""

    def close(self) -> None:
        """Tell the lender that the receive has ended. Idempotent."""


class Attach(Protocol):
    """A function that asks another process of this host for memory."""

    async def __call__(
        self, offered: str, outline: Outline, *, keep: bool
    ) -> Attached | str:
        """Return the memory of an offer, or why there is none.

        ``keep`` if its content must not change. If cancelled, nothing is left behind.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Whether a receive attaches memory of other processes of this host, and why.

    Attributes:
        attach: Asks for memory that a sender offers; None: it is not asked for.
        keep: Whether tensors may lie in that memory.
        through: Whether a template is filled from it once all of it was verified.
        verify: Whether digests are compared even with ``keep``.
    """

    attach: Attach | None = None
    keep: bool = False
    through: bool = False
    verify: bool = True


class HttpSource(Source):
    """One checkpoint of some peers.

    Args:
        peers: The peers that have the checkpoint.
        bridge: The threads that run what blocks.
        attaching: Whether the source attaches memory of this host.
        extension: Takes part in the receive. The source ends it, or has it linger.
        waits: Whether it waits for a step that the peers do not serve yet.

    Attributes:
        name: The addresses of the peers.
        medium: How the bytes travel.
        remark: Why the bytes do not travel in the best way, if so.
    """

    def __init__(
        self,
        peers: Peers,
        bridge: Bridge,
        attaching: AttachOptions = AttachOptions(),
        extension: ReceiveExtension | None = None,
        *,
        waits: bool = True,
    ) -> None:
        self.name, self.medium, self.remark = peers.name, _HTTP, ""
        self._arena: Arena | None = None  # of the sender, if it is used in place
        self._peers, self._bridge = peers, bridge
        self._extension = extension or ReceiveExtension()
        self._attaching, self._waits = attaching, waits
        self._step: int | None = None  # of which the manifest has come
        self._offer: str | None = None
        self._attached: Attached | None = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give mapped memory back; tell the sender of a failure, unless it is lost."""
        await self._peers.let_go()
        if error is not None:
            self._peers.explain(error)
        told = isinstance(error, AiockptError) and Advice.LOST not in advice(error)
        extension, self._extension = self._extension, ReceiveExtension()
        try:
            if error is None and extension.can_linger:
                await extension.linger()
            else:
                await extension.leave(self._goodbye_s() if told else 0.0)
            if told and self._step is not None:
                await self.end(self._step)
        finally:
            if self._attached is not None:
                if self._arena is None:  # to unmap gigabytes takes a while
                    self._bridge.post(self._attached.give_back)
                else:  # a device may still copy from it
                    self._attached.close()

    def _goodbye_s(self) -> float:
        """Return for how many seconds the extension may say goodbye.

        The lease ends afterwards: the sender may keep nothing then.
        """
        left = self._peers.deadline - asyncio.get_running_loop().time()
        return max(left, 0.0) / 4

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest; learn whether the sender offers memory."""
        here = None
        if self._attaching.attach is not None:
            here = await self._bridge.run(identity)
        probe = None if here is None else format_probe(here, os.urandom(16))
        step_wait = None if self._waits else 0.0
        answer = await self._peers.manifest(step, probe=probe, step_wait=step_wait)
        self._offer = None if here is None else answer.offer
        self._step = step
        self._extension.receives(answer.manifest, answer.headers)
        return answer.manifest

    async def map(self, outline: Outline, *, most: int | None) -> Arena | None:
        """Attach the sender's memory if it was offered; return it if it is used.

        Raises:
            LimitExceededError: it is more than ``most``.
        """
        offer, how = self._offer, self._attaching
        if not offer or how.attach is None or not outline.grid.segment_bytes:
            if how.keep:
                self.remark = "not shared: the sender offers no memory"
            return None
        enforce("the checkpoint's size", outline.grid.segment_bytes, most, "max_bytes")
        used = how.keep or how.through
        memory = await how.attach(offer, outline, keep=used)
        if isinstance(memory, str):
            self.remark = f"not shared: {memory}"
        else:
            self._attached, self.medium = memory, _MEMORY
            self._arena = memory.arena if used else None
        return self._arena

    @property
    def sends_deltas(self) -> bool:
        """Whether all peers have a base of deltas, and this process can apply them."""
        bases = (peer.delta_base for peer in self._peers.left())
        return self.medium == _HTTP and all(bases) and is_available()

    async def read(
        self,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> None:
        """Fetch chunks into the destination, and verify them.

        Raises:
            AiockptError: see `Download`.
        """
        left: Sequence[int] = chunks
        if self._attached is not None:
            memory = self._attached
            left = await self._take(memory, outline, destination, chunks, on_progress)
        if left:
            self._extension.reads_into(destination)
            await Download(
                self._peers, outline, destination, left, on_progress, self._extension
            ).run()

    async def end(self, step: int) -> None:
        """Tell the sender that all bytes have come, unless it lends its memory.

        From then on, memory that is not the caller's own is served to nobody.
        """
        await self._peers.let_go()
        if not self._extension.can_linger:
            await self._extension.leave(self._goodbye_s())
        if self.medium == _HTTP:
            await self._peers.end_lease(step)

    def give_back(self) -> None:
        """Give the memory back, unless tensors lie in it. For threads. Idempotent."""
        memory, self._attached, self._arena = self._attached, None, None
        if memory is not None:
            memory.give_back()

    async def _take(
        self,
        memory: Attached,
        outline: Outline,
        destination: ChunkDestination,
        chunks: Sequence[int],
        on_progress: OnProgress,
    ) -> list[int]:
        """Take chunks from the memory; return those that are bad."""
        grid = outline.grid
        if self._attaching.keep and not self._attaching.verify:
            on_progress(sum(map(grid.size, chunks)), len(chunks))
            return []
        bad: list[int] = []

        def take(chunk: int, over: Over) -> str:
            """Copy a chunk to where it belongs; return its digest. For a thread."""
            (start, stop), hasher = grid.range(chunk), ChunkHasher(grid)
            try:
                for at in range(start, stop, _TAKEN_BYTES):
                    if over():
                        break
                    views = destination.memory.buffers(at, min(at + _TAKEN_BYTES, stop))
                    if self._arena is None:
                        hashed = memory.take(views, at, hasher)
                    else:  # the destination is this very memory
                        hashed = hasher.update(at, *views)
                    for each in hashed:
                        return each.digest
            except OSError as error:
                return str(error)
            return ""  # no digest: HTTP brings the chunk

        def taken(chunk: int, digest: str) -> None:
            if digest != outline.digests[chunk]:
                bad.append(chunk)
                return
            on_progress(grid.size(chunk), 1)
            destination.complete(chunk)

        await map_in_threads(self._bridge, _TAKING_THREADS, take, chunks, taken)
        if bad:
            why = "the sender took its memory back: " if memory.has_ended else ""
            self.remark = f"{why}{len(bad)} chunks of the shared memory were bad"
        return sorted(bad)
