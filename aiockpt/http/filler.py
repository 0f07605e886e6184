"""Puts a run of bytes into memory, whatever the pieces of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from aiockpt.errors import LocalProtocolError

__all__ = ["Buffers", "Filler", "Onlooker"]

Buffers: TypeAlias = Callable[[int, int], Sequence[memoryview]]

# One receive, and so one callback, moves at most this much: the loop stays live.
MAX_PIECE = 1 << 20
# Memory is asked for in steps: views of thousands of small tensors take their time.
WINDOW = 4 << 20
# Below this a system call costs more than copying the bytes once more.
SMALL = 64 << 10
# A copy into many small buffers costs per buffer: this many take well under 1 ms.
MAX_SCATTER = 1024


class Onlooker(Protocol):
    """Who sees bytes as they come, in order, while they are warm."""

    def take(self, data: memoryview) -> bool:
        """See bytes; say whether they are wanted in their place now."""

    def placed(self) -> None:
        """Learn that all that was taken is in its place."""

    def note(self) -> None:
        """Make known, on the loop, what was placed."""


class Filler:
    """Fills memory, in order, with bytes as they arrive.

    Either the bytes are received straight into `next_buffer` and announced by
    `advance`, which a thread may do; or they are handed to `write`, on the loop.
    Buffers that are small and many are received through a scratch of at most 1 MiB, so
    `close` must be called before anybody reads them.

    Args:
        buffers: Returns the memory of ``[start, stop)`` as contiguous views of format
            ``B``, in order.
        start: The first byte to fill.
        stop: The byte after the last one.
        onlooker: Who sees the bytes.

    Attributes:
        size: Bytes to fill.
        filled: Bytes that have come.
    """

    __slots__ = (
        "_ask",
        "_asked",
        "_buffers",
        "_index",
        "_offset",
        "_onlooker",
        "_scratch",
        "_staged",
        "_stop",
        "filled",
        "size",
    )

    def __init__(
        self,
        buffers: Buffers,
        start: int,
        stop: int,
        onlooker: Onlooker | None = None,
    ) -> None:
        self.size = stop - start
        self.filled = 0
        self._ask = buffers
        self._onlooker = onlooker or _Nobody()
        self._asked, self._stop = start, stop
        self._buffers: Sequence[memoryview] = ()
        self._index = self._offset = 0
        self._scratch: memoryview | None = None
        self._staged = 0
        self._settle()

    @property
    def remaining(self) -> int:
        """Bytes that are still to come."""
        return self.size - self.filled

    def next_buffer(self) -> memoryview:
        """Return where the next bytes go: 1 byte to 1 MiB, while some remain."""
        return self._next_scratch() or self._next_whole()[:MAX_PIECE]

    def next_buffers(self) -> list[memoryview]:
        """Return where the next bytes go: 1 byte to 4 MiB, for a thread."""
        scratch = self._next_scratch()
        if scratch:
            return [scratch]
        buffers = [self._next_whole()]
        for buffer in self._buffers[self._index + 1 :]:
            if len(buffer) < SMALL:
                break
            buffers.append(buffer)
        return buffers

    def advance(self, count: int) -> bool:
        """Take note that ``count`` bytes are in what was returned.

        Returns:
            Whether there is something to `tell` of.
        """
        self.filled += count
        wanted = self._staged_more(count) if self._scratch else self._came(count)
        if wanted:
            self._onlooker.placed()
        return wanted

    def tell(self) -> None:
        """Have it known, on the loop."""
        self._onlooker.note()

    def write(self, data: bytes | memoryview) -> None:
        """Copy ``data``, which is no longer than what remains."""
        self._flush()
        view = memoryview(data)
        self._scatter(view)
        self.filled += len(data)
        if self._onlooker.take(view):
            self._onlooker.placed()
        self._onlooker.note()

    def close(self) -> None:
        """Bring all bytes to their place and let go of the memory; idempotent.

        Whoever keeps the filler, such as the traceback of an error, does not keep the
        memory, which its owner may want to unmap.
        """
        self._flush()
        self._buffers, self._ask, self._onlooker = (), _no_buffers, _Nobody()

    def _flush(self) -> None:
        if self._scratch is not None:
            scratch, self._scratch = self._scratch[: self._staged], None
            self._staged = 0
            self._scatter(scratch)

    def _next_scratch(self) -> memoryview | None:
        if self._scratch is None:
            run = self._small_run()
            if not run:
                return None
            self._scratch = memoryview(bytearray(run))
        return self._scratch[self._staged :]

    def _next_whole(self) -> memoryview:
        return self._buffers[self._index][self._offset :]

    def _staged_more(self, count: int) -> bool:
        assert self._scratch is not None
        start, self._staged = self._staged, self._staged + count
        wanted = self._onlooker.take(self._scratch[start : self._staged])
        if wanted or self._staged == len(self._scratch):
            self._flush()
        return wanted

    def _came(self, count: int) -> bool:
        wanted = False
        while count:
            piece = self._next_whole()[:count]
            self._offset += len(piece)
            count -= len(piece)
            wanted |= self._onlooker.take(piece)
            self._settle()
        return wanted

    def _small_run(self) -> int:
        """Bytes of the small buffers ahead; 0 if one receive fills no more than one."""
        total, offset, stop = 0, self._offset, self._index
        for buffer in self._buffers[self._index : self._index + MAX_SCATTER]:
            if len(buffer) - offset >= SMALL or total >= MAX_PIECE:
                break
            total += len(buffer) - offset
            offset, stop = 0, stop + 1
        return min(total, MAX_PIECE) if stop > self._index + 1 else 0

    def _scatter(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += self._scatter_in_window(data[at:])
            self._settle()

    def _scatter_in_window(self, data: memoryview) -> int:
        """Copy what fits into the buffers at hand; return how much that is."""
        buffers, index, offset = self._buffers, self._index, self._offset
        at, stop, last = 0, len(data), len(self._buffers)
        while at < stop and index < last:
            size = len(buffers[index])
            count = min(size - offset, stop - at)
            buffers[index][offset : offset + count] = data[at : at + count]
            at += count
            offset += count
            if offset == size:
                index, offset = index + 1, 0
        self._index, self._offset = index, offset
        return at

    def _settle(self) -> None:
        """Go to the next byte to fill, in the next window if this one is full."""
        while True:
            buffers = self._buffers
            while self._index < len(buffers):
                if self._offset < len(buffers[self._index]):
                    return
                self._index, self._offset = self._index + 1, 0
            if self._asked == self._stop:
                return
            self._open_window()

    def _open_window(self) -> None:
        stop = min(self._asked + WINDOW, self._stop)
        self._buffers = self._ask(self._asked, stop)
        self._index = self._offset = 0
        if sum(map(len, self._buffers)) != stop - self._asked:
            raise LocalProtocolError("the destination gave memory of another size")
        self._asked = stop


def _no_buffers(start: int, stop: int) -> Sequence[memoryview]:
    return ()


class _Nobody:
    """Wants to see nothing."""

    def take(self, data: memoryview) -> bool:
        return False

    def placed(self) -> None:
        pass

    def note(self) -> None:
        pass
