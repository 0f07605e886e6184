"""A receiver that holds an older state, which differs from the sender's in places."""

from __future__ import annotations

import math

import torch

from aiockpt.bench.receiver import Receiver
from aiockpt.bench.timed import Cost, timed
from aiockpt.http.transport import HTTPTransport

__all__ = ["CHUNK_BYTES", "Keeper", "changed_chunks"]

CHUNK_BYTES = 16 << 20
"""What a transport cuts its segments into."""

_TIMEOUT = 600.0


def changed_chunks(nbytes: int, share: float) -> list[int]:
    """Return which chunks differ: about ``share`` of them, spread evenly."""
    count = -(-nbytes // CHUNK_BYTES)
    wanted = math.ceil(share * count)
    return [number * count // wanted for number in range(wanted)]


class Keeper(Receiver):
    """Receives what differs from its template, into it or anew."""

    async def receive_delta(self, metadata: str, share: float, into: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Change a share of the chunks, and receive with ``have``."""
        self._spoil(share)
        transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(_TIMEOUT)
        mine = self._template
        try:
            state, cost = await timed(
                lambda: transport.recv_checkpoint(
                    0,
                    metadata,
                    1,
                    into=mine if into else None,
                    direct=into,
                    have=mine,
                )
            )
            return self._checked(state, cost)
        finally:
            await transport.shutdown()
            if not into:
                self._spoil(share)  # twice is not at all

    def _spoil(self, share: float) -> None:
        for chunk in changed_chunks(self._flat.nbytes, share):
            self._flat[chunk * CHUNK_BYTES] ^= 255
