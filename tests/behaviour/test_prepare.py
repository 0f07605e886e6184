"""``prepare`` receives beside a live template; ``apply`` copies it in, or nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from aiockpt import AiockptError, Prepared, StepNotFoundError
from aiockpt.errors import LocalProtocolError, TemplateMismatchError
from aiockpt.testing import assert_same
from tests.support.faultpeers import Hold, next_faults
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.transports import (
    MIB,
    arenas,
    pair,
    proxied,
    through,
    told,
    transport,
    weights_of,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking"),
]

CHUNKS = {"chunk_bytes": 256 << 10}


async def applied(prepared: Prepared[Any], how: str) -> Any:
    """Apply in one of the three ways."""
    if how == "async":
        return await prepared.apply_async()
    if how == "thread":
        return await asyncio.to_thread(prepared.apply)
    return prepared.apply()


@proves("cell HTTPTransport.prepare: success", "cell Prepared.apply_async: success")
@pytest.mark.parametrize("how", ["here", "thread", "async"])
@pytest.mark.parametrize("options", [{}, {"have": True}, {"have": weights_of(0)}])
async def test_a_template_changes_only_by_apply(
    how: str, options: dict[str, Any]
) -> None:
    """Its tensors keep their memory, and get all values at once.

    The event has the bytes that were copied, and the pause.
    """
    live: Any = weights_of(0)
    places = {name: each.data_ptr() for name, each in live.items()}
    async with pair(state=weights_of(1), **CHUNKS) as (sender, receiver):
        prepared = await receiver.prepare(sender.metadata(), 1, into=live, **options)
        await sender.disallow_checkpoint()
        assert prepared.step == 1
        assert_same(live, weights_of(0))
        if how != "async":  # what was prepared outlives its transport
            await receiver.shutdown()
        async with told() as events:
            assert await applied(prepared, how) is live
    [event] = [each for each in events if each.stop == "apply"]
    assert (event.step, event.nbytes) == (1, prepared.nbytes)
    assert event.seconds > 0
    assert_same(live, weights_of(1))
    assert places == {name: each.data_ptr() for name, each in live.items()}


async def test_values_are_put_in_with_the_tensors() -> None:
    """A step number beside the weights belongs to them."""
    live: Any = {"w": torch.zeros(MIB), "meta": {"step": 0}, "notes": "old"}
    inner = live["meta"]
    new = {"w": torch.ones(MIB), "meta": {"step": 5}, "notes": "new"}
    async with pair(state=new, step=5) as (sender, receiver):
        prepared = await receiver.prepare(sender.metadata(), into=live)
        assert (live["notes"], inner) == ("old", {"step": 0})
        prepared.apply()
    assert_same(live, new)
    assert live["meta"] is inner


async def test_unchanged_chunks_are_neither_fetched_nor_copied() -> None:
    """An adapter beside frozen weights costs the adapter."""
    live: Any = {"frozen": torch.arange(float(MIB)), "adapter": torch.zeros(1024)}
    new = {**live, "adapter": torch.ones(1024)}
    async with pair(state=new, same_host=False, **CHUNKS) as (sender, receiver):
        prepared = await receiver.prepare(sender.metadata(), 1, into=live, have=True)
        assert prepared.nbytes <= 2 * CHUNKS["chunk_bytes"]
        assert sender.statistics().bytes_sent < MIB
        prepared.apply()
    assert_same(live, new)


async def test_a_selection_can_be_prepared() -> None:
    """The other parts of the template stay."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(1), **CHUNKS) as (sender, receiver):
        prepared = await receiver.prepare(
            sender.metadata(), 1, into=live, select=["layer1"]
        )
        prepared.apply()
    assert_same(live, {**weights_of(0), "layer1": weights_of(1)["layer1"]})


async def test_a_follower_yields_prepared_steps() -> None:
    """The follower fetches only what each step has changed."""
    live: Any = weights_of(0)
    async with (
        transport(keep_base=True) as sender,
        transport(same_host=False) as receiver,
    ):
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        follower = receiver.follow(
            sender.metadata(), into=live, have=True, prepare=True
        )
        for step in range(1, 4):
            before = sender.statistics().bytes_sent
            prepared = await anext(follower)
            assert prepared.step == step
            assert_same(live, weights_of(step - 1))
            prepared.apply()
            assert_same(live, weights_of(step))
            if step > 1:
                assert sender.statistics().bytes_sent - before < MIB / 10
            await sender.send_checkpoint(step=step + 1, state_dict=weights_of(step + 1))
        skipped = await anext(follower)
        await sender.send_checkpoint(step=5, state_dict=weights_of(5))
        await anext(follower)
        with pytest.raises(LocalProtocolError, match="nothing to apply"):
            skipped.apply()
        await follower.aclose()
    assert_same(live, weights_of(3))


@pytest.mark.parametrize("how", ["here", "async"])
async def test_a_step_is_applied_once(how: str) -> None:
    """The second call is an error, and changes nothing."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(1)) as (sender, receiver):
        prepared = await receiver.prepare(sender.metadata(), 1, into=live)
        await applied(prepared, how)
        live["bias"].zero_()
        with pytest.raises(LocalProtocolError, match="nothing to apply"):
            await applied(prepared, how)
    assert not live["bias"].any()


@proves("cell Prepared.apply_async: error")
async def test_a_template_that_was_changed_meanwhile_is_refused() -> None:
    """Chunks that were found in it may be others now."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(0), **CHUNKS) as (sender, receiver):
        metadata = sender.metadata()
        first, second = [
            await receiver.prepare(metadata, 1, into=live, have=True) for _ in range(2)
        ]
        live["layer0"] += 1
        changed = {name: each.clone() for name, each in live.items()}
        with pytest.raises(LocalProtocolError, match="prepare the step again"):
            first.apply()
        assert_same(live, changed)
        again = await receiver.prepare(metadata, 1, into=live, have=True)
        again.apply()
        assert_same(live, weights_of(0))
        with pytest.raises(LocalProtocolError, match="prepare the step again"):
            await second.apply_async()


async def test_bytes_that_nobody_watches_are_copied() -> None:
    """PyTorch does not count the changes of tensors of inference mode."""
    with torch.inference_mode():
        live: Any = weights_of(0)
    async with pair(state=weights_of(0), **CHUNKS) as (sender, receiver):
        first = await receiver.prepare(sender.metadata(), 1, into=live, have=True)
        await sender.send_checkpoint(step=2, state_dict=weights_of(2))
        second = await receiver.prepare(sender.metadata(), 2, into=live, have=True)
        second.apply()
        first.apply()
        assert_same(live, weights_of(0))


@proves("invariant 8")
async def test_a_prepare_that_fails_leaves_no_trace() -> None:
    """A wrong step, another layout, a line that breaks, a cancel, a deadline."""
    live: Any = weights_of(0)
    async with (
        transport(**CHUNKS) as sender,
        transport(same_host=False, reconnect_timeout=0) as receiver,
        proxied(sender) as proxy,
    ):
        await sender.send_checkpoint(step=1, state_dict=weights_of(1))
        metadata, before = sender.metadata(), arenas()
        with pytest.raises(StepNotFoundError):
            await receiver.prepare(metadata, 0, into=live, timeout=30)
        with pytest.raises(TemplateMismatchError):
            await receiver.prepare(metadata, 1, into={"w": torch.zeros(2)})
        for count in (500, MIB // 2, MIB):
            hold = Hold(count)
            next_faults(proxy, *[hold] * 8)
            fetch = receiver.prepare(through(proxy, sender), 1, into=live, timeout=30)
            task = asyncio.create_task(fetch)
            await hold.reached.wait()
            proxy.refuse()
            await proxy.cut_all()
            with pytest.raises(AiockptError) as caught:
                await task
            assert "the template was not modified" in caught.value.__notes__
            await proxy.listen()
        for turns in range(1, 60, 7):
            task = asyncio.create_task(receiver.prepare(metadata, 1, into=live))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        with pytest.raises(TimeoutError):
            await receiver.prepare(metadata, 2, into=live, timeout=0.2)
        assert_same(live, weights_of(0))
        del task, caught
        gc.collect()
        assert arenas() <= before
        (await receiver.prepare(metadata, 1, into=live)).apply()
        assert_same(live, weights_of(1))


async def test_a_dropped_or_discarded_step_frees_its_memory() -> None:
    """Applied ones, too: nothing but the template is left."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(1), same_host=False) as (sender, receiver):
        before = arenas()
        for end in ("drop", "discard", "apply"):
            prepared = await receiver.prepare(sender.metadata(), 1, into=live)
            if end == "discard":
                prepared.discard()
                prepared.discard()
            elif end == "apply":
                prepared.apply()
            if end == "drop":
                del prepared
            await settle(lambda: arenas() <= before)
    template = weakref.ref(live["bias"])
    del live
    gc.collect()
    assert template() is None, "the last one, which was applied, keeps it"


async def test_two_threads_apply_a_step_once() -> None:
    """One of them copies, the other one gets the error."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(1)) as (sender, receiver):
        prepared = await receiver.prepare(sender.metadata(), 1, into=live)
        calls = [asyncio.to_thread(prepared.apply) for _ in range(4)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(each is live for each in found) == 1
    assert sum(isinstance(each, LocalProtocolError) for each in found) == 3
    assert_same(live, weights_of(1))


@proves("cell Prepared.apply_async: cancel")
async def test_a_cancelled_apply_is_whole_or_nothing() -> None:
    """The copy goes on to its end, and is done when the call ends."""
    live: Any = weights_of(0)
    async with pair(state=weights_of(1)) as (sender, receiver):
        for turns in itertools.count():
            step = await receiver.prepare(sender.metadata(), 1, into=live)
            task = asyncio.create_task(step.apply_async())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            applied = live["step"].item()
            assert_same(live, weights_of(applied))
            await asyncio.sleep(0.05)
            assert_same(live, weights_of(applied))
            if applied:
                break


async def test_a_template_is_required() -> None:
    """There is nothing to apply to without one."""
    async with transport() as receiver:
        with pytest.raises(ValueError, match="pass into="):
            receiver.follow("http://127.0.0.1:9/#t", prepare=True)  # type: ignore[call-overload]
