"""HTTPTransports on loopback, trainers and followers, and receives of every kind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from mmap import mmap
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from aiockpt import (
    Auth,
    HTTPTransport,
    Progress,
    Receive,
    Server,
    StepNotFoundError,
    TransferEvent,
    add_hook,
)
from aiockpt.state.load_plan import Matching
from aiockpt.testing import Fault, FaultProxy
from aiockpt.transfer.destination import Destination

Transport = HTTPTransport[Any]
Events = list[TransferEvent]

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
async def pair(
    *, state: Any = ..., step: Any = 1, **options: Any
) -> AsyncIterator[tuple[Transport, Transport]]:
    """Make a sender, which may offer a state, and a receiver of the same kind."""
    async with transport(**options) as sender, transport(**options) as receiver:
        if state is not ...:
            await sender.send_checkpoint([], step, state)
        del state  # a test may ask what else refers to it
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


@asynccontextmanager
async def lending(**options: Any) -> AsyncIterator[Transport]:
    """Make a sender that lends step 1."""
    async with transport(same_host=True, **options) as sender:
        await sender.send_checkpoint([1], 1, weights(1.0))
        yield sender


@asynccontextmanager
async def lending_pair(
    **options: Any,
) -> AsyncIterator[tuple[Transport, Transport, list[TransferEvent]]]:
    """Make a sender that lends, a receiver that takes what is lent, and the events."""
    async with (
        told() as events,
        transport(same_host=True, **options) as sender,
        transport(**options) as receiver,
    ):
        yield sender, receiver, events


def like(state: dict[str, Any]) -> dict[str, Any]:
    """Return tensors to receive into."""
    return {key: torch.zeros_like(value) for key, value in state.items()}


def came_by(events: list[TransferEvent]) -> str:
    """Return how the last receive got its bytes."""
    return [each for each in events if each.stop == "recv"][-1].medium


@asynccontextmanager
async def told() -> AsyncIterator[list[TransferEvent]]:
    """Collect the events meanwhile."""
    events: list[TransferEvent] = []
    remove = add_hook(events.append)
    try:
        yield events
    finally:
        remove()


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

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
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
    async with asyncio.timeout(60):
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


MIB_SENT = 4.0
MIB_LARGE = 24.0  # more than the buffers of one slow connection hold
COUNT = 16
_PARTS = {"select": [f"w{n}" for n in range(COUNT // 2, COUNT)]}
_HELD = [f"w{n}" for n in range(COUNT // 2)]

Places = tuple[tuple[Any, str], ...]
FILLING: Places = ((Destination, "_load"),)
"""Where a template is filled, which is one call in a thread."""
SHARING: Places = ((Matching, "assemble"),)
"""Where a state dict is made, for which the memory is there by then."""


def options_of(call: str, mib: float = MIB_SENT) -> dict[str, Any]:
    """Return the options of a receive that are in the name of its row."""
    options: dict[str, Any] = {}
    if "into=" in call or "prepare" in call:
        options["into"] = weights(0.0, mib=mib, count=COUNT)
    if "direct=" in call:
        options["direct"] = True
    if "select=" in call:
        options |= _PARTS
    if "share=" in call:
        options["share"] = True
    if "have=" in call:
        options |= _having(options, mib)
    return options


def _having(options: dict[str, Any], mib: float) -> dict[str, Any]:
    """Return what says that half of what is sent is there, maybe in the template."""
    held = options.get("into", weights(0.0, mib=mib, count=COUNT))
    for name in _HELD:
        held[name].fill_(1.0)
    return {"have": "into" in options or held}


def begin(
    receiver: Transport, call: str, metadata: str | list[str], **options: Any
) -> Coroutine[Any, Any, Any]:
    """Return the coroutine of the receive that a row names."""
    if "prepare" in call:
        return receiver.prepare(metadata, 1, **options)
    return receiver.recv_checkpoint(0, metadata, 1, **options)


def lends(call: str) -> bool | None:
    """Return the ``same_host`` of the sender that a row is about."""
    return True if "share=" in call else None


def there(sender: Transport) -> str:
    """Say what is left at a sender that nobody reads from any more."""
    store: Any = sender._store
    spent = getattr(store.latest.servable.arena, "spent", False)
    lent = sender.statistics().lent > 0
    assert spent or not lent
    return "lent" if lent else "idle"


def arenas() -> int:
    """Return how many allocations for checkpoints there are."""
    gc.collect()
    return sum(isinstance(each, mmap) and not each.closed for each in gc.get_objects())


def left(options: dict[str, Any], before: int) -> str:
    """Say what is left of a receive that has not succeeded."""
    have = options.get("have")
    held = options.get("into") if have is True else have
    assert held is None or all(held[name].eq(1.0).all() for name in _HELD)
    if "into" not in options:
        assert held is None or not any(held[name].any() for name in _PARTS["select"])
        return "nothing" if arenas() <= before else "something"
    wanted = _PARTS["select"] if have else options.get("select", options["into"])
    filled = torch.cat([options["into"][name] for name in wanted])
    if not filled.any():
        return "untouched"
    return "filled" if filled.eq(1.0).all() else "torn"


class Gate:
    """Stops a thread of a receive, between its last byte and its template."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.go.wait(30)


def held_up(monkeypatch: pytest.MonkeyPatch, places: Places = FILLING) -> Gate:
    """Hold up the threads that come to one of these places."""
    gate = Gate()
    for owner, name in places:
        monkeypatch.setattr(owner, name, _after(gate, getattr(owner, name)))
    return gate


def _after(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    def wait_first(*args: Any) -> Any:
        gate()
        return function(*args)

    return wait_first


def weights_of(step: int, *, count: int = 4, seed: int = 0) -> dict[str, Any]:
    """Return ``count`` layers of 1 MiB in bfloat16 at a step of a made-up training.

    Each step changes the last bit of one weight in a hundred, at other places.
    """
    noise = torch.Generator().manual_seed(seed)
    layers = [torch.randn(MIB // 2, generator=noise).bfloat16() for _ in range(count)]
    for done in range(step):
        for layer in layers:
            layer.view(torch.int16)[done::100] ^= 1
    named: dict[str, Any] = {
        f"layer{number}": each for number, each in enumerate(layers)
    }
    return {**named, "bias": torch.arange(7.0), "step": torch.tensor(step)}
