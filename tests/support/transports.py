"""HTTPTransports on loopback, trainers that publish with them, and followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import torch

from aiockpt import (
    Auth,
    HTTPTransport,
    Progress,
    Receive,
    Server,
    StepNotFoundError,
)
from aiockpt.testing import Fault, FaultProxy
from aiockpt.testing.faults import Pipe

Transport = HTTPTransport[Any]

MIB = 1 << 20
TOKEN = "both-know-it"


def grouped(**options: Any) -> dict[str, Any]:
    """Return the options of a transport, those of its records put into the records."""
    records = {"server": Server, "auth": Auth, "receive": Receive}
    for argument, record in records.items():
        names = {each.name for each in fields(record)} & options.keys()
        if names:
            given = {name: options.pop(name) for name in names}
            options[argument] = record(**given)
    return options


def transport(**options: Any) -> Transport:
    """Make a transport with small chunks; `grouped` says what options it takes."""
    defaults: dict[str, Any] = {
        "host": "127.0.0.1",
        "chunk_bytes": 64 << 10,
        "timeout": 20,
    }
    return Transport(**grouped(**{**defaults, **options}))


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Transport, Transport]]:
    """Make a sender and a receiver of the same kind."""
    async with transport(**options) as sender, transport(**options) as receiver:
        yield sender, receiver


async def receive(
    sender: Transport, receiver: Transport, step: int = 1, **options: Any
) -> Any:
    """Receive what a sender offers."""
    return await receiver.recv_checkpoint(0, sender.metadata(), step, **options)


def port_of(sender: Transport) -> int:
    """Return where a transport listens."""
    port = urlsplit(sender.address()).port
    assert port is not None
    return port


def proxied(sender: Transport, **faults: Any) -> FaultProxy:
    """Return a proxy to a sender, with faults."""
    return FaultProxy("127.0.0.1", port_of(sender), **faults)


def through(proxy: FaultProxy, sender: Transport) -> str:
    """Return the metadata of a sender, by way of a proxy."""
    return sender.metadata().replace(str(port_of(sender)), str(proxy.port))


def weights(fill: float = 1.0, *, mib: float = 1.0, count: int = 1) -> dict[str, Any]:
    """Return tensors of one number."""
    size = int(mib * MIB / 4 / count)
    return {f"w{n}": torch.full((size,), fill) for n in range(count)}


CHUNK = 64 << 10
"""Bytes of a chunk of `transport`."""
WIDE = CHUNK // 4
"""Numbers in a chunk."""


def chunked(count: int = 8) -> dict[str, Any]:
    """Return different tensors of a chunk each, and a value behind them."""
    tensors = {f"w{n}": torch.arange(WIDE) + float(n) for n in range(count)}
    return {**tensors, "n": 1}


async def counted(
    sender: Transport, receiver: Transport, **options: Any
) -> tuple[Any, int]:
    """Receive; return the result, and how many bytes of data the sender sent.

    The header's length is what a receive without a selection costs.
    """
    step = sender.statistics().step
    assert step is not None
    sent = [sender.statistics().bytes_sent]
    calls: list[dict[str, Any]] = [{"select": []}, options]
    for each in calls:
        got = await receive(sender, receiver, step, **each)
        sent.append(sender.statistics().bytes_sent)
    return got, sent[2] - 2 * sent[1] + sent[0]


@dataclass
class HoldBack(Fault):
    """Passes on so many bytes of all connections; the others wait for the ``gate``.

    It tells when it is ``closed``.
    """

    free: int = 4 * MIB
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: int = 0

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        """Pass on what is free, and the rest once it may go."""
        free = max(self.free - self._sent, 0)
        self._sent += len(data)
        await pipe.send(data[:free])
        if data[free:]:
            self.closed.set()
            await self.gate.wait()
            await pipe.send(data[free:])


class Halfway:
    """A ``progress`` that lets a test act in the middle of a receive."""

    def __init__(self, share: float = 0.1) -> None:
        self.reached = asyncio.Event()
        self.seen: list[Progress] = []
        self._share = share

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)
        done, total = progress.bytes_done, progress.bytes_total
        if total and done >= self._share * total:
            self.reached.set()


async def in_the_middle(
    call: Callable[[Halfway], Any], act: Callable[[], Any]
) -> tuple[asyncio.Task[Any], Halfway]:
    """Start a receive with ``progress``, and act once it is in its middle."""
    halfway = Halfway()
    task = asyncio.create_task(call(halfway))
    reached = asyncio.create_task(halfway.reached.wait())
    await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), "the receive was too quick"
    await act()
    return task, halfway


def state_of(step: int, mib: int = 1) -> dict[str, Any]:
    """Return a state dict, every number of which is its step."""
    return {"w": torch.full((mib * MIB // 4,), float(step)), "step": step}


def check(step: int, state: dict[str, Any]) -> None:
    """Raise if a state dict is not wholly that of its step."""
    assert state["step"] == step
    low, high = state["w"].aminmax()
    assert low == high == step, "the state is torn"


async def publish(sender: Transport, step: int, mib: int = 1) -> None:
    """Publish the state of a step."""
    await sender.send_checkpoint([], step, state_of(step, mib))


async def soon(follower: AsyncIterator[Any]) -> Any:
    """Return what a follower gets next, which must not take long."""
    async with asyncio.timeout(20):
        return await anext(follower)


class Trainer:
    """Publishes a step after the other, some of them during each receive."""

    def __init__(self, sender: Transport, *, mib: int) -> None:
        self.every = 0.0
        self._sender = sender
        self._mib = mib
        self._step = 0

    async def publish(self) -> None:
        """Publish the next step."""
        self._step += 1
        await publish(self._sender, self._step, self._mib)

    async def measure(self, metadata: str) -> None:
        """Find out how often to publish: machines and lines differ."""
        await self.publish()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with transport() as receiver:
            await receiver.recv_checkpoint(0, metadata, self._step)
        self.every = (loop.time() - began) / 2

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Publish in the background."""

        async def train() -> None:
            while True:
                await self.publish()
                await asyncio.sleep(self.every)

        task = asyncio.create_task(train())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()


async def attempts(sender: Transport, metadata: str, count: int) -> int:
    """Receive the newest step ``count`` times; return how many of these ended."""
    done = 0
    async with transport() as receiver:
        steps = receiver.steps(metadata)
        for _ in range(count):
            step = await soon(steps)
            try:
                state = await receiver.recv_checkpoint(0, metadata, step)
            except StepNotFoundError:
                continue
            check(step, state)
            done += 1
    return done
