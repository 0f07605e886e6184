"""PGTransport knows the header that a template expects, and is never wrong about it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt import TemplateMismatchError
from aiockpt.testing import assert_same
from tests.support.groups import both, moved, transports

pytestmark = pytest.mark.asyncio

State = dict[str, Any]
COUNT = 40


def state_of(fill: float) -> State:
    """Return a row of tensors, one of another dtype, and two that share memory."""
    row: State = {f"layer.{n}": torch.full((n + 1,), fill + n) for n in range(COUNT)}
    row["counter"] = torch.tensor(int(fill))
    row["view"] = row["layer.7"][2:]
    return row


def tie(state: State) -> None:
    """Let two names share a tensor."""
    state["layer.3"] = state["layer.2"]


def untie(state: State) -> None:
    """Give the view memory of its own."""
    state["view"] = state["view"].clone()


def retype(state: State) -> None:
    """Give a tensor another dtype behind torch's back."""
    state["layer.4"].data = state["layer.4"].double()


def resize(state: State) -> None:
    """Give a tensor another shape, the object staying the same."""
    state["layer.5"].data = torch.zeros(2, 3)


def reorder(state: State) -> None:
    """Let a key come last."""
    state["layer.0"] = state.pop("layer.0")


def rename(state: State) -> None:
    """Call a tensor by another name."""
    state["renamed"] = state.pop("layer.1")


def widen(state: State) -> None:
    """Put a tensor whose elements lie apart in another one's place."""
    state["layer.6"] = torch.zeros(14)[::2]


def shift(state: State) -> None:
    """Let the view begin elsewhere."""
    state["view"] = state["layer.7"][1:-1]


def require_grad(state: State) -> None:
    """Let autograd follow a tensor."""
    state["layer.8"].requires_grad_()


def replace(state: State) -> None:
    """Free a tensor, and make one that may be at the same address."""
    shape = state["layer.9"].shape
    del state["layer.9"]
    state["layer.9"] = torch.zeros(shape)


CHANGES = (tie, untie, retype, resize, reorder, rename, widen, shift, require_grad)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("change", [*CHANGES, replace])
async def test_a_template_and_a_state_that_change_between_receives(
    change: Callable[[State], None], direct: bool
) -> None:
    """Either end looks at what there is, each time."""
    state, into = state_of(1.0), state_of(0.0)
    async with transports() as (sender, receiver):
        for turn in range(2):
            got = await moved(sender, receiver, state, into=into, direct=direct)
            assert [*got] == [*state]
            for name, tensor in got.items():
                assert tensor is into[name]
                assert torch.equal(tensor, state[name])
            if not turn:
                change(into)
                await _differs(sender, receiver, state, into)
                change(state)
        assert_same(into, state)


async def _differs(sender: Any, receiver: Any, state: State, into: State) -> None:
    """Receive into a template that has changed alone: it fits as ever, or does not."""
    sent, got = await both(sender, receiver, state, into=into)
    if isinstance(got, TemplateMismatchError):
        assert sent is not None
        return
    assert sent is None
    for name, tensor in into.items():
        assert torch.equal(tensor.double(), state[name].double())


async def test_two_senders_and_one_receiver() -> None:
    """Each has a layout of its own, and none is taken for the other's."""
    async with transports(3) as (receiver, one, other):
        states = [state_of(1.0), {"w": torch.ones(5), **state_of(2.0)}]
        for _ in range(2):
            templates = [{k: torch.zeros_like(v) for k, v in s.items()} for s in states]
            for each in templates:
                each["view"] = each["layer.7"][2:]
            await asyncio.gather(
                one.send_checkpoint([0], 1, states[0]),
                other.send_checkpoint([0], 1, states[1]),
                receiver.recv_checkpoint(1, "", 1, into=templates[0]),
                receiver.recv_checkpoint(2, "", 1, into=templates[1]),
            )
            assert_same(templates, states)
            states.reverse()


async def test_nothing_is_kept_alive() -> None:
    """Neither end knows a state dict after its call."""
    async with transports() as (sender, receiver):
        state, into = state_of(1.0), state_of(0.0)
        await moved(sender, receiver, state, into=into)
        gone = [weakref.ref(each["layer.7"]) for each in (state, into)]
        del state, into
        async with asyncio.timeout(20):  # a thread holds its result for a moment
            while any(each() is not None for each in gone):
                gc.collect()
                await asyncio.sleep(0)
