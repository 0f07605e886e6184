"""What a receive gets from one of several senders of shards.

A `SenderShard` is what a sender has. A `ShardRead` is what one read of a joined
checkpoint gets of it: chunks whose bytes go straight to the destination of the receive
where they are contiguous on both sides. All others arrive in the arena of the shard.
`aiockpt.storage.boxes` says which is which.

The path of a byte: `BodySink` -> `ShardRead.buffers` -> `BoxPlacement.views` -> if it
goes straight, `Assembly.memory` -> `ReceiveMemory.views` -> the destination of the
receive; if not, the arena, from which `ShardRead.finish` copies it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple, TypeAlias

from aiockpt.format.chunks import chunks_over, digest
from aiockpt.format.manifest import Manifest
from aiockpt.http.peers import Peers
from aiockpt.memory.arena import Arena, Memory, copy_bytes
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.switching import CACHE_BLOCK_BYTES
from aiockpt.state.catalogue import Piece
from aiockpt.state.load_plan import Ranges
from aiockpt.state.mesh import merged
from aiockpt.state.segment import Segment
from aiockpt.storage.boxes import Assembly, BoxMove, BoxPlacement
from aiockpt.storage.placement import Placement, Turns
from aiockpt.storage.read import OnBytes, Verify
from aiockpt.transfer.deltas import HEAD_BYTES, changer, is_available
from aiockpt.transfer.reuse import Held
from aiockpt.transfer.source import ChunkDestination, Patch


class SenderShard:
    """What one sender has, as a `LoadSource` whose bytes have been fetched.

    Attributes:
        number: The number of the sender.
        peers: The sender, and its replicas.
        outline: The outline of its checkpoint.
        segment: Its data segment. The arena has the bytes that do not go straight to
            the destination.
        in_arena: The chunks that are in the arena, and verified.
    """

    def __init__(self, number: int, peers: Peers, manifest: Manifest) -> None:
        self.number, self.peers, self.outline = number, peers, manifest.outline
        self.segment = Segment(manifest.without_header(), is_there=True)
        self.in_arena: set[int] = set()

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None = None
    ) -> None:
        """Do nothing: the bytes are there."""


class ReceiveMemory(Placement):
    """The memory of a receive's destination, as that of an `Assembly`."""

    ranges: Ranges = ()

    def __init__(self, destination: ChunkDestination) -> None:
        self._memory, self._prepare = destination.memory, destination.prepare

    def views(self, start: int, stop: int, spare: Turns) -> Sequence[memoryview]:
        """Return the destination's memory for ``[start, stop)``."""
        del spare
        return self._memory.buffers(start, stop)

    def prepare(self, start: int, stop: int) -> None:
        """Map the pages for ``[start, stop)``; see `Placement.prepare`."""
        if self._prepare is not None:
            self._prepare(start, stop)


Jobs: TypeAlias = Sequence[tuple[ChunkDestination, Sequence[int]]]
"""Chunks of a shard, and where they go."""


class ShardRead:
    """What one read gets from one sender, as a `ChunkDestination` and its `Memory`.

    `JoinedSource.read` asks it what to fetch. A `Download` fills it as its destination,
    and a `BodySink` writes to it as memory.

    Args:
        shard: What the sender has.
        moves: What is needed of it.
        assembly: The memory of the joined checkpoint.
        destination: The destination of the receive.
        bridge: The threads that apply deltas.

    Attributes:
        wanted: The chunks with bytes that are needed.
        held: Those of them that the receiver had, and that are in the memory now.
        patch: Applies a delta to a chunk of which the receiver has every byte.
        kept: See `ChunkDestination`.
    """

    patch: Patch | None = None
    kept: None = None

    def __init__(
        self,
        shard: SenderShard,
        moves: Sequence[BoxMove],
        assembly: Assembly,
        destination: ChunkDestination,
        bridge: Bridge,
    ) -> None:
        self._shard, self._bridge, arena = shard, bridge, shard.segment.arena
        self._placement = BoxPlacement(moves, assembly, lambda _: arena)
        self._home: Memory = destination.memory
        self._grid = shard.outline.grid
        self.wanted = chunks_over(self._grid, self._placement.ranges)
        self.held: set[int] = set()
        self._based: set[int] = set()  # the chunks that may be those of a base

    @property
    def memory(self) -> Memory:
        """The sender's data segment: partly the destination, else the arena."""
        return self

    @property
    def indirect(self) -> Ranges:
        """The ranges that arrive in the arena, and are copied from it."""
        return self._placement.indirect

    def size_of(self, chunks: Iterable[int]) -> int:
        """Return the bytes of some chunks."""
        return sum(map(self._grid.size, chunks))

    def missing(self) -> list[int]:
        """Return the wanted chunks that must be fetched."""
        has = self._shard.in_arena | self.held
        return [chunk for chunk in self.wanted if chunk not in has]

    def jobs(self, on_reuse: Callable[[int], None]) -> Jobs:
        """Return what to fetch: by deltas, and whole.

        ``on_reuse`` gets the bytes that a delta spares.
        """
        missing, based = self.missing(), set[int]()
        if is_available() and all(p.delta_base for p in self._shard.peers.left()):
            based = self._based
        deltas = copy(self)
        deltas.patch = partial(self._patch, on_reuse)
        return [
            (deltas, [chunk for chunk in missing if chunk in based]),
            (self, [chunk for chunk in missing if chunk not in based]),
        ]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable bytes of ``[start, stop)``, in order."""
        spare = _ArenaFrom(self._shard.segment.arena, start)
        return [*self._placement.views(start, stop, spare)]

    def check(self, start: int, stop: int) -> None:
        """Raise an error if views of ``[start, stop)`` must not be used any more."""
        for _, first, last in self._placement.placed(start, stop):
            self._home.check(first, last)

    def prepare(self, start: int, stop: int) -> int:
        """Map the pages for ``[start, stop)``; return where to go on."""
        self._placement.prepare(start, stop)
        return stop

    def complete(self, chunk: int) -> None:
        """Do nothing: a chunk of the joined checkpoint comes from several senders."""

    def find_held(self, held: Held) -> None:
        """Find the chunks of which the receiver has every byte. For a thread.

        Their bytes are laid out as the sender's, and their digests compared.
        """

        def has(piece: Piece) -> bool:
            return held.has(piece.start, piece.stop)

        def own(piece: Piece) -> memoryview:
            views = held.buffers(piece.start, piece.stop)
            return views[0] if len(views) == 1 else memoryview(bytearray().join(views))

        in_arena = merged(map(self._grid.range, self._shard.in_arena))
        known = self._placement.bring_back(has, own, in_arena)
        starts = [start for start, _ in known]
        for chunk in self.missing():
            start, stop = self._grid.range(chunk)
            at = bisect_right(starts, start) - 1
            if at < 0 or known[at][1] < stop:
                continue
            for first, begin, end in self._placement.placed(start, stop):
                views = self.buffers(first, first + end - begin)
                copy_bytes(views, held.buffers(begin, end))
            found = digest(self.buffers(start, stop), self._grid.algorithm)
            is_same = found == self._shard.outline.digests[chunk]
            (self.held if is_same else self._based).add(chunk)

    async def _patch(
        self,
        on_reuse: Callable[[int], None],
        memory: Memory,
        chunk: int,
        kind: int,
        body: memoryview,
    ) -> bool:
        """Apply a delta to the bytes that `find_held` has laid out."""
        if not await self._bridge.run(self._patched, memory, chunk, kind, body):
            return False
        on_reuse(max(self._grid.size(chunk) - HEAD_BYTES - len(body), 0))
        return True

    def _patched(self, memory: Memory, chunk: int, kind: int, body: memoryview) -> bool:
        start, stop = self._grid.range(chunk)
        change = changer(kind, body, stop - start)
        made = memoryview(bytearray(stop - start))
        copy_bytes([made], memory.buffers(start, stop))
        for at in range(0, made.nbytes, CACHE_BLOCK_BYTES):
            change(at, made[at : at + CACHE_BLOCK_BYTES])
        found = digest([made], self._grid.algorithm)
        if found != self._shard.outline.digests[chunk]:
            return False
        copy_bytes(memory.buffers(start, stop), [made])
        return True

    def finish(self) -> None:
        """Copy what did not go straight to the destination. For a thread."""
        arena = self._shard.segment.arena
        for chunk in self.wanted:
            if chunk in self._shard.in_arena and chunk not in self.held:
                start, stop = self._grid.range(chunk)
                copy_bytes(self.buffers(start, stop), arena.buffers(start, stop))
        self._placement.finish()


class _ArenaFrom(NamedTuple):
    """The arena from an offset on, as memory for bytes that nobody needs."""

    arena: Arena
    start: int

    def turn(self, nbytes: int) -> memoryview:
        """Return memory for so many bytes."""
        (view,) = self.arena.buffers(self.start, self.start + nbytes)
        return view
