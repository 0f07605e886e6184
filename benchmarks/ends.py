"""The two ends of a transfer, and whoever runs beside them: one object in each process.

Their methods are the commands of ``benchmarks.worker``. They use only the public
interface of the library, so that older source trees can be measured by them too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypedDict

import aiohttp
import torch
from aiohttp import web

import aiockpt.http
from aiockpt.events import TransferEvent, add_hook
from benchmarks.measures import Cost, Watch, timed
from benchmarks.references import (
    RawServer,
    Torchft,
    fetch_raw,
    in_thread,
    memcpy,
    memcpy_and_digest,
)
from benchmarks.state import (
    FRESH,
    TOUCHED,
    Shape,
    State,
    await_cold_memory,
    bytes_of,
    cut,
    forget_peak,
    fresh,
    looks_right,
    numbered,
    process_memory,
    shape_of,
    touch,
    warm_host,
)

__all__ = [
    "CHUNK_BYTES",
    "ROLES",
    "SMALL_PATH",
    "Moment",
    "Progress",
    "Trainer",
    "Training",
    "changed_chunks",
    "progress",
    "train_beside",
]

SMALL_PATH = "small"
"""The path of the small answers that the application gives beside a transfer."""

CHUNK_BYTES = 16 << 20
"""What a transport cuts its data segment into."""

_TIMEOUT = 600.0
_WARM = 2  # sends until both of the arenas that take turns have been used
_ENOUGH_FOR_THREADS = 4 << 20  # torch starts its own threads for large operations
_VISIT = 0.005  # seconds from one small request to the next
_OPERATIONS = 2000  # of a training step, which then takes a tenth of a millisecond


def _transport(
    *, host: str | None = None, process: bool = False, **options: Any
) -> aiockpt.HTTPTransport[Any]:
    if hasattr(aiockpt, "Server"):
        options["server"] = aiockpt.Server(host=host, process=process)
    else:  # an older source tree
        options |= {"host": host, "server": "process" if process else "loop"}
    return aiockpt.HTTPTransport(_TIMEOUT, **options)


# ---------------------------------------------------------------------- the two ends


class Sender:
    """Has the state dict, stages it, and serves it in every way."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: State = {}
        self._serving: aiockpt.HTTPTransport[Any] | None = None
        self._raw: RawServer | None = None
        self._torchft: list[Torchft] = []
        self._staging: aiockpt.HTTPTransport[Any] | None = None
        self._sends = 0

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

    async def offer(self, **options: Any) -> str:
        """Publish the state dict by a new transport; return the metadata."""
        transport = _transport(**{"host": "127.0.0.1", **options})
        await transport.start()
        return await self._publish(transport)

    async def _publish(self, transport: aiockpt.HTTPTransport[Any]) -> str:
        self._serving = transport
        await transport.send_checkpoint([1], 1, self._state, _TIMEOUT)
        return transport.metadata()

    async def offer_raw(self, host: str = "127.0.0.1") -> int:
        """Serve the same bytes through bare sockets; return the port."""
        self._raw = self._raw or RawServer(bytes_of(self._flat), host)
        return self._raw.port

    async def offer_torchft(self, num_chunks: int) -> str:
        """Serve the state dict by torchft; return its metadata."""
        self._torchft.append(Torchft(num_chunks))
        return self._torchft[-1].send(self._state)

    async def retract(self) -> None:
        """Stop all serving."""
        transport, self._serving = self._serving, None
        raw, self._raw = self._raw, None
        others, self._torchft = self._torchft, []
        if transport is not None:
            await transport.shutdown()
        if raw is not None:
            raw.close()
        for other in others:
            other.close()
        await self._stop_staging()

    async def memcpy(self, kind: str) -> Cost:
        """Copy the bytes to memory of a kind."""
        nbytes = self._flat.nbytes
        if kind == TOUCHED:
            destination = touch(fresh(FRESH, nbytes))
        else:
            warm_host(nbytes)
            destination = fresh(kind, nbytes)
        seconds = memcpy(destination, bytes_of(self._flat))
        return {"seconds": seconds, "cpu": 0.0, "lags": []}

    async def memcpy_and_digest(self, threads: int) -> Cost:
        """Copy the bytes to touched memory in threads, and digest them."""
        destination = touch(fresh(FRESH, self._flat.nbytes))
        seconds = await memcpy_and_digest(destination, bytes_of(self._flat), threads)
        return {"seconds": seconds, "cpu": 0.0, "lags": []}

    async def stage(self, warm: bool) -> Cost:  # noqa: FBT001 - from JSON
        """Send by a new transport, or once more by one whose memory has been used."""
        if not warm:
            await self._stop_staging()
        if self._staging is None:
            self._staging = _transport(host="127.0.0.1")
            await self._staging.start()
        if not warm:
            warm_host(self._flat.nbytes)
            return await self._send(self._staging)
        while self._sends < _WARM:
            await self._send(self._staging)
        cost = await self._send(self._staging)
        await self._stop_staging()
        return cost

    async def _send(self, transport: aiockpt.HTTPTransport[Any]) -> Cost:
        self._sends += 1
        _, cost = await timed(
            lambda: transport.send_checkpoint([1], self._sends, self._state, _TIMEOUT)
        )
        return cost

    async def _stop_staging(self) -> None:
        transport, self._staging = self._staging, None
        self._sends = 0
        if transport is not None:
            await transport.shutdown()


class Receiver:
    """Receives in every way, timed from the request to the usable state dict."""

    def __init__(self) -> None:
        self._shape = Shape("one", 0, 0)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._template: State = {}

    async def prepare(self, key: str, size: int) -> None:
        """Expect a state dict of that shape."""
        await self.release()
        self._shape = shape_of(key, size)

    async def make_template(self) -> None:
        """Build a state dict to receive into; raw bytes go into its memory too."""
        self._flat = numbered(self._shape.nbytes)
        self._template = cut(self._flat, self._shape)

    async def release(self) -> None:
        """Forget the template."""
        self._template, self._flat = {}, torch.empty(0, dtype=torch.uint8)
        gc.collect()

    async def ready(
        self,
        touched: bool,  # noqa: FBT001 - from JSON
        cold: bool = False,  # noqa: FBT001, FBT002 - from JSON
    ) -> None:
        """Make the memory ready that will be received into."""
        gc.collect()
        if cold:
            await_cold_memory()
        elif touched:
            ctypes.memset(self._flat.data_ptr(), 0, self._flat.nbytes)
        else:
            warm_host(self._shape.nbytes)

    async def idle(self, seconds: float) -> Cost:
        """Do nothing for a while."""
        _, cost = await timed(lambda: asyncio.sleep(seconds))
        return cost

    async def receive_raw(
        self,
        port: int,
        connections: int,
        kind: str,
        digest: bool = False,  # noqa: FBT001, FBT002 - from JSON
        host: str = "127.0.0.1",
    ) -> Cost:
        """Receive the bare bytes into memory of a kind."""

        async def receive() -> None:
            if kind == TOUCHED:
                memory = bytes_of(self._flat)
            else:
                memory = fresh(kind, self._shape.nbytes)
            await fetch_raw((host, port), connections, memory, digest=digest)

        _, cost = await timed(receive)
        return cost

    async def receive(
        self,
        metadata: str,
        into: bool,  # noqa: FBT001 - from JSON
        changed: float | None = None,
        same_host: bool = False,  # noqa: FBT001, FBT002 - from JSON
    ) -> Cost:
        """Receive by this library, into fresh memory or into the template.

        Args:
            metadata: Of the sender.
            into: Whether to receive into the template.
            changed: A share of the chunks to change in the template first. The others
                are not fetched (``have=``).
            same_host: Whether the memory must be lent: it is shared, or copied into the
                template.
        """
        template = self._template if into else None
        options: dict[str, Any] = {"into": template, "direct": into}
        if same_host:
            options["share"] = not into
        if changed is not None:
            options["have"] = self._template
            self._spoil(changed)
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        transport = _transport()
        try:
            state, cost = await timed(
                lambda: transport.recv_checkpoint(0, metadata, 1, **options)
            )
            return self.checked(state, cost)
        finally:
            remove()
            await transport.shutdown()
            if changed is not None and not into:
                self._spoil(changed)  # twice is not at all
            if same_host and events and events[-1].medium != "shared memory":
                raise AssertionError(f"the memory was not lent: {events[-1]}")

    def _spoil(self, share: float) -> None:
        for chunk in changed_chunks(self._flat.nbytes, share):
            self._flat[chunk * CHUNK_BYTES] ^= 255

    async def receive_torchft(self, metadata: str, num_chunks: int) -> Cost:
        """Receive by torchft."""
        transport = Torchft(num_chunks)
        try:
            state, cost = await timed(lambda: in_thread(transport.receive, metadata))
            return self.checked(state, cost)
        finally:
            transport.close()

    async def repeat(self, what: str, seconds: float, **arguments: Any) -> list[Cost]:
        """Receive again and again until so much time has passed, at least once."""
        costs: list[Cost] = []
        until = time.monotonic() + seconds
        while not costs or time.monotonic() < until:
            costs.append(await getattr(self, what)(**arguments))
        return costs

    async def warm_up(self, torchft: bool) -> None:  # noqa: FBT001 - from JSON
        """Load what a first receive loads, so that it is no part of its memory."""
        numbered(_ENOUGH_FOR_THREADS)
        state = {"x": torch.zeros(8)}
        if torchft:
            sender, receiver = Torchft(0), Torchft(0)
            await in_thread(receiver.receive, sender.send(state))
            sender.close()
            receiver.close()
            return
        async with _transport(host="127.0.0.1") as transport:
            await transport.send_checkpoint([0], 1, state)
            await transport.recv_checkpoint(0, transport.metadata(), 1)

    async def memory(self) -> int:
        """Return the bytes in memory, and forget earlier peaks."""
        gc.collect()
        forget_peak()
        return process_memory()

    async def peak(self) -> int:
        """Return the most bytes in memory since `memory`."""
        return process_memory(peak=True)

    def checked(self, state: Mapping[str, torch.Tensor], cost: Cost) -> Cost:
        """Return the cost of what was received, if that is right."""
        if not looks_right(state, self._shape):
            raise AssertionError("what was received is not what was sent")
        return cost


def changed_chunks(nbytes: int, share: float) -> list[int]:
    """Return which chunks differ: about ``share`` of them, spread evenly."""
    count = -(-nbytes // CHUNK_BYTES)
    wanted = math.ceil(share * count)
    return [number * count // wanted for number in range(wanted)]


# -------------------------------------------------------------------- an application


class AppSender(Sender):
    """Serves the state dict from an aiohttp application with a small route of its own.

    The application and the transport share one port.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runner: web.AppRunner | None = None

    async def offer_app(self) -> str:
        """Start the application, publish the state dict; return the metadata."""
        await self.retract()
        listening = socket.create_server(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        transport = _transport(advertise=base)
        app = web.Application()

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"answer": 42})

        app.router.add_get(f"/{SMALL_PATH}", answer)
        aiockpt.http.setup(app, transport, prefix="/")
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        return await self._publish(transport)

    async def retract(self) -> None:
        """End the application, and the transport with it."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await super().retract()


class Visitor:
    """Sends a small request to an application every 5 ms.

    It does not wait for earlier answers: an application that answers late does not make
    its visitors come later.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._coming: asyncio.Task[None] | None = None
        self._visits: list[tuple[float, float]] = []

    async def visit(self, url: str) -> None:
        """Send requests from now on, after a first one that is not counted."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        await self._ask(self._session, url)
        self._visits = []
        self._coming = asyncio.create_task(self._come(self._session, url))

    async def visited(self) -> list[tuple[float, float]]:
        """Stop; return when each request was sent, and how long its answer took."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming
        return self._visits

    async def release(self) -> None:
        """Close the connections."""
        await self.visited()
        if self._session is not None:
            await self._session.close()

    async def _come(self, session: aiohttp.ClientSession, url: str) -> None:
        asking: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                asking.add(asyncio.create_task(self._ask(session, url)))
                due += _VISIT
                await asyncio.sleep(max(due - time.monotonic(), 0))
        finally:
            await asyncio.gather(*asking)

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> None:
        sent = time.monotonic()
        async with session.get(url, raise_for_status=True) as answer:
            await answer.read()
        self._visits.append((sent, time.monotonic() - sent))


# ------------------------------------------------------------------- a training loop

Moment = tuple[float, float]
"""When a step ended: on the clock of the system, and of its thread, in seconds."""


class Progress(TypedDict):
    """How far a training loop got in some time.

    ``speed`` is in steps per second, and ``stall`` the longest time, in seconds, in
    which no step ended. ``waited`` is the share of the time in which its thread did not
    run, because others had its core or its interpreter's lock.
    """

    speed: float
    stall: float
    waited: float


class Training:
    """Steps of plain Python between `begin` and `end`, in the thread of `run`."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._ends: list[Moment] | None = None
        self._closed = False

    def run(self) -> None:
        """Make steps whenever they are wanted, until `close`."""
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            ends = self._ends
            while ends is not None and self._ends is ends:
                _step()
                ends.append((time.monotonic(), time.thread_time()))

    def begin(self) -> None:
        """Train from now on."""
        self._ends = []
        self._wanted.set()

    def end(self) -> Sequence[Moment]:
        """Train no more; return when each step ended."""
        ends, self._ends = self._ends, None
        return ends or ()

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self.end()
        self._wanted.set()


def _step() -> int:
    total = 0
    for number in range(_OPERATIONS):
        total += number * number
    return total


def progress(ends: Sequence[Moment], began: float, ended: float) -> Progress:
    """Return how far a loop got between two times of the system's clock."""
    inside = [end for end in ends if began <= end[0] <= ended]
    at = [began, *(end[0] for end in inside), ended]
    waited = 1.0
    if len(inside) > 1:
        passed, ran = (b - a for a, b in zip(inside[0], inside[-1], strict=True))
        waited = max(1 - ran / passed, 0.0)
    return {
        "speed": len(inside) / (ended - began),
        "stall": max(after - before for before, after in pairwise(at)),
        "waited": waited,
    }


class Trainer(Sender):
    """A sender in a thread of a process whose main thread trains."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self._ends: Sequence[Moment] = ()

    async def train(self) -> None:
        """Train from now on."""
        self._training.begin()

    async def rest(self) -> None:
        """Train no more."""
        self._ends = self._training.end()

    async def trained(self, began: float, ended: float) -> Progress:
        """Return how far the last training got between two moments."""
        return progress(self._ends, began, ended)


def train_beside(serve: Callable[[Training], object]) -> None:
    """Call ``serve`` in a thread; make the steps that it wants in this one.

    A trainer under torchft works so: its transports have threads. This returns when
    ``serve`` has returned.
    """
    training = Training()

    def work() -> None:
        try:
            serve(training)
        finally:
            training.close()

    thread = threading.Thread(target=work, name="benchmarks-serving")
    thread.start()
    training.run()
    thread.join()


def _saver() -> Any:
    from benchmarks.saver import Saver

    return Saver()


def _group_sender() -> Any:
    from benchmarks.groups import GroupSender

    return GroupSender()


def _group_receiver() -> Any:
    from benchmarks.groups import GroupReceiver

    return GroupReceiver()


ROLES: Mapping[str, Callable[[], Any]] = {
    "sender": Sender,
    "receiver": Receiver,
    "app": AppSender,
    "visitor": Visitor,
    "saver": _saver,
    "group sender": _group_sender,
    "group receiver": _group_receiver,
}
"""What a process can be; a ``trainer`` is made by `train_beside`."""
