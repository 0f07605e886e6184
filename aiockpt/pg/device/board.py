"""The device as a transport sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from aiockpt.errors import LimitExceededError, RemoteProtocolError
from aiockpt.memory.device import Port, completed
from aiockpt.pg.device.folding import Folded, fold, keys
from aiockpt.pg.device.segment import Segment
from aiockpt.runtime.bridge import Bridge

__all__ = ["Board", "decode_placement", "encode_placement"]


class Board:
    """A device, and what is done on it.

    It has two ports, that is two side streams: messages wait for a peer on that of
    ``line``, and nothing else must wait with them.
    """

    def __init__(self, device: torch.device, port: Port, line: Port) -> None:
        self.device = device
        self.port = port
        self.line = line
        self._keys: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"<Board {self.device}>"

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is on the device."""
        return tensor.device == self.device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device.

        Raises:
            LimitExceededError: there is none left.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            what = f"a part of the checkpoint, for which {self.device} has no memory,"
            free, _ = torch.get_device_module(self.device).mem_get_info(self.device)
            raise LimitExceededError(what, limit=free, actual=nbytes) from error

    async def digest(
        self, segment: Segment, start: int, stop: int, bridge: Bridge
    ) -> str:
        """Return the digest of a chunk; no byte of it comes to the host."""
        folded = await bridge.run(self._fold, segment, start, stop)
        await completed(folded.event)
        return folded.digest()

    def _fold(self, segment: Segment, start: int, stop: int) -> Folded:
        pinned = self.device.type == "cuda"  # else the copy would block the thread
        with self.port.aside():
            if self._keys is None:
                self._keys = keys(self.device)
            rows = fold(segment.gather(start, stop), self._keys)
            arrived = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
            event = self.port.copy([(arrived, rows)], after=self.port.mark())
        return Folded(rows, arrived, event)


def encode_placement(count: int, own: Iterable[int]) -> bytes:
    """Return a bit for each of ``count`` entries: whether it is on the device."""
    bits = bytearray((count + 7) // 8)
    for entry in own:
        bits[entry // 8] |= 1 << entry % 8
    return bytes(bits)


def decode_placement(data: bytes | bytearray | memoryview, count: int) -> list[int]:
    """Return the numbers of the entries that are on the device.

    Raises:
        RemoteProtocolError: it is not as long as it must be.
    """
    if len(data) != (count + 7) // 8:
        raise RemoteProtocolError("the offer does not say which tensors are where")
    return [*_set_bits(data, count)]


def _set_bits(data: bytes | bytearray | memoryview, count: int) -> Iterator[int]:
    for entry in range(count):
        if data[entry // 8] >> entry % 8 & 1:
            yield entry
