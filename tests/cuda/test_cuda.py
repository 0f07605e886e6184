"""Staging from, and loading to, a real device; skipped where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt.memory.arena import Arena
from aiockpt.memory.device import port_for
from aiockpt.testing import assert_same
from tests.support.cards import on_a_loop
from tests.support.servers import settle
from tests.support.states import file_of, rebuilt, stager
from tests.support.transports import (
    MIB,
    HoldBack,
    pair,
    proxied,
    receive,
    through,
    transport,
)

DEVICE = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]

A_WHILE = 400_000_000
"""Cycles that a device is kept busy: some 200 ms."""


def busy_then(work: Callable[[], object]) -> None:
    """Enqueue something slow, and behind it ``work``."""
    torch.cuda._sleep(A_WHILE)
    work()


def on_device(*shape: int, fill: float | None = None) -> torch.Tensor:
    """Return a tensor on the device: random, or all of one number."""
    if fill is None:
        return torch.randn(shape, device=DEVICE)
    return torch.full(shape, float(fill), device=DEVICE)


KINDS: dict[str, Callable[[], object]] = {
    "dtypes": lambda: [
        on_device(3, 5).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.int64,
            torch.int8,
            torch.bool,
        )
    ],
    "nothing": lambda: [on_device(), on_device(0, 3)],
    "transposed": lambda: on_device(30, 50).t(),
    "half of the memory": lambda: on_device(100)[::2],
    "sparse view": lambda: on_device(64, 64)[:, ::8],
    "expanded": lambda: on_device(7, 1).expand(7, 9),
    "conjugated": lambda: on_device(8).to(torch.complex64).conj(),
    "tied": lambda: [(weight := on_device(10, 10)), weight.t(), weight[3:5]],
    "parameter": lambda: torch.nn.Parameter(on_device(4)),
    "host beside it": lambda: [on_device(1000), torch.randn(1000), on_device(3)],
}


class TestStaging:
    """The stager copies from the device."""

    @pytest.mark.parametrize("kind", KINDS)
    @on_a_loop
    async def test_a_state_on_a_device_arrives(self, kind: str) -> None:
        """The state arrives in host memory, bit by bit."""
        state = {"leaf": KINDS[kind](), "step": 3}
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            assert_same(await receive(sender, receiver), state)

    @on_a_loop
    async def test_it_waits_for_the_producer(self) -> None:
        """What training has enqueued is part of the checkpoint."""
        weight = on_device(MIB, fill=0)
        async with pair() as (sender, receiver):
            busy_then(lambda: weight.fill_(7))
            await sender.send_checkpoint([], 1, {"w": weight})
            assert (await receive(sender, receiver))["w"].unique().tolist() == [7]

    @on_a_loop
    async def test_it_waits_for_the_stream_that_is_current(self) -> None:
        """Whichever the producer works on."""
        weight, stream = on_device(MIB, fill=0), torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        async with pair() as (sender, receiver):
            with torch.cuda.stream(stream):
                busy_then(lambda: weight.fill_(7))
                await sender.send_checkpoint([], 1, {"w": weight})
            assert (await receive(sender, receiver))["w"].unique().tolist() == [7]

    @on_a_loop
    async def test_small_tensors_arrive(self) -> None:
        """Small tensors of all dtypes travel together, and back."""
        dtypes = torch.float32, torch.bfloat16, torch.int8, torch.bool
        state = {f"w{n}": on_device(n % 300).to(dtypes[n % 4]) for n in range(3000)} | {
            "columns": on_device(64, 64)[:, ::8],
            "large": on_device(MIB),
        }
        template = {name: torch.zeros_like(each) for name, each in state.items()}
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            await receive(sender, receiver, into=template)
        assert_same(template, state)

    @on_a_loop
    async def test_training_may_go_on_when_it_returns(self) -> None:
        """What is enqueued from then on does not reach the checkpoint."""
        weight = on_device(16 * MIB, fill=1)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, {"w": weight})
            weight.fill_(2)
            assert (await receive(sender, receiver))["w"].unique().tolist() == [1]

    @on_a_loop
    async def test_the_state_is_held_meanwhile(self) -> None:
        """The allocator must not hand its memory on before it was copied."""
        state = {"w": on_device(16 * MIB, fill=1)}
        async with pair() as (sender, receiver):
            busy_then(lambda: None)
            sending = asyncio.create_task(sender.send_checkpoint([], 1, state))
            await asyncio.sleep(0.05)
            assert not sending.done()
            state = {"w": on_device(16 * MIB, fill=9)}
            await sending
            assert (await receive(sender, receiver))["w"].unique().tolist() == [1]

    @on_a_loop
    async def test_the_loop_stays_live(self) -> None:
        """The loop runs while the device computes and while it copies."""
        weight, lags = on_device(64 * MIB, fill=1), list[float]()

        async def tick() -> None:
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.005)
                lags.append(time.monotonic() - started - 0.005)

        async with stager(ports=port_for, chunk_bytes=16 * MIB) as staging:
            (await staging.stage({"w": weight}, step=1)).release()
            ticker = asyncio.create_task(tick())
            busy_then(lambda: weight.fill_(2))
            snapshot = await staging.stage({"w": weight}, step=2)
            ticker.cancel()
            await asyncio.wait({ticker})
            assert len(lags) > 10
            assert sorted(lags)[len(lags) * 9 // 10] < 0.02
            snapshot.release()

    @on_a_loop
    async def test_the_arena_is_page_locked(self) -> None:
        """Otherwise the copies would be neither fast nor asynchronous."""
        async with stager(ports=port_for) as staging:
            snapshot = await staging.stage({"w": on_device(MIB)}, step=1)
            (view,) = snapshot._memory.buffers(0, 4096)
            assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
            del view
            snapshot.release()

    @on_a_loop
    async def test_page_locks_are_undone(self) -> None:
        """Arenas come and go; the driver refuses to lock the same pages twice."""
        async with stager(ports=port_for) as staging:
            for size in (1, 5, 1, 20, 3):
                state = {"w": on_device(size * MIB)}
                snapshot = await staging.stage(state, step=1)
                assert_same(rebuilt(file_of(snapshot)), state)
                snapshot.release()
                staging.trim()
        torch.cuda.synchronize(DEVICE)

    @on_a_loop
    async def test_a_page_lock_that_fails_is_forgotten(self) -> None:
        """The next kernel of the thread does not fail for it."""
        arena, port = Arena(MIB), port_for(DEVICE)
        assert port is not None
        unpin = port.pin(arena)
        port.pin(arena)()  # it is locked already, so this one fails
        assert on_device(3, fill=2).sum().item() == 6
        unpin()
        arena.close()

    @on_a_loop
    async def test_a_cancel_leaves_the_device_usable(self) -> None:
        """Its copies end in the background."""
        state = {"w": on_device(16 * MIB)}
        async with pair() as (sender, receiver):
            for delay in (0, 0.001, 0.01, 0.05):
                busy_then(lambda: None)
                sending = asyncio.create_task(sender.send_checkpoint([], 1, state))
                await asyncio.sleep(delay)
                sending.cancel()
                await asyncio.wait({sending})
            await sender.send_checkpoint([], 2, state)
            assert_same(await receive(sender, receiver, 2), state)

    @on_a_loop
    async def test_it_is_fast(self, record_property: Callable[..., None]) -> None:
        """A gibibyte, digests included, into an arena that is warm."""
        state = {"w": on_device(256, MIB)}
        async with stager(ports=port_for, chunk_bytes=16 * MIB) as staging:
            (await staging.stage(state, step=1)).release()
            torch.cuda.synchronize(DEVICE)
            started = time.monotonic()
            snapshot = await staging.stage(state, step=2)
            rate = (1 << 30) / (time.monotonic() - started) / 1e9
            record_property("GB/s", round(rate, 2))
            assert rate > 2
            snapshot.release()


class TestLoading:
    """The load copies to the device."""

    def state(self, fill: float | None = None) -> dict[str, torch.Tensor]:
        """Return a template, or what fills it."""
        wide = on_device(64, 64, fill=fill)
        return {
            "weight": on_device(4 * MIB, fill=fill),
            "transposed": on_device(30, 50, fill=fill).t(),
            "columns": wide[:, ::2],
            "sparse": on_device(64, 64, fill=fill)[:, ::16],
            "host": torch.ones(9) if fill is None else torch.full((9,), float(fill)),
        }

    @pytest.mark.parametrize("direct", [False, True])
    @on_a_loop
    async def test_a_template_on_a_device_is_filled(self, direct: bool) -> None:
        """The template's own device memory is filled."""
        state, template = self.state(), self.state(0)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            got = await receive(sender, receiver, into=template, direct=direct)
        assert got["weight"] is template["weight"]
        assert got["weight"].device == DEVICE
        assert_same(template, state)

    @on_a_loop
    async def test_it_is_copied_while_later_chunks_travel(self) -> None:
        """Chunk by chunk, as they are verified, if the caller lets it."""
        state, template = self.state(1), self.state(0)
        weight, fault = template["weight"], HoldBack()
        async with transport() as sender, transport(connections=1) as receiver:
            await sender.send_checkpoint([], 1, state)
            async with proxied(sender, otherwise=fault) as proxy:
                call = receiver.recv_checkpoint(
                    0, through(proxy, sender), 1, into=template, direct=True
                )
                task = asyncio.create_task(call)
                await settle(lambda: bool(weight[: MIB // 4].all()))
                assert not weight[-MIB:].any()
                assert not task.done()
                fault.gate.set()
                await task
        assert_same(template, state)

    @pytest.mark.parametrize("keep_arena", [False, True])
    @on_a_loop
    async def test_a_cancel_while_it_is_copied_leaves_the_device_usable(
        self, keep_arena: bool
    ) -> None:
        """Its copies end in the background, from memory that nobody else gets."""
        state = self.state(1)
        options = {"connections": 1, "keep_arena": keep_arena}
        async with transport() as sender, transport(**options) as receiver:
            await sender.send_checkpoint([], 1, state)
            for _ in range(3):
                async with proxied(sender, otherwise=(fault := HoldBack())) as proxy:
                    busy_then(lambda: None)
                    call = receiver.recv_checkpoint(
                        0, through(proxy, sender), 1, into=self.state(0), direct=True
                    )
                    task = asyncio.create_task(call)
                    await fault.closed.wait()
                    task.cancel()
                    await asyncio.wait({task})
            template = self.state(0)
            for _ in range(3):
                await receive(sender, receiver, into=template, direct=True)
                assert_same(template, state)

    @pytest.mark.parametrize("have", [False, True])
    @on_a_loop
    async def test_a_prepared_step_is_applied(self, have: bool) -> None:
        """Twice, behind what was enqueued before, from memory that is kept."""
        state, template = self.state(1), self.state(0)
        async with pair(keep_arena=True) as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            for _ in range(2):
                prepare, metadata = receiver.prepare, sender.metadata()
                step = await prepare(metadata, 1, into=template, have=have)
                busy_then(lambda: None if have else template["weight"].fill_(5))
                step.apply()
                assert_same(template, state)
                template["weight"][MIB:].zero_()

    @on_a_loop
    async def test_it_waits_for_who_still_uses_the_template(self) -> None:
        """A kernel that was enqueued before must not overwrite the checkpoint."""
        state, template = self.state(), self.state(0)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            busy_then(lambda: template["weight"].fill_(5))
            await receive(sender, receiver, into=template)
        assert_same(template, state)

    @on_a_loop
    async def test_memory_beside_the_template_is_untouched(self) -> None:
        """The load writes only the template's elements."""
        ours = on_device(64, 64, fill=0)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint(
                [], 1, {"w": on_device(64, 64, fill=1)[:, ::2]}
            )
            await receive(sender, receiver, into={"w": ours[:, ::2]})
        assert ours[:, ::2].unique().tolist() == [1]
        assert ours[:, 1::2].unique().tolist() == [0]

    @on_a_loop
    async def test_training_goes_on_from_there(self) -> None:
        """The default stream sees what was loaded, without a synchronize."""
        state, template = self.state(1), self.state(0)
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            await receive(sender, receiver, into=template)
            total: Any = template["weight"].sum().item()
        assert total == template["weight"].numel()
