"""Staging from, and loading to, a real device; skipped where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
        async with pair(state=state) as (sender, receiver):
            assert_same(await receive(sender, receiver), state)

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
