"""Consecutive chunks on their way: what has come, what is verified, what is left.

One request for a few chunks costs a fraction of one for each, and a digest that grows
with the bytes as they arrive, still warm in the cache, a fraction of one afterwards.
The chunk stays the unit of verification, and of what is fetched again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128

from aiockpt.errors import IntegrityError, LocalProtocolError
from aiockpt.format.manifest import Outline
from aiockpt.http.translating import Exchange

__all__ = ["MAX_RUN", "Part", "Stretch", "parts_of", "plan"]

# From one request to the next takes milliseconds: tens of megabytes might come in them.
MAX_RUN = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk to fetch: where it lies in the data segment, and its digest."""

    chunk: int
    start: int
    stop: int
    digest: str


def plan(
    outline: Outline, chunks: Sequence[int], *, workers: int, most: int = MAX_RUN
) -> list[list[Part]]:
    """Return what to fetch, each chunk once, in runs of consecutive chunks.

    A run is short enough that every worker gets two, and has at most ``most`` bytes,
    or a chunk.
    """
    wanted = parts_of(outline, chunks)
    share = -(-len(wanted) // (2 * workers))
    longest = max(1, min(share, most // outline.grid.chunk_bytes))
    runs: list[list[Part]] = []
    for part in wanted:
        follows = runs and runs[-1][-1].stop == part.start
        if follows and len(runs[-1]) < longest:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def parts_of(outline: Outline, chunks: Iterable[int]) -> list[Part]:
    """Return what to fetch, each chunk once."""
    grid, digests = outline.grid, outline.digests
    try:
        return [
            Part(chunk, *grid.range(chunk), digests[chunk])
            for chunk in dict.fromkeys(chunks)
        ]
    except IndexError as error:
        raise LocalProtocolError(f"no such chunk: {error}") from None


class Stretch:
    """A run of chunks that is being received; it survives broken connections.

    A thread may have `take` and `placed` called while the loop calls all the rest: what
    that knows changes with `note`.

    Args:
        parts: The chunks, consecutive.
        on_verified: Called for each chunk whose digest is right; its bytes are in their
            place.

    Attributes:
        position: The next byte of the data segment that is wanted.
    """

    def __init__(
        self, parts: Sequence[Part], on_verified: Callable[[int], None]
    ) -> None:
        self._todo = deque(parts)
        self._bad: list[tuple[Part, str]] = []
        self._on_verified = on_verified
        self._ended: list[tuple[Part, str]] = []
        self._placed = deque[tuple[Part, str]]()
        self._begin()

    def __repr__(self) -> str:
        return f"<Stretch position={self.position} chunks={len(self._todo)}>"

    @property
    def chunk(self) -> int | None:
        """The chunk that is being received; None when none is left."""
        return self._todo[0].chunk if self._todo else None

    @property
    def remaining(self) -> int:
        """Bytes that are still to come."""
        left, come = self.leave()
        return sum(part.stop - part.start for part in left) - come

    @property
    def stop(self) -> int:
        """The byte behind the last one that a single request can ask for."""
        stop = self.position
        for part in self._todo:
            if part.start > stop:
                break
            stop = part.stop
        return stop

    def place(self, exchange: Exchange) -> None:
        """Say in an exchange which chunk it has reached, and how much of it came."""
        if self._todo:
            part = self._todo[0]
            exchange.chunk = part.chunk
            exchange.received = self.position - part.start
            exchange.expected = part.stop - part.start

    def take(self, data: memoryview) -> bool:
        """Digest bytes that have just arrived behind those of the last call.

        Returns:
            Whether a chunk ended in them.
        """
        ended = len(self._ended)
        while data and self._ahead:
            part = self._ahead[0]
            piece = data[: part.stop - self._at]
            self._hasher.update(piece)
            self._at += len(piece)
            data = data[len(piece) :]
            if self._at == part.stop:
                self._ended.append((self._ahead.popleft(), self._hasher.hexdigest()))
                self._next_chunk()
        return len(self._ended) > ended

    def placed(self) -> None:
        """Take note that all that was taken is in its place."""
        self._placed += self._ended
        self._ended = []

    def note(self) -> None:
        """Verify the chunks that ended and are in their place."""
        while self._placed:
            part, actual = self._placed.popleft()
            self._todo.popleft()
            if actual == part.digest:
                self._on_verified(part.chunk)
            else:
                self._bad.append((part, actual))
        self._locate()

    def settle(self) -> tuple[int, IntegrityError] | None:
        """Put the bad chunks back to be fetched again; return their bytes and why."""
        if not self._bad:
            return None
        part, actual = self._bad[0]
        error = IntegrityError(chunk=part.chunk, expected=part.digest, actual=actual)
        lost = sum(bad.stop - bad.start for bad, _ in self._bad)
        self._todo.extend(bad for bad, _ in self._bad)
        self._bad = []
        self._begin()
        return lost, error

    def leave(self) -> tuple[list[Part], int]:
        """Return what is not verified, and how many bytes of it have come.

        Whoever fetches it now begins with its first byte: a chunk that is wrong is
        the fault of one peer then.
        """
        bad = [part for part, _ in self._bad]
        come = sum(part.stop - part.start for part in bad)
        if self._todo:
            come += self.position - self._todo[0].start
        return sorted([*bad, *self._todo], key=lambda part: part.start), come

    def _begin(self) -> None:
        self._ahead = self._todo.copy()
        self._next_chunk()
        self._locate()

    def _locate(self) -> None:
        at, part = self._at, self._todo[0] if self._todo else None
        self.position = part.start if part else 0
        if part and part.start <= at <= part.stop:  # or a thread is ahead of the loop
            self.position = at

    def _next_chunk(self) -> None:
        self._hasher = xxh3_128()
        self._at = self._ahead[0].start if self._ahead else 0
