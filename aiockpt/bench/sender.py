"""The sending process: it has the state dict, stages it, and serves it."""

from __future__ import annotations

from typing import Literal

import torch

from aiockpt.bench.memory import FRESH, TOUCHED, fresh, touch, warm_host
from aiockpt.bench.raw import RawServer, memcpy, memcpy_and_digest
from aiockpt.bench.rival import Rival
from aiockpt.bench.shapes import bytes_of, cut, numbered, shape_of
from aiockpt.bench.timed import Cost, Watch, timed
from aiockpt.http.options import Server
from aiockpt.http.transport import HTTPTransport
from aiockpt.runtime.bridge import Bridge

__all__ = ["Sender"]

_TIMEOUT = 600.0
_WARM = 2  # sends until both of the arenas that take turns have been used


class Sender:
    """The commands that the sending process obeys; see `aiockpt.bench.worker`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._watch = Watch()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: dict[str, torch.Tensor] = {}
        self._raw: RawServer | None = None
        self._offering: HTTPTransport[object] | None = None
        self._staging: HTTPTransport[object] | None = None
        self._sends = 0
        self._rivals: list[Rival] = []

    async def prepare(self, key: str, size: int) -> None:
        """Build the state dict."""
        await self.release()
        shape = shape_of(key, size)
        self._flat = numbered(shape.nbytes)
        self._state = cut(self._flat, shape)

    async def release(self) -> None:
        """Stop all serving, and forget the state dict."""
        await self.retract()
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)

    async def watch(self) -> None:
        """Start counting CPU seconds and late ticks."""
        self._watch.start()

    async def watched(self) -> Cost:
        """Return what was counted."""
        return await self._watch.stop()

    async def offer(self, host: str = "127.0.0.1") -> str:
        """Publish the state dict; return the metadata."""
        return await self._publish(await _started(host))

    async def offer_apart(self) -> str:
        """Publish it from a process of its own; return the metadata."""
        return await self._publish(await _started(server="process"))

    async def lend(self) -> str:
        """Publish the state dict in memory that is lent; return the metadata."""
        return await self._publish(await _started(same_host=True))

    async def _publish(self, transport: HTTPTransport[object]) -> str:
        self._offering = transport
        await transport.send_checkpoint([1], 1, self._state, _TIMEOUT)
        return transport.metadata()

    async def offer_raw(self) -> int:
        """Serve the same bytes through bare sockets; return the port."""
        self._raw = self._raw or RawServer(self._bytes(), self._bridge)
        return self._raw.port

    async def offer_rival(self, num_chunks: int) -> str:
        """Serve the state dict by torchft; return its metadata."""
        rival = Rival(num_chunks)
        self._rivals.append(rival)
        return rival.send(self._state)

    async def retract(self) -> None:
        """Stop all serving."""
        transport, self._offering = self._offering, None
        raw, self._raw = self._raw, None
        rivals, self._rivals = self._rivals, []
        if transport is not None:
            await transport.shutdown()
        if raw is not None:
            await raw.aclose()
        for rival in rivals:
            rival.close()
        await self._stop_staging()

    async def memcpy(self, kind: str) -> Cost:
        """Copy the bytes to memory of a kind."""
        nbytes = self._flat.nbytes
        if kind == TOUCHED:
            destination = touch(fresh(FRESH, nbytes))
        else:
            warm_host(nbytes)
            destination = fresh(kind, nbytes)
        return {"seconds": memcpy(destination, self._bytes()), "cpu": 0.0, "lags": []}

    async def memcpy_and_digest(self, threads: int) -> Cost:
        """Copy the bytes to touched memory in threads, and digest them."""
        destination = touch(fresh(FRESH, self._flat.nbytes))
        seconds = await memcpy_and_digest(
            destination, self._bytes(), self._bridge, threads=threads
        )
        return {"seconds": seconds, "cpu": 0.0, "lags": []}

    async def stage_cold(self) -> Cost:
        """Send by a new transport, until it is published."""
        await self._stop_staging()
        self._staging = await _started()
        warm_host(self._flat.nbytes)
        return await self._stage()

    async def stage_warm(self) -> Cost:
        """Send again into memory of earlier sends."""
        self._staging = self._staging or await _started()
        while self._sends < _WARM:
            await self._stage()
        cost = await self._stage()
        await self._stop_staging()
        return cost

    async def _stage(self) -> Cost:
        transport, state = self._staging, self._state
        assert transport is not None
        self._sends += 1
        _, cost = await timed(
            lambda: transport.send_checkpoint([1], self._sends, state, _TIMEOUT)
        )
        return cost

    async def _stop_staging(self) -> None:
        transport, self._staging = self._staging, None
        self._sends = 0
        if transport is not None:
            await transport.shutdown()

    def _bytes(self) -> memoryview:
        return bytes_of(self._flat)


async def _started(
    host: str = "127.0.0.1",
    *,
    same_host: bool | None = None,
    server: Literal["loop", "process"] = "loop",
) -> HTTPTransport[object]:
    transport: HTTPTransport[object] = HTTPTransport(
        _TIMEOUT,
        same_host=same_host,
        server=Server(host=host, process=server == "process"),
    )
    await transport.start()
    return transport
