"""Puts a run of bytes into a list of buffers, whatever the pieces it arrives in."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Filler"]

# One receive, and so one callback, moves at most this much: the loop stays live.
MAX_PIECE = 1 << 20
# Below this a system call costs more than copying the bytes once more.
SMALL = 64 << 10
# A copy into many small buffers costs per buffer: this many take well under 1 ms.
MAX_SCATTER = 1024


class Filler:
    """Fills writable buffers of bytes, in order, with what arrives.

    Either the bytes are received straight into `next_buffer` and announced by
    `advance`, or they are handed to `write`. Buffers that are small and many are
    received through a scratch of at most 1 MiB, so `close` must be called before
    anybody reads the buffers.

    Args:
        buffers: Contiguous views of format ``B``; the filler refers to them until it
            is closed.

    Attributes:
        size: Bytes of all buffers.
        filled: Bytes that have come.
    """

    __slots__ = (
        "_buffers",
        "_index",
        "_offset",
        "_scratch",
        "_staged",
        "filled",
        "size",
    )

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.size = sum(map(len, buffers))
        self.filled = 0
        self._index = 0
        self._offset = 0
        self._scratch: memoryview | None = None
        self._staged = 0
        self._step(0)

    @property
    def remaining(self) -> int:
        """Bytes that are still to come."""
        return self.size - self.filled

    def next_buffer(self) -> memoryview:
        """Return where the next bytes go: 1 byte to 1 MiB, while some remain."""
        if self._scratch is not None:
            return self._scratch[self._staged :]
        run = self._small_run()
        if run:
            self._scratch = memoryview(bytearray(run))
            return self._scratch
        return self._buffers[self._index][self._offset : self._offset + MAX_PIECE]

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes are in what `next_buffer` returned."""
        self.filled += count
        if self._scratch is None:
            self._step(count)
            return
        self._staged += count
        if self._staged == len(self._scratch):
            self._flush()

    def write(self, data: bytes | memoryview) -> None:
        """Copy ``data``, which is no longer than what remains."""
        self._flush()
        self._scatter(memoryview(data))
        self.filled += len(data)

    def close(self) -> None:
        """Bring all bytes to their place and let go of the buffers; idempotent.

        Whoever keeps the filler, such as the traceback of an error, does not keep the
        memory, which its owner may want to unmap.
        """
        self._flush()
        self._buffers = ()

    def _flush(self) -> None:
        if self._scratch is not None:
            scratch, self._scratch = self._scratch[: self._staged], None
            self._staged = 0
            self._scatter(scratch)

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
        buffers, index, offset = self._buffers, self._index, self._offset
        at, stop = 0, len(data)
        while at < stop:
            size = len(buffers[index])
            count = min(size - offset, stop - at)
            buffers[index][offset : offset + count] = data[at : at + count]
            at += count
            offset += count
            if offset == size:
                index, offset = index + 1, 0
        self._index, self._offset = index, offset
        self._step(0)

    def _step(self, count: int) -> None:
        """Go on by ``count`` bytes of this buffer, to the next one that has room."""
        self._offset += count
        buffers = self._buffers
        while self._index < len(buffers) and self._offset == len(buffers[self._index]):
            self._index += 1
            self._offset = 0
