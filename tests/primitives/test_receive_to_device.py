"""What is verified goes on to a device, while the rest is still on its way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aiockpt import Progress
from aiockpt.errors import RemoteProtocolError, TransferTimeoutError
from aiockpt.memory.device import Event, Pair
from aiockpt.testing import FaultProxy, FlipBit, assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.servers import settle
from tests.support.transports import (
    CHUNK,
    WIDE,
    HoldBack,
    chunked,
    counted,
    pair,
    proxied,
    receive,
    through,
    transport,
)

pytestmark = pytest.mark.asyncio


COUNT = 8
SEGMENT = COUNT * CHUNK


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """Take all memory of templates for a device's, whose work waits for the test."""
    fake = FakeAccelerator()
    monkeypatch.setattr("aiockpt.http_transport.port_for", fake.port_for)
    return fake


def one(fill: float) -> dict[str, Any]:
    """Return a tensor that lies in all chunks."""
    return {"w": torch.full((SEGMENT // 4,), fill)}


def many(fill: float) -> dict[str, Any]:
    """Return tensors that are far smaller than a chunk, and end anywhere in one."""
    return {f"w{n}": torch.full((SEGMENT // 1000,), fill) for n in range(250)}


def strided(fill: float) -> dict[str, Any]:
    """Return columns of two chunks, which move element by element; more is behind."""
    wide = torch.full((CHUNK // 8, 32), fill, dtype=torch.float64)
    rest = torch.full(((SEGMENT - 2 * CHUNK) // 4,), fill)
    return {"columns": wide[:, ::16], "w": rest}


@dataclass
class Held:
    """A receive whose last bytes are held back."""

    task: asyncio.Task
    template: dict[str, Any]
    proxy: FaultProxy
    fault: HoldBack

    async def end(self) -> BaseException | None:
        """Wait for its end, and keep nothing of it; return the cause of a failure."""
        (ended,), _ = await asyncio.wait({self.task})
        self.task = asyncio.create_task(asyncio.sleep(0))
        if ended.cancelled():
            return None
        error = ended.exception()
        assert error is not None
        return error.with_traceback(None)

    async def released(self, device) -> None:
        """Let the bytes come and the device work; wait for the end."""
        self.fault.gate.set()
        device.held = False
        device.run()
        await self.task


@asynccontextmanager
async def held(make=one, *, options=None, **how):
    """Receive, by one connection, into a template of zeros."""
    template, fault = make(0.0), HoldBack(SEGMENT - CHUNK)
    async with (
        transport() as sender,
        transport(connections=1, **(options or {})) as receiver,
    ):
        await sender.send_checkpoint([], 1, make(1.0))
        async with proxied(sender, otherwise=fault) as proxy:
            metadata = through(proxy, sender)
            call = receiver.recv_checkpoint(0, metadata, 1, 20, into=template, **how)
            found = Held(asyncio.create_task(call), template, proxy, fault)
            del call
            try:
                yield found
            finally:
                found.task.cancel()
                await asyncio.wait({found.task})


def asked_for(device) -> bool:
    """Say whether a receive waits for what training has enqueued."""
    return bool(device.events) and device.events[0].queries > 0


async def begun(device, copies: int = 1) -> None:
    """Let run what comes before the template's copies; wait until so many wait."""
    await settle(lambda: device.run(copies=0) >= 0 and len(device._side) >= 3 * copies)


def nbytes(state) -> int:
    """Return how many bytes the tensors of a state dict have."""
    return sum(each.nbytes for each in state.values())


@pytest.mark.parametrize(
    ("make", "fast", "select"),
    [(one, True, None), (many, False, None), (many, True, [""])],
)
async def test_the_first_chunk_is_copied_before_the_last_one_comes(
    device, make, fast: bool, select, monkeypatch
) -> None:
    """A tensor in several chunks part by part, also small ones that come in a run."""
    monkeypatch.setattr("aiockpt.http.body_reader._KNOWN_SYSTEM", fast)
    device.held = False
    async with held(make, direct=True, select=select) as receiving:
        await settle(lambda: device.copied >= SEGMENT // 2)
        assert not receiving.fault.gate.is_set()
        assert not receiving.task.done()
        assert next(iter(receiving.template.values()))[0] == 1
        await receiving.released(device)
    assert_same(receiving.template, make(1.0))
    assert device.copied == nbytes(make(1.0))


async def test_without_direct_nothing_is_copied_early(device) -> None:
    """A template that is verified as a whole is filled as a whole."""
    async with held() as receiving:
        await receiving.fault.closed.wait()
        assert (device.copied, device.idle) == (0, True)
        assert not asked_for(device)
        await receiving.released(device)
    assert_same(receiving.template, one(1.0))


@pytest.mark.parametrize("direct", [False, True])
async def test_copies_wait_for_who_still_uses_the_template(device, direct) -> None:
    """The copies wait for what the producer has enqueued before."""
    async with held(strided, direct=direct) as receiving:
        device.produce(lambda: receiving.template["w"].fill_(5))
        receiving.fault.gate.set()
        await settle(lambda: asked_for(device))
        assert device.idle
        await receiving.released(device)
    assert_same(receiving.template, strided(1.0))


async def test_it_ends_when_the_device_has_copied_everything(device) -> None:
    """The receive waits for all enqueued copies, and its progress names the load."""
    seen: list[Progress] = []
    async with held(direct=True, progress=seen.append) as receiving:
        receiving.fault.gate.set()
        await begun(device, COUNT)
        await settle(lambda: device.run(copies=0) >= 0 and len(device._side) % 3 > 0)
        await settle(lambda: device.events[-1].queries > 0)
        device.run(copies=2)
        assert (seen[-1].stop, seen[-1].chunks_done) == ("load", COUNT)
        assert not receiving.task.done()
        await receiving.released(device)
    assert_same(receiving.template, one(1.0))


async def test_a_deadline_does_not_tear_the_template(device) -> None:
    """The memory lives until the device has read it, and the template is whole."""
    async with pair(state=strided(1.0)) as (sender, receiver):
        template = strided(0.0)
        call = receiver.recv_checkpoint(0, sender.metadata(), 1, 2.0, into=template)
        task = asyncio.create_task(call)
        await settle(lambda: device.run(copies=0) >= 0 and not device.idle)
        with pytest.raises(TransferTimeoutError, match="while copying step 1"):
            await task
        device.held = False
        device.run()
        assert_same(template, strided(1.0))


@pytest.mark.parametrize("keep", [False, True])
async def test_memory_outlives_the_copies_of_a_cancelled_receive(device, keep) -> None:
    """They run to their end in the background, from memory that nobody else gets."""
    async with held(direct=True, options={"keep_arena": keep}) as receiving:
        await begun(device)
        await receiving.fault.closed.wait()
        receiving.task.cancel()
        assert await receiving.end() is None
        gc.collect()
        assert len(device.pinned) == keep
        device.held = False
        device.run()  # which raises if it was freed
        assert device.copied >= CHUNK
        await settle(lambda: gc.collect() >= 0 and not device.pinned)
    assert int(receiving.template["w"].sum()) == device.copied // 4


@pytest.mark.parametrize("complete", [False, True])
async def test_memory_outlives_the_copies_of_a_receive_that_fails(
    device, complete: bool, monkeypatch
) -> None:
    """The peer is gone; or all has come, and then no state dict can be made of it."""

    def refuse(*_: object, **__: object) -> None:
        raise RemoteProtocolError("no such type")

    monkeypatch.setattr("aiockpt.state.load_plan.assemble", refuse)
    options = {"reconnect_timeout": 0.05, "stall_timeout": 5}
    async with held(direct=True, options=options) as receiving:
        if complete:
            receiving.fault.gate.set()
        await begun(device)
        if not complete:
            receiving.proxy.refuse()
            await receiving.proxy.cut_all()
        error = await receiving.end()
        assert isinstance(error, RemoteProtocolError) is complete
        assert "the template was modified" in getattr(error, "__notes__", ())
        del error
        gc.collect()
        device.held = False
        device.run()
    assert receiving.template["w"].all() or not complete


async def test_a_busy_device_holds_up_no_other_receive(device, monkeypatch) -> None:
    """Any number of cancelled receives may still copy to it."""
    async with transport() as sender, transport() as receiver:
        await sender.send_checkpoint([], 1, one(1.0))
        for count in range(3):
            call = receive(sender, receiver, into=one(0.0), direct=True)
            task = asyncio.create_task(call)
            await begun(device, COUNT * (count + 1))
            task.cancel()
            await asyncio.wait({task})
        monkeypatch.setattr("aiockpt.http_transport.port_for", lambda _: None)
        try:
            async with asyncio.timeout(60):
                assert_same(await receive(sender, receiver), one(1.0))
        finally:
            device.held = False
            device.run()


@pytest.mark.parametrize("direct", [True, False])
async def test_a_cancel_ends_what_waits_for_who_still_uses_the_template(
    device, direct: bool, monkeypatch
) -> None:
    """A copy of pageable memory blocks its thread until that work has run."""
    copy, blocked = device.copy, list[Event]()

    def wait_and_copy(pairs: Iterable[Pair], *, after: Event) -> Event:
        blocked.append(after)
        after.synchronize()
        return copy(pairs, after=after)

    monkeypatch.setattr(device, "copy", wait_and_copy)
    async with held(direct=direct) as receiving:
        receiving.fault.gate.set()
        await settle(lambda: bool(blocked) or asked_for(device))
        receiving.task.cancel()
        try:
            async with asyncio.timeout(60):
                assert await receiving.end() is None
        finally:
            device.held = False
            device.run()
    assert not receiving.template["w"].any()


@pytest.mark.parametrize("fake", [True, False], ids=["device", "host"])
async def test_autograd_is_told_of_a_receive_that_was_cancelled(
    device, fake: bool, monkeypatch
) -> None:
    """The template has new elements by then."""
    device.held = False
    if not fake:
        monkeypatch.setattr("aiockpt.http_transport.port_for", lambda _: None)
    async with held(direct=True) as receiving:
        await settle(lambda: bool(receiving.template["w"].any()))
        receiving.task.cancel()
        assert await receiving.end() is None
    assert receiving.template["w"]._version > 0


async def test_a_chunk_that_is_wrong_never_gets_there(device) -> None:
    """It is copied once it is right."""
    device.held = False
    async with transport() as sender, transport(connections=1) as receiver:
        await sender.send_checkpoint([], 1, one(1.0))
        async with proxied(sender, faults=[FlipBit(SEGMENT // 2)]) as proxy:
            template = one(0.0)
            metadata = through(proxy, sender)
            await receiver.recv_checkpoint(0, metadata, 1, into=template, direct=True)
            assert proxy.statistics().bytes_down > SEGMENT + CHUNK
    assert_same(template, one(1.0))
    assert device.copied == SEGMENT


async def test_a_copy_that_fails_ends_the_receive(device, monkeypatch) -> None:
    """The failed copy ends it, though chunks are still to come."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    device.held = False
    monkeypatch.setattr(device, "copy", fail)
    async with held(direct=True) as receiving:
        with pytest.raises(RuntimeError, match="device lost"):
            await receiving.task


async def test_memory_that_is_kept_is_page_locked(device) -> None:
    """The memory is locked once for all receives, until it is given back."""
    device.held = False
    async with transport() as sender:
        await sender.send_checkpoint([], 1, one(1.0))
        async with transport(keep_arena=True) as receiver:
            for direct in (True, True, False):
                await receive(sender, receiver, into=one(0.0), direct=direct)
                gc.collect()
                assert len(device.pinned) == 1
        assert not device.pinned
        async with transport() as receiver:
            await receive(sender, receiver, into=one(0.0), direct=True)
            assert not device.pinned


@pytest.mark.parametrize("full", [False, True])
async def test_small_tensors_arrive_together(device, full: bool, monkeypatch) -> None:
    """Through a buffer on the device, or one by one if it has no memory for that."""
    device.held, copies = False, list[int]()
    copy = device.copy

    def counted(moves, *, after):
        made = [*moves]
        copies.append(len(made))
        return copy(made, after=after)

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "copy", counted)
    async with pair(state=many(1.0), chunk_bytes=SEGMENT) as (sender, receiver):
        template = many(0.0)
        step = await receiver.prepare(sender.metadata(), 1, into=template)
        if full:
            monkeypatch.setattr(torch, "empty_like", refuse)
        step.apply()
        assert sum(copies) == 1
        assert_same(template, many(1.0))


@pytest.mark.parametrize("have", [False, True])
async def test_a_prepared_step_is_page_locked(device, have: bool) -> None:
    """The memory is locked before the apply, and until it is freed."""
    device.held = False
    async with pair(state=many(1.0)) as (sender, receiver):
        for end in ("apply", "discard"):
            template = many(0.0)
            prepare = receiver.prepare
            step = await prepare(sender.metadata(), 1, into=template, have=have)
            assert len(device.pinned) == 1
            getattr(step, end)()
            del step, prepare
            await settle(lambda: gc.collect() >= 0 and not device.pinned)
            assert_same(template, many(1.0 if end == "apply" else 0.0))


async def test_memory_of_the_sender_is_not_page_locked(device, monkeypatch) -> None:
    """That would copy it, since the receiver must not change it."""

    def refuse(arena: object) -> None:
        raise AssertionError(f"{arena} is page-locked")

    device.held = False
    monkeypatch.setattr(device, "pin", refuse)
    options = {"same_host": True, "keep_arena": True}
    async with pair(state=one(1.0), **options) as (sender, receiver):
        template = one(0.0)
        await receive(sender, receiver, into=template)
        assert_same(template, one(1.0))


@pytest.mark.parametrize("how", ["before", "after", "same host", "two sources"])
async def test_wherever_it_comes_from(device, how: str) -> None:
    """A sender that still stages, the sender's memory, or several sources."""
    device.held = False
    template = many(0.0)
    async with (
        pair(same_host=how == "same host") as (sender, receiver),
        transport() as other,
    ):
        await other.send_checkpoint([], 1, many(1.0))
        if how in ("before", "after"):
            coming = receive(sender, receiver, into=template, direct=True)
            task = asyncio.create_task(coming)
            if how == "after":
                await asyncio.sleep(0)
            await sender.send_checkpoint([], 1, many(1.0))
            await task
        else:
            await sender.send_checkpoint([], 1, many(1.0))
            both = [sender.metadata(), other.metadata()]
            where = both if how == "two sources" else both[0]
            await receiver.recv_checkpoint(0, where, 1, into=template, direct=True)
    assert_same(template, many(1.0))
    assert device.copied == nbytes(template)


@pytest.mark.parametrize("into", [False, True])
async def test_what_a_device_has_is_compared_too(device, into: bool) -> None:
    """Its bytes are staged to be, and what matches is not loaded again."""
    device.held = False
    have = chunked() | {"w3": torch.zeros(WIDE)}
    async with pair(state=chunked()) as (sender, receiver):
        options = {"into": have, "have": True} if into else {"have": have}
        got, sent = await counted(sender, receiver, **options)
    assert sent == CHUNK
    assert_same(got, chunked())
