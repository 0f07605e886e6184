"""Whose work a call waits for, on a CUDA device and on a stand-in with streams.

Each test runs on both. Without a device, the stand-in shows that the test works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import AsyncCheckpointer
from aiockpt.checkpointers import (
    CheckpointReader,
    CheckpointStagerConfig,
    CheckpointWriter,
    DefaultStager,
)
from aiockpt.checkpointers.thread import CheckpointThread
from aiockpt.checkpointers.writer import Writers
from aiockpt.errors import LocalProtocolError
from aiockpt.memory.arena import Arena
from aiockpt.testing import assert_same
from tests.support.cards import Card, card, on_a_loop
from tests.support.groups import moved, transports
from tests.support.saving import ALONE, config, load, loaded, save
from tests.support.transports import MIB, pair, receive

__all__ = ["card"]

HOW: list[dict[str, Any]] = [
    {},
    {"direct": True},
    {"have": True},
    {"have": True, "direct": True},
    {"select": ["w", "small"]},
]


def state_on(card: Card, fill: float) -> dict[str, Any]:
    """Return a state dict of many chunks on the device, with a value beside it."""
    made = {
        "w": torch.full((card.size,), fill, device=card.device),
        "columns": torch.full((64, 1024), fill, device=card.device)[:, ::8],
        "small": torch.full((100,), fill, device=card.device),
    }
    return {**made, "step": int(fill)}


def filled_with(state: dict[str, Any], fill: float) -> bool:
    """Say whether all tensors have only this number."""
    return all(bool((state[name] == fill).all()) for name in ("w", "columns", "small"))


def fill(state: dict[str, Any], number: float) -> Callable[[], object]:
    """Return what writes a number to all tensors, on the current stream."""
    return lambda: [state[name].fill_(number) for name in ("w", "columns", "small")]


async def elsewhere(card: Card, call: Coroutine[Any, Any, object]) -> None:
    """Go on with a call while another stream is the current one."""
    calling = asyncio.create_task(call)
    for _ in range(2):  # its first steps run on the caller's stream
        await asyncio.sleep(0)
    with card.stream():
        await calling


@asynccontextmanager
async def checkpointer(card: Card) -> AsyncIterator[AsyncCheckpointer]:
    """Make a checkpointer whose writer is a thread."""
    writer = CheckpointThread(
        Writers(CheckpointWriter, {"config": config()}, ALONE),
        shutdown_timeout_secs=30,
        staging_config=CheckpointStagerConfig(),
    )
    reader = CheckpointReader(ALONE, ports=card.ports)
    stager = DefaultStager(ports=card.ports)
    async with AsyncCheckpointer(stager, writer, reader) as made:
        yield made


# ------------------------------------------------------------- what leaves a state dict


@pytest.mark.parametrize("options", [{}, {"zero_copy": True}], ids=str)
@on_a_loop
async def test_a_send_has_what_the_callers_kernels_write(
    card: Card, options: dict[str, Any]
) -> None:
    """They run while the state is staged."""
    state = state_on(card, 0)
    async with pair(**options) as (sender, receiver):
        card.busy_then(fill(state, 7))
        await elsewhere(card, sender.send_checkpoint([], 1, state))
        if not options:  # what is enqueued from then on does not reach the checkpoint
            fill(state, 9)()
        assert filled_with(await receive(sender, receiver), 7)


@on_a_loop
async def test_a_save_has_what_the_callers_kernels_write(
    card: Card, tmp_path: Path
) -> None:
    """Two in a row, so that the second one waits and has a warm arena."""
    state = state_on(card, 0)
    async with checkpointer(card) as made:
        handles = []
        for step in (1, 2):
            card.busy_then(fill(state, step))
            handles.append(await made.save(state, tmp_path / str(step)))
        for step, handle in enumerate(handles, 1):
            assert await handle.written()
            assert filled_with(loaded(tmp_path / str(step)), step)


@on_a_loop
async def test_two_tasks_on_two_streams(card: Card) -> None:
    """Each send waits for its own task's stream."""
    async with pair() as (first, second), pair() as (one, two):

        async def run(sender: Any, receiver: Any, number: float) -> bool:
            with card.stream():
                state = state_on(card, 0)
                card.busy_then(fill(state, number))
                # The first step of the call runs on this stream.
                await sender.send_checkpoint([], 1, state)
            return filled_with(await receive(sender, receiver), number)

        assert all(await asyncio.gather(run(first, second, 3), run(one, two, 5)))


@on_a_loop
async def test_memory_that_is_used_again_at_once(card: Card) -> None:
    """The caller drops its state within the call, and the allocator gives it away."""
    async with pair() as (sender, receiver):
        for number in (1, 2, 3):
            state = state_on(card, number)
            card.busy_then(lambda: None)
            sending = asyncio.create_task(sender.send_checkpoint([], number, state))
            await asyncio.sleep(0)
            del state
            for _ in range(10):
                other = state_on(card, 9)
                await asyncio.sleep(0.005)
                del other
            await sending
            assert filled_with(await receive(sender, receiver, number), number)


@on_a_loop
async def test_a_cancel_in_the_middle_of_a_send(card: Card) -> None:
    """The next send is right, though the device may still copy for the last one."""
    state = state_on(card, 0)
    async with pair() as (sender, receiver):
        for delay in (0, 0.01, 0.04):
            card.busy_then(fill(state, 5))
            sending = asyncio.create_task(sender.send_checkpoint([], 1, state))
            await asyncio.sleep(delay)
            sending.cancel()
            await asyncio.wait({sending})
        card.busy_then(fill(state, 7))
        await sender.send_checkpoint([], 2, state)
        assert filled_with(await receive(sender, receiver, 2), 7)


@on_a_loop
async def test_a_graph_that_is_replayed(card: Card) -> None:
    """Its kernels are the caller's work, like others."""
    state = state_on(card, 0)
    replay = card.graphed(lambda: state["w"].add_(1))
    async with pair() as (sender, receiver):
        for step in (1, 2):
            card.busy_then(lambda: None)
            replay()
            await sender.send_checkpoint([], step, state)
            got = await receive(sender, receiver, step)
            assert got["w"].unique().tolist() == [step + 1]


# ------------------------------------------------------------ what fills a template


@pytest.mark.parametrize("how", HOW, ids=str)
@on_a_loop
async def test_a_template_is_filled_after_the_callers_kernels(
    card: Card, how: dict[str, Any]
) -> None:
    """They read what was there before."""
    async with pair(state=state_on(card, 1)) as (sender, receiver):
        template, seen = state_on(card, 0), list[torch.Tensor]()
        card.busy_then(lambda: seen.append(template["w"].clone()))
        got = await receive(sender, receiver, into=template, **how)
        assert got["w"] is template["w"]
        for name in ("w", "small"):
            assert template[name].unique().tolist() == [1]
        assert seen[0].unique().tolist() == [0]


@pytest.mark.parametrize("have", [None, True])
@pytest.mark.parametrize("blocks", [False, True], ids=["awaits", "blocks"])
@on_a_loop
async def test_a_prepared_step_is_applied_after_the_callers_kernels(
    card: Card, have: bool | None, *, blocks: bool
) -> None:
    """The apply waits for kernels that were enqueued during the prepare."""
    async with pair(state=state_on(card, 1)) as (sender, receiver):
        template, seen = state_on(card, 0), list[torch.Tensor]()
        prepared = await receiver.prepare(
            sender.metadata(), 1, into=template, have=have
        )
        card.busy_then(lambda: seen.append(template["w"].clone()))
        if blocks:
            prepared.apply()
        else:
            await prepared.apply_async()
        assert filled_with(template, 1)
        assert seen[0].unique().tolist() == [0]


@on_a_loop
async def test_a_cancel_in_the_middle_of_a_receive(card: Card) -> None:
    """The next one fills the template."""
    async with pair(state=state_on(card, 1)) as (sender, receiver):
        template = state_on(card, 0)
        for delay in (0, 0.01, 0.05):
            card.busy_then(lambda: None)
            call = receive(sender, receiver, into=template, direct=True)
            receiving = asyncio.create_task(call)
            del call
            await asyncio.sleep(delay)
            receiving.cancel()
            await asyncio.wait({receiving})
            del receiving
        await receive(sender, receiver, into=template, direct=True)
        assert filled_with(template, 1)


@on_a_loop
async def test_memory_that_its_owner_frees_before_a_step_is_applied(card: Card) -> None:
    """The apply refuses it, since the memory may be another tensor's by then."""
    async with pair(state=state_on(card, 1)) as (sender, receiver):
        template = state_on(card, 0)
        prepared = await receiver.prepare(sender.metadata(), 1, into=template)
        old = template["w"].data
        template["w"].data = torch.full((card.size,), 5.0, device=card.device)
        with pytest.raises(LocalProtocolError):
            prepared.apply()
        assert old.unique().tolist() == [0]
        assert template["w"].unique().tolist() == [5]


@pytest.mark.parametrize("into", [False, True], ids=["new tensors", "template"])
@on_a_loop
async def test_a_load_from_a_file(card: Card, tmp_path: Path, *, into: bool) -> None:
    """The load waits for the caller's kernels, and any stream may use new tensors."""
    path = save(tmp_path / "1", state_on(card, 1))
    if not into:
        found = load(path, map_location=str(card.device))
        assert found["w"].device == card.device
        assert filled_with(found, 1)
        return
    template, seen = state_on(card, 0), list[torch.Tensor]()
    async with checkpointer(card) as made:
        card.busy_then(lambda: seen.append(template["w"].clone()))
        await made.load(path, template)
    assert filled_with(template, 1)
    assert seen[0].unique().tolist() == [0]


# --------------------------------------------------------------- kinds of tensors


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16],
    ids=str,
)
@on_a_loop
async def test_small_floats(card: Card, dtype: torch.dtype) -> None:
    """Bit by bit, both ways; copies of floats may change what is not a number."""
    bits = torch.arange(256, dtype=torch.uint8, device=card.device).repeat(
        card.size // 256
    )
    state = {"w": bits.view(dtype)}
    template = {"w": torch.zeros_like(bits).view(dtype)}
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, into=template)
    assert torch.equal(template["w"].view(torch.uint8), bits)


@on_a_loop
async def test_many_small_tensors(card: Card) -> None:
    """Each of 4 KiB, to and from the device."""
    names = range(card.many)
    state = {f"w{n}": torch.full((1024,), float(n), device=card.device) for n in names}
    template = {name: torch.zeros_like(each) for name, each in state.items()}
    async with pair(state=state, chunk_bytes=MIB) as (sender, receiver):
        await receive(sender, receiver, into=template, direct=True)
    assert_same(template, state)


@on_a_loop
async def test_inference_tensors(card: Card) -> None:
    """PyTorch counts no writes to them."""
    with torch.inference_mode():
        state, template = state_on(card, 3), state_on(card, 0)
    async with pair(state=state) as (sender, receiver):
        await receive(sender, receiver, into=template, have=True)
        assert filled_with(template, 3)
        with torch.inference_mode():
            await sender.send_checkpoint([], 2, state)
            got = await receive(sender, receiver, 2, into=template, direct=True)
        assert filled_with(got, 3)


# -------------------------------------------------------------- page-locked memory


@on_a_loop
async def test_page_locked_memory_is_taken_back(card: Card) -> None:
    """A lock that stayed would make the driver take later memory there for locked."""
    port = card.ports(card.device)
    assert port is not None
    for _ in range(5):
        arena = Arena(8 * MIB)
        assert not card.is_locked(arena)
        arena.pin(port.pin)
        arena.pin(port.pin)
        assert card.is_locked(arena)
        arena.close()


@on_a_loop
async def test_arenas_that_are_trimmed_are_not_locked_any_more(card: Card) -> None:
    """Retracting a checkpoint gives back its memory; the next one is locked again."""
    async with pair() as (sender, receiver):
        for step in (1, 2, 3):
            await sender.send_checkpoint([], step, state_on(card, step))
            assert filled_with(await receive(sender, receiver, step), step)
            await sender.disallow_checkpoint()


# --------------------------------------------------------------------- a group


@pytest.mark.parametrize("direct", [False, True])
@on_a_loop
async def test_tensors_of_a_device_over_gloo(card: Card, *, direct: bool) -> None:
    """They pass through host memory at both ends."""
    state, template = state_on(card, 0), state_on(card, 0)
    seen = list[torch.Tensor]()
    async with transports() as (sender, receiver):
        card.busy_then(fill(state, 4))
        card.busy_then(lambda: seen.append(template["w"].clone()))
        await elsewhere(
            card, moved(sender, receiver, state, into=template, direct=direct)
        )
    assert filled_with(template, 4)
    assert seen[0].unique().tolist() == [0]
