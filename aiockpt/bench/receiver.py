"""The receiving process: every way of receiving, timed from request to usable state."""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

import anyio
import torch

from aiockpt.bench.memory import (
    TOUCHED,
    forget_peak,
    fresh,
    peak,
    resident,
    warm_host,
)
from aiockpt.bench.raw import fetch_raw
from aiockpt.bench.rival import Rival
from aiockpt.bench.shapes import Shape, bytes_of, cut, looks_right, numbered, shape_of
from aiockpt.bench.timed import Cost, timed
from aiockpt.events import TransferEvent, add_hook
from aiockpt.http.options import Server
from aiockpt.http.transport import HTTPTransport
from aiockpt.runtime.bridge import Bridge

__all__ = ["Receiver"]

_TIMEOUT = 600.0
_ENOUGH_FOR_THREADS = 4 << 20  # torch starts its own for large operations
_State = dict[str, torch.Tensor]


class Receiver:
    """The commands that the receiving process obeys; see `aiockpt.bench.worker`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._shape = Shape("one", 0, 0)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._template: _State = {}

    async def prepare(self, key: str, size: int) -> None:
        """Expect a state dict of that shape."""
        await self.release()
        self._shape = shape_of(key, size)

    async def make_template(self) -> None:
        """Build a state dict to receive into; raw bytes go into its memory, too."""
        self._flat = numbered(self._shape.nbytes)
        self._template = cut(self._flat, self._shape)

    async def release(self) -> None:
        """Forget the template."""
        self._template, self._flat = {}, torch.empty(0, dtype=torch.uint8)
        gc.collect()

    async def ready(self, touched: bool) -> None:  # noqa: FBT001 - from JSON
        """Make the memory ready that will be received into."""
        gc.collect()
        if touched:
            ctypes.memset(self._flat.data_ptr(), 0, self._flat.nbytes)
        else:
            warm_host(self._shape.nbytes)

    async def idle(self, seconds: float) -> Cost:
        """Do nothing for a while."""
        _, cost = await timed(lambda: anyio.sleep(seconds))
        return cost

    async def receive_raw(
        self,
        port: int,
        connections: int,
        kind: str,
        digest: bool = False,  # noqa: FBT001, FBT002 - from JSON
    ) -> Cost:
        """Receive the bare bytes into memory of a kind."""

        def destination() -> memoryview:
            if kind == TOUCHED:
                return bytes_of(self._flat)
            return fresh(kind, self._shape.nbytes)

        _, cost = await timed(
            lambda: fetch_raw(
                port, connections, destination, self._bridge, digest=digest
            )
        )
        return cost

    async def receive(self, metadata: str, into: bool, step: int = 1) -> Cost:  # noqa: FBT001 - from JSON
        """Receive by this library, into fresh memory or into the template."""
        transport: HTTPTransport[_State] = HTTPTransport(_TIMEOUT)
        template = self._template if into else None
        try:
            state, cost = await timed(
                lambda: transport.recv_checkpoint(
                    0, metadata, step, into=template, direct=into
                )
            )
            return self._checked(state, cost)
        finally:
            await transport.shutdown()

    async def borrow(self, metadata: str, into: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Receive the memory that is lent: share it, or copy it into the template."""
        came: list[TransferEvent] = []
        remove = add_hook(came.append)
        try:
            transport: HTTPTransport[_State] = HTTPTransport(_TIMEOUT)
            async with transport:
                template = self._template if into else None
                state, cost = await timed(
                    lambda: transport.recv_checkpoint(
                        0, metadata, 1, into=template, direct=into, share=not into
                    )
                )
        finally:
            remove()
        if came[-1].medium != "shared memory":
            raise AssertionError(f"the memory was not lent: {came[-1]}")
        return self._checked(state, cost)

    async def repeat(self, what: str, seconds: float, **arguments: Any) -> list[Cost]:
        """Receive again and again until so much time has passed, once at least."""
        costs: list[Cost] = []
        until = time.monotonic() + seconds
        while not costs or time.monotonic() < until:
            costs.append(await getattr(self, what)(**arguments))
        return costs

    async def receive_rival(self, metadata: str, num_chunks: int) -> Cost:
        """Receive by torchft."""
        rival = Rival(num_chunks)
        try:
            state, cost = await timed(lambda: self._bridge.run(rival.receive, metadata))
            return self._checked(state, cost)
        finally:
            rival.close()

    async def warm_up(self) -> None:
        """Load what a first receive loads, so that it is no part of its memory."""
        numbered(_ENOUGH_FOR_THREADS)
        async with HTTPTransport[_State](
            _TIMEOUT, server=Server(host="127.0.0.1")
        ) as transport:
            await transport.send_checkpoint([0], 1, {"x": torch.zeros(8)})
            await transport.recv_checkpoint(0, transport.metadata(), 1)

    async def warm_up_rival(self) -> None:
        """Load torchft and let it receive once."""
        sender, receiver = Rival(0), Rival(0)
        metadata = sender.send({"x": torch.zeros(8)})
        await self._bridge.run(receiver.receive, metadata)
        sender.close()
        receiver.close()

    async def footprint(self) -> int:
        """Return the bytes in memory, and forget earlier peaks."""
        gc.collect()
        forget_peak()
        return resident()

    async def peak(self) -> int:
        """Return the most bytes in memory since `footprint`."""
        return peak()

    def _checked(self, state: _State, cost: Cost) -> Cost:
        if not looks_right(state, self._shape):
            raise AssertionError("what was received is not what was sent")
        return cost
