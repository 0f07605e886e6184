"""``recv_checkpoint`` from several transports that hold the same state dict."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt import IntegrityError, Progress
from aiockpt.errors import LocalProtocolError, TransferTimeoutError
from aiockpt.testing import StallAfter, assert_same, interrupted
from tests.support.proofs import proves
from tests.support.rangepeer import Lies
from tests.support.senders import MIB_SERVED, TOKEN, serving_process
from tests.support.transports import (
    MIB,
    Events,
    Halfway,
    Transport,
    proxied,
    through,
    transport,
    weights,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

STATE = {
    "model": {"w": torch.arange(300_000.0), "b": torch.ones(7)},
    "optimizer": {"m": torch.arange(200_000.0), "lr": 0.1},
    "step": 7,
}


@asynccontextmanager
async def senders(count: int, state: Any = STATE) -> AsyncIterator[list[Transport]]:
    """Offer the same state dict several times."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(transport()) for _ in range(count)]
        for sender in made:
            await sender.send_checkpoint([], 7, state)
        yield made


@asynccontextmanager
async def spoilt(sender: Transport, fault: Any) -> AsyncIterator[str]:
    """Give the metadata of a sender, all of whose connections have a fault."""
    async with proxied(sender, otherwise=fault) as proxy:
        yield through(proxy, sender)


def template() -> dict[str, Any]:
    """Return what can be filled, and is all zeros."""
    return {
        "model": {"w": torch.zeros(300_000), "b": torch.zeros(7)},
        "optimizer": {"m": torch.zeros(200_000), "lr": 0.0},
        "step": 0,
    }


def is_untouched(state: dict[str, Any]) -> bool:
    """Say whether a template is as it was."""
    tensors = (*state["model"].values(), state["optimizer"]["m"])
    return not any(tensor.any() for tensor in tensors)


@proves("cell HTTPTransport.recv_checkpoint, metadata=[...]: success")
async def test_it_arrives_anew_and_says_who_gave_what(events: Events) -> None:
    """Events and the progress of the whole say who gave what; duplicates count once."""
    seen: list[Progress] = []
    async with senders(2) as made, transport() as receiver:
        metadata = [each.metadata() for each in made]
        twice = [*metadata, metadata[0]]
        got = await receiver.recv_checkpoint(0, twice, 7, progress=seen.append)
    assert_same(got, STATE)
    assert seen[-1].bytes_done == seen[-1].bytes_total
    given = {e.peer: e.nbytes for e in events if e.stop == "fetch_chunk"}
    assert [*given] == [url.partition("#")[0] for url in metadata]
    assert sum(given.values()) == seen[-1].bytes_total
    (whole,) = [event for event in events if event.stop == "recv"]
    assert whole.peer == " ".join(given)
    tokens = [url.partition("#")[2] for url in metadata]
    assert not any(token in str(event) for event in events for token in tokens)


async def test_a_list_that_names_nobody() -> None:
    """An empty list, or one with other values, is the caller's mistake."""
    async with transport() as receiver:
        with pytest.raises(ValueError, match="empty"):
            await receiver.recv_checkpoint(0, [], 7)
        with pytest.raises(LocalProtocolError, match="bad metadata"):
            await receiver.recv_checkpoint(0, ["http://h:1/", "ftp://h/"], 7)


@pytest.mark.parametrize(("direct", "done"), [(False, "was not"), (True, "was")])
async def test_a_failure_says_what_became_of_the_template(
    direct: bool, done: str
) -> None:
    """Unless bytes are let in as they arrive, it is untouched."""
    async with (
        senders(2) as (one, other),
        spoilt(one, Lies()) as first,
        spoilt(other, Lies()) as second,
        transport() as receiver,
    ):
        into = template()
        with pytest.raises(IntegrityError) as caught:
            await receiver.recv_checkpoint(
                0, [first, second], 7, into=into, direct=direct
            )
    assert f"the template {done} modified" in caught.value.__notes__
    assert direct or is_untouched(into)


async def test_the_deadline_is_kept() -> None:
    """The deadline holds even if all sources fall silent in the middle."""
    stall = StallAfter(100_000)
    async with (
        senders(2) as (one, other),
        spoilt(one, stall) as first,
        spoilt(other, stall) as second,
        transport() as receiver,
    ):
        with pytest.raises(TransferTimeoutError) as caught:
            await receiver.recv_checkpoint(0, [first, second], 7, timeout=3)
        assert caught.value.stop == "fetch_chunk"


async def test_a_cancel_at_any_await_leaves_everything_usable() -> None:
    """The template is untouched or wholly filled, and the next receive works."""
    async with senders(2) as made, transport() as receiver:
        metadata = [each.metadata() for each in made]
        metadata.append("http://127.0.0.1:9/checkpoint/")
        at, reached = 0, True
        while reached:
            into = template()
            call = receiver.recv_checkpoint(0, metadata, 7, into=into)
            cut = await interrupted(call, at)
            reached = cut.reached
            assert cut.error is None
            if not is_untouched(into):
                into.update(optimizer=STATE["optimizer"], step=7)
                assert_same(into, STATE)
            at += 1 + at // 10
        assert_same(await receiver.recv_checkpoint(0, metadata, 7), STATE)


async def test_a_process_that_stands_still_in_the_middle() -> None:
    """The other two go on, and do not wait for it."""
    options = {"token": TOKEN, "stall_timeout": 120, "reconnect_timeout": 120}
    async with (
        transport(timeout=100, **options) as receiver,
        serving_process() as (victim, first),
        serving_process() as (_, second),
        serving_process() as (_, third),
    ):
        halfway = Halfway()
        call = receiver.recv_checkpoint(0, [first, second, third], 1, progress=halfway)
        receiving = asyncio.create_task(call)
        await halfway.reached.wait()
        victim.send_signal(signal.SIGSTOP)
        assert_same(await receiving, weights(mib=MIB_SERVED))
    assert halfway.seen[-1].bytes_done == MIB_SERVED * MIB
