"""What a process does as an end of a transfer: its methods are a worker's commands.

They use only the public interface of the library, so that other source trees can be
measured too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

import aiockpt
from aiockpt.events import TransferEvent, add_hook
from benchmarks import memory, references
from benchmarks.measures import Cost, Watch, timed
from benchmarks.references import in_thread
from benchmarks.training import Trainer, Training

_Receive: TypeAlias = Callable[[], Awaitable[memory.State | memoryview | None]]

CHUNK_BYTES = 16 << 20
"""What a transport cuts its data segment into."""

_TIMEOUT = 600.0
_HERE = "127.0.0.1"
_WARM_SENDS = 2  # until both of the arenas that take turns have been used
_SENDER, _RECEIVER = 0, 1  # ranks of a group
_DRAWN = 1 << 24  # weights that are drawn at random, before they repeat


def _transport(
    host: str | None = None,
    *,
    process: bool = False,
    base: bool = False,
    nice: int | None = None,
    **options: Any,
) -> aiockpt.HTTPTransport[Any]:
    kept: dict[str, Any] = {"keep_base": True} if base else {}  # new, for other trees
    kept |= {} if nice is None else {"nice": nice}
    server = aiockpt.Server(host=host, process=process, **kept)
    return aiockpt.HTTPTransport(_TIMEOUT, server=server, **options)


def changed_chunks(nbytes: int, share: float) -> list[int]:
    """Return which chunks differ: about ``share`` of them, spread evenly."""
    count = -(-nbytes // CHUNK_BYTES)
    wanted = math.ceil(share * count)
    return [number * count // wanted for number in range(wanted)]


class End(Trainer):
    """Has a state dict to send, or to receive into; trains beside it."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: memory.State = {}
        self._count, self._each = 0, 0
        self._offers = AsyncExitStack()
        self._transport: aiockpt.HTTPTransport[Any] | None = None
        self._sends = 0
        self._watch = Watch()
        self._groups: dict[str, Any] = {}

    async def prepare(self, *, count: int, each: int, touched: bool = True) -> None:
        """Build a state dict to send, or to receive into; or know its shape only."""
        await self.release()
        self._count, self._each = count, each
        build = memory.numbered if touched else partial(torch.empty, dtype=torch.uint8)
        self._flat = build(count * each)
        self._state = memory.cut(self._flat, count)

    async def release(self) -> None:
        """Stop all serving, and forget the state dict."""
        await self.retract()
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)
        gc.collect()

    async def watch(self) -> None:
        """Start counting CPU seconds and late ticks."""
        self._watch.start()

    async def watched(self) -> Cost:
        """Return what was counted."""
        return await self._watch.stop()

    async def idle(self, *, seconds: float) -> Cost:
        """Do nothing for a while."""
        return (await timed(lambda: asyncio.sleep(seconds)))[1]

    # ------------------------------------------------------------------ sending

    async def offer(self, *, by: str, **options: Any) -> Any:
        """Serve the state dict in some way; return where it is."""
        return await getattr(self, f"_offer_{by}")(**options)

    async def retract(self) -> None:
        """Stop all serving."""
        offers, self._offers = self._offers, AsyncExitStack()
        self._transport, self._sends = None, 0
        await offers.aclose()

    async def _offer_aiockpt(self, host: str = _HERE, **options: Any) -> str:
        transport = _transport(host, **options)
        self._offers.push_async_callback(transport.shutdown)
        await transport.start()
        await transport.send_checkpoint(step=1, state_dict=self._state)
        self._transport, self._sends = transport, 1
        return transport.metadata()

    async def _offer_raw(
        self, host: str = _HERE, congestion: str | None = None
    ) -> tuple[str, int]:
        server = references.RawServer(memory.bytes_of(self._flat), host, congestion)
        self._offers.callback(server.close)
        return host, server.port

    async def _offer_torchft(
        self, num_chunks: int, host: str = _HERE, congestion: str | None = None
    ) -> str:
        end = references.Torchft(num_chunks, congestion)
        self._offers.callback(end.close)
        return end.send(self._state, host)

    async def copy(self, *, kind: str) -> Cost:
        """Copy the bytes to memory of a kind."""
        copying = references.copy(kind, memory.bytes_of(self._flat))
        return (await timed(lambda: in_thread(copying)))[1]

    async def stage(self, *, used: bool) -> Cost:
        """Send by a new transport, or by one whose memory earlier sends have used."""
        transport = _transport(_HERE)
        async with transport:
            for step in range(1, 2 + _WARM_SENDS * used):
                if not used:
                    memory.ready("warm", self._flat.nbytes)
                send = partial(transport.send_checkpoint, state_dict=self._state)
                _, cost = await timed(partial(send, step=step))
        return cost

    async def publish(
        self, *, times: int, every: float, changed: float
    ) -> list[dict[str, float]]:
        """Change and publish the state dict by the transport of the offer.

        Returns for each step when its send began, and when it was published.
        """
        assert self._transport is not None
        found: list[dict[str, float]] = []
        due = time.monotonic()
        for _ in range(times):
            due += every
            await asyncio.sleep(max(due - time.monotonic(), 0))
            self._spoil(changed)
            self._sends += 1
            began = time.monotonic()
            await self._transport.send_checkpoint(
                step=self._sends, state_dict=self._state
            )
            now = time.monotonic()
            found.append({"step": self._sends, "began": began, "published": now})
        return found

    async def improve(self, *, changed: float, how: str = "step") -> Cost:
        """Change a share of the elements of bfloat16, and publish them.

        They are scattered, and move by one unit in the last place, as by a ``"step"``
        of an optimizer; or they get other values (``"redraw"``). Those of an
        ``"adapter"`` get other values, and lie together.
        """
        assert self._transport is not None
        words = self._flat.view(torch.int16)
        count = int(changed * words.numel())
        drawn = torch.randn(min(count, _DRAWN)).bfloat16().view(torch.int16)
        if how == "adapter" or changed == 1:
            for at in range(0, count, len(drawn)):
                part = words[at : min(at + len(drawn), count)]
                part.copy_(drawn[: len(part)])
        elif how == "redraw":
            found = torch.randint(words.numel(), (count,))
            words[found] = drawn.repeat(-(-count // len(drawn)))[:count]
        else:
            found = torch.randint(words.numel(), (count,))
            words[found] += torch.randint(2, (count,), dtype=torch.int16) * 2 - 1
        self._sends += 1
        send = partial(self._transport.send_checkpoint, state_dict=self._state)
        return (await timed(partial(send, step=self._sends)))[1]

    async def step(self) -> int:
        """Return the step that is offered."""
        return self._sends

    # ---------------------------------------------------------------- receiving

    async def ready(self, *, condition: str | float) -> None:
        """Put the memory that will be received into in a known condition."""
        gc.collect()
        if condition == "touched":
            ctypes.memset(self._flat.data_ptr(), 0, self._flat.nbytes)
        else:
            memory.ready(condition, self._flat.nbytes)

    async def receive(
        self,
        *,
        by: str,
        source: Any,
        seconds: float = 0.0,
        at_once: int = 1,
        **options: Any,
    ) -> list[Cost]:
        """Receive once, and again until so much time has passed; check what came.

        A cost is the time from the request, with connections and all, to the usable
        state dict: to the last one, if several transports receive ``at_once``.
        """
        costs: list[Cost] = []
        until = time.monotonic() + seconds
        receiving = partial(getattr(self, f"_receive_{by}"), source, **options)
        while not costs or time.monotonic() < until:
            async with AsyncExitStack() as stack:
                acts = [
                    await stack.enter_async_context(receiving()) for _ in range(at_once)
                ]
                every = partial(asyncio.gather, *(act() for act in acts))
                found, cost = await timed(every)
                if not all(map(self._is_right, found)):
                    raise AssertionError("what was received is not what was sent")
                del found, every
            costs.append(cost)
        return costs

    def _is_right(self, found: memory.State | memoryview | None) -> bool:
        if isinstance(found, memoryview):
            found = memory.cut(torch.frombuffer(found, dtype=torch.uint8), self._count)
        return memory.looks_right(found or self._state, self._count, self._each)

    @asynccontextmanager
    async def _receive_aiockpt(
        self,
        source: str,
        *,
        in_place: bool = False,
        changed: float | None = None,
        same_host: bool = False,
    ) -> AsyncIterator[_Receive]:
        template = self._state if in_place else None
        options: dict[str, Any] = {"into": template, "direct": in_place}
        if same_host:
            options["share"] = not in_place
        if changed is not None:
            options["have"] = self._state
            self._spoil(changed)
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        transport = _transport()
        try:
            yield lambda: transport.recv_checkpoint(metadata=source, step=1, **options)
        finally:
            remove()
            await transport.shutdown()
            if changed is not None and not in_place:
                self._spoil(changed)  # twice is not at all
        if same_host and events[-1].medium != "shared memory":
            raise AssertionError(f"the memory was not lent: {events[-1]}")

    @asynccontextmanager
    async def _receive_raw(
        self, source: tuple[str, int], *, kind: str = "touched", **options: Any
    ) -> AsyncIterator[_Receive]:
        async def act() -> memoryview:
            touched = memory.bytes_of(self._flat)
            to = touched if kind == "touched" else memory.fresh(kind, touched.nbytes)
            await references.fetch_raw((source[0], source[1]), to, **options)
            return to

        yield act

    @asynccontextmanager
    async def _receive_torchft(self, source: str) -> AsyncIterator[_Receive]:
        end = references.Torchft(0)  # the sender says how many chunks there are
        try:
            yield lambda: in_thread(end.receive, source)
        finally:
            end.close()

    async def refresh(self, *, source: str, have: bool) -> tuple[Cost, int, float]:
        """Receive what is served into host memory, verify it, and apply it.

        Returns the cost until it is verified, how many bytes of the data segment were
        moved, and the milliseconds that applying them took.
        """
        if self._transport is None:
            warm = aiockpt.Receive(keep_arena=True)
            self._transport = _transport(receive=warm, same_host=False)
            self._offers.push_async_callback(self._transport.shutdown)
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        prepare = partial(self._transport.prepare, source, into=self._state)
        try:
            prepared, cost = await timed(partial(prepare, have=True if have else None))
        finally:
            remove()
        began = time.perf_counter()
        prepared.apply()
        pause = 1e3 * (time.perf_counter() - began)
        return cost, next(e.nbytes for e in events if e.stop == "recv"), pause

    async def pause(self, *, source: str) -> tuple[Cost, int, Cost]:
        """Prepare what is served, apply it, and copy as many bytes beside that.

        Returns the cost of applying, the bytes that it copied, and that of the copy.
        """
        transport = _transport(same_host=False)
        async with transport:
            prepared = await transport.prepare(source, into=self._state, have=True)

            async def apply() -> None:
                prepared.apply()

            _, cost = await timed(apply)
        copying = torch.empty(prepared.nbytes, dtype=torch.uint8), self._flat

        async def copy() -> None:
            copying[0].copy_(copying[1][: prepared.nbytes])

        await copy()  # the first one maps pages
        return cost, prepared.nbytes, (await timed(copy))[1]

    async def follow(self, *, source: str, until: int) -> list[dict[str, float]]:
        """Follow a sender in place until a step.

        Returns for each step when it was usable, and how many bytes were moved for it.
        """
        found: list[dict[str, float]] = []
        events: list[TransferEvent] = []
        remove = add_hook(events.append)
        transport = _transport()
        try:
            steps = transport.follow(source, into=self._state, have=True)
            async for step, _ in steps:
                now = time.monotonic()
                moved = [each.nbytes for each in events if each.stop == "recv"]
                found.append({"step": step, "usable": now, "nbytes": moved[-1]})
                if step >= until:
                    break
            await steps.aclose()
        finally:
            remove()
            await transport.shutdown()
        return found

    def _spoil(self, share: float) -> None:
        for chunk in changed_chunks(self._flat.nbytes, share):
            self._flat[chunk * CHUNK_BYTES] ^= 255

    # ----------------------------------------------------------- process groups

    async def join(self, *, directory: str, by: str, rank: int) -> None:
        """Wait for the other rank in the gloo group of a transport."""

        def connect() -> Any:
            gloo: Any = torch.distributed  # whose stubs lack these names
            store = gloo.FileStore(str(Path(directory) / by), 2)
            return gloo.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_TIMEOUT))

        self._groups[by] = await in_thread(connect)
        if by != "aiockpt":
            references.group_end(by, self._groups[by])  # what it imports takes seconds

    async def send_to_group(self, *, by: str) -> Cost:
        """Send the state dict to the other rank."""
        if by == "aiockpt":
            ours = aiockpt.PGTransport[memory.State](self._groups[by], _TIMEOUT)
            send_ours = partial(ours.send_checkpoint, [_RECEIVER], 1, self._state)
            _, cost = await timed(send_ours)
            await ours.shutdown()
            return cost
        send, _ = references.group_end(by, self._groups[by])
        return (await timed(lambda: in_thread(send, self._state)))[1]

    @asynccontextmanager
    async def _receive_group(
        self, source: str, *, in_place: bool
    ) -> AsyncIterator[_Receive]:
        group, template = self._groups[source], self._state if in_place else None
        if source != "aiockpt":
            _, receive = references.group_end(source, group, template)
            yield lambda: in_thread(receive)
            return
        ours = aiockpt.PGTransport[memory.State](group, _TIMEOUT)
        options: dict[str, Any] = {"into": template, "direct": in_place}
        yield lambda: ours.recv_checkpoint(_SENDER, ours.metadata(), 1, **options)
        await ours.shutdown()
