"""A run of chunks on its way into memory: what came, what is verified, what is left.

One request for several chunks costs a fraction of one request for each. Chunks are
digested as they arrive, while their bytes are in the processor's cache. The chunk stays
the unit of verification, of blame and of retry.

A chunk of a run passes these states: its bytes arrive (`ChunkRun.digest`), all of them
are in the destination (`mark_stored`), and its digest is compared (`verify_stored`).
Then `ChunkRun` tells the `Download` that assigned it, or has the chunk fetched again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from aiockpt.errors import IntegrityError
from aiockpt.format.chunks import ChunkHasher, HashedChunk
from aiockpt.format.manifest import Outline


class Arrived(NamedTuple):
    """How much has come of a chunk, or of a whole body, for an error."""

    chunk: int | None
    received: int
    expected: int


class ChunkRun:
    """Chunks that one connection fetches, in order; they outlive its requests.

    A thread may call `digest` and `mark_stored` while the event loop calls everything
    else. What the loop sees changes only with `verify_stored`.

    Args:
        outline: The chunk grid and the digests.
        chunks: The numbers of the chunks, each once.

    Attributes:
        position: The next byte of the data segment that is wanted.
        unverified: Bytes of the chunks that are not verified.
        steals: How often another connection took this run since bytes came for it.
    """

    def __init__(self, outline: Outline, chunks: Iterable[int]) -> None:
        self._grid, self._digests = outline.grid, outline.digests
        self._todo = deque(chunks)
        self._bad: list[HashedChunk] = []
        self._hashed: list[HashedChunk] = []
        self._stored = deque[HashedChunk]()
        self.position = self.steals = 0
        self.unverified = sum(map(self._grid.size, self._todo))
        self._owner: object = None
        self._on_verified: Callable[[int], None] = lambda _: None
        self._begin()

    @property
    def chunk(self) -> int | None:
        """The chunk that is being received; None when every chunk has come."""
        return self._todo[0] if self._todo else None

    def __len__(self) -> int:
        """Return how many chunks have not come."""
        return len(self._todo)

    @property
    def received(self) -> int:
        """Bytes of unverified chunks that have come."""
        come = sum(self._grid.size(bad.chunk) for bad in self._bad)
        if self._todo:
            come += self.position - self._grid.range(self._todo[0])[0]
        return come

    @property
    def remaining(self) -> int:
        """Bytes that are still to come."""
        return self.unverified - self.received

    @property
    def stop(self) -> int:
        """The byte behind the last one that a single request can ask for."""
        stop = self.position
        for chunk in self._todo:
            start, end = self._grid.range(chunk)
            if start > stop:
                break
            stop = end
        return stop

    @property
    def bits(self) -> int:
        """The chunks that have not come: bit i is chunk i."""
        return bits_of(self._todo)

    def cut(self, nbytes: int) -> list[int]:
        """Cut the run after at most ``nbytes``, or after its first chunk.

        It ends before the first gap, too. Nobody may be receiving it.

        Returns:
            The numbers of the chunks that were cut off.
        """
        todo = self._todo
        keep = 1
        for before, chunk in zip(todo, islice(todo, 1, None), strict=False):
            end = self._grid.range(chunk)[1]
            if chunk != before + 1 or end - self._grid.range(todo[0])[0] > nbytes:
                break
            keep += 1
        rest = [*islice(todo, keep, None)]
        self._todo = deque(islice(todo, keep))
        self.unverified -= sum(map(self._grid.size, rest))
        return rest

    def assign(
        self, owner: object, on_verified: Callable[[int], None] = lambda _: None
    ) -> int:
        """Assign the run to a peer, which goes on from its own last byte.

        Another peer than before begins with whole chunks, so that one peer is to blame
        for a wrong chunk.

        Args:
            owner: The peer; None: nobody, for now.
            on_verified: Gets the number of each chunk that is verified and in the
                destination.

        Returns:
            How many bytes are thrown away.
        """
        lost = 0 if owner is self._owner else self._restart()
        self._owner, self._on_verified = owner, on_verified
        return lost

    def begin_request(self) -> tuple[int, int]:
        """Return the bytes that the next request asks for; `digest` gets them."""
        self._next = self.position
        return self.position, self.stop

    def arrived(self) -> Arrived:
        """Return which chunk the run has reached, and how much of it came."""
        if not self._todo:
            return Arrived(None, 0, 0)
        start, stop = self._grid.range(self._todo[0])
        return Arrived(self._todo[0], self.position - start, stop - start)

    def digest(self, data: memoryview) -> bool:
        """Digest bytes that arrived directly behind those of the last call.

        Returns:
            Whether a chunk ended in them.
        """
        hashed = self._hasher.update(self._next, data)
        self._next += len(data)
        self._hashed += hashed
        return bool(hashed)

    def mark_stored(self) -> None:
        """Note that all bytes that `digest` got are in the destination."""
        self._stored += self._hashed
        self._hashed = []

    def verify_stored(self) -> None:
        """Verify the chunks that ended and are in the destination; on the loop only."""
        while self._stored:
            hashed = self._stored.popleft()
            self._todo.popleft()
            if hashed.matches:
                self.unverified -= self._grid.size(hashed.chunk)
                self._on_verified(hashed.chunk)
            else:
                self._bad.append(hashed)
        self._locate()

    def mark_patched(self) -> None:
        """Note that a delta has brought the first chunk, which is verified."""
        chunk = self._todo.popleft()
        self.unverified -= self._grid.size(chunk)
        self._on_verified(chunk)
        self._begin()

    def want_bad_again(self) -> tuple[int, IntegrityError] | None:
        """Want the bad chunks again; return how many bytes they have, and why.

        Returns:
            None if there are none. The error blames the first one.
        """
        if not self._bad:
            return None
        error = self._bad[0].error()
        return self._restart(), error

    def _restart(self) -> int:
        lost = self.received
        self._todo = deque(sorted([*self._todo, *(bad.chunk for bad in self._bad)]))
        self._bad = []
        self._begin()
        return lost

    def _begin(self) -> None:
        self._hasher = ChunkHasher(self._grid, self._digests)
        self._next = 0
        self._locate()

    def _locate(self) -> None:
        before, self.position = self.position, 0
        if self._todo:
            # A thread may be ahead of the loop, in a later chunk.
            start, stop = self._grid.range(self._todo[0])
            at = self._hasher.position
            self.position = at if start <= at <= stop else start
        if self.position != before:
            self.steals = 0


def bits_of(chunks: Iterable[int]) -> int:
    """Return the bitmap of chunks: bit i is chunk i."""
    data = bytearray()
    for chunk in chunks:
        if (missing := chunk // 8 + 1 - len(data)) > 0:
            data += bytes(missing)
        data[chunk // 8] |= 1 << chunk % 8
    return int.from_bytes(data, "little")
