"""Templates of a PGTransport: ``into=``, the constructor's, and what they may lack.

An optimizer has no state before its first step. A new replica's template therefore
lacks two thirds of the checkpoint that heals it.
"""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt import TemplateMismatchError
from aiockpt.errors import LocalProtocolError
from aiockpt.testing import assert_same
from tests.support.groups import (
    both,
    moved,
    transports,
)
from tests.support.memory import resident
from tests.support.mesh_ranks import as_rank
from tests.support.transports import weights

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking", "only_waits_left"),
]

State = dict[str, Any]
MIB = 1 << 20
COUNT = 40


@dataclass
class Leaf:
    """A registered leaf that is made of a tensor."""

    tensor: torch.Tensor


aiockpt.register_leaf(Leaf, tag="tests.partial.Leaf")


async def healed(state: object, own: object) -> Any:
    """Move a state to a transport whose constructor was given a template."""
    options = {"state_dict": lambda: own}
    async with transports(receiver=options) as (sender, receiver):
        return await moved(sender, receiver, state)


def trainer(steps: int) -> tuple[nn.Module, torch.optim.Adam]:
    """Make a model and its optimizer, and train them."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        adam.zero_grad()
        model(torch.ones(2, 40)).sum().backward()
        adam.step()
    return model, adam


def state_of(model: nn.Module, adam: torch.optim.Adam) -> State:
    """Return what torchft's example jobs send."""
    return {"model": model.state_dict(), "optim": adam.state_dict()}


async def test_a_first_heal_with_adam(caplog: pytest.LogCaptureFixture) -> None:
    """The weights come to their places, the optimizer's state to new memory."""
    caplog.set_level("INFO", "aiockpt")
    (model, adam), heir = trainer(3), trainer(0)
    state = state_of(model, adam)
    options = {"state_dict": lambda: state_of(*heir)}
    async with transports(receiver=options) as (sender, receiver):
        got = await moved(sender, receiver, state, direct=True)
        assert re.search(r"12 of 16 tensors get new memory.* optim", caplog.text)
        own = heir[0].state_dict()
        assert_same(got, state)
        for name, tensor in got["model"].items():
            assert tensor.data_ptr() == own[name].data_ptr()

        heir[1].load_state_dict(got["optim"])
        moments = heir[1].state_dict()["state"][0]["exp_avg"]
        moments.zero_()
        got = await moved(sender, receiver, state, direct=True)
        assert_same(moments, state["optim"]["state"][0]["exp_avg"])
        assert got["optim"]["state"][0]["exp_avg"] is moments
        other = {key: torch.zeros(4) for key in "ab"}  # ``into=`` comes before it
        assert (await moved(sender, receiver, {**other}, into=other))["a"] is other["a"]


def shared(tied: bool) -> State:
    """Return tensors that share memory, or that look as if they did."""
    one = torch.zeros(12)
    return {"a": one, "b": one if tied else one.clone(), "c": torch.zeros(3)}


BUFFER, OVERLAP = torch.zeros(27), torch.zeros(27)
FUSED, SENT = torch.zeros(3, 5), torch.ones(3, 5)
PARTIAL: dict[str, tuple[State, State, str]] = {
    # what the template has, what is sent, and the names that stay the template's
    "another shape": ({"w": torch.zeros(3, 2)}, {"w": torch.ones(2, 3)}, ""),
    "another dtype": ({"w": torch.zeros(4).double()}, {"w": torch.ones(4)}, ""),
    "another stride": ({"w": torch.zeros(4, 3).t()}, {"w": torch.ones(3, 4)}, ""),
    "a value there": ({"w": torch.zeros(1)}, {"w": 7}, ""),
    "a value here": ({"w": 3}, {"w": torch.ones(2)}, ""),
    "more here": (
        {"w": torch.zeros(2), "v": torch.zeros(9)},
        {"w": torch.ones(2)},
        "w",
    ),
    "a shorter list": (
        {"w": [torch.zeros(5)], "v": torch.zeros(2)},
        {"w": [torch.ones(5), torch.ones(6)], "v": torch.ones(2)},
        "v",
    ),
    "tied in both": (shared(True), shared(True), "abc"),
    "tied there only": (shared(False), shared(True), "c"),
    "other tensors between its elements": (
        {"w": BUFFER[::9], "v": BUFFER[1::9], "c": torch.zeros(3)},
        {"w": torch.ones(27)[::9], "c": torch.ones(3)},
        "wc",
    ),
    "other tensors in its memory": (
        {"w": OVERLAP[:12], "v": OVERLAP[11:], "c": torch.zeros(3)},
        {"w": torch.ones(12), "c": torch.ones(3)},
        "c",
    ),
    "a misfit in its memory": (
        {"w": OVERLAP[12:20], "v": OVERLAP[12:], "c": torch.zeros(3)},
        {"w": torch.ones(8), "v": torch.ones(15).double(), "c": torch.ones(3)},
        "c",
    ),
    "interleaved on both sides": (
        {"w": torch.zeros(4, 2)[:, 0], "v": torch.zeros(4, 2)[:, 1]},
        {"w": torch.ones(4, 2)[:, 0], "v": torch.ones(4, 2)[:, 1]},
        "wv",
    ),
    "columns of one buffer": (
        {"w": FUSED[:, :2], "v": FUSED[:, 2:]},
        {"w": SENT[:, :2], "v": SENT[:, 2:]},
        "wv",
    ),
    "no memory": (
        {"w": torch.empty(4, device="meta"), "b": torch.zeros(2)},
        {"w": torch.ones(4), "b": torch.ones(2)},
        "b",
    ),
}


@pytest.mark.parametrize("case", PARTIAL)
async def test_a_tensor_is_filled_only_where_its_place_is(case: str) -> None:
    """All other tensors get new memory, and the template's own stay unchanged."""
    own, state, kept = PARTIAL[case]
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(1)
    before = {**own}
    got = await healed(state, own)
    assert_same(got, state)
    for name, value in before.items():
        assert (got.get(name) is value) == (name in kept), name
        if isinstance(value, torch.Tensor) and not value.is_meta and name not in kept:
            assert not value.any()


async def test_leaves_and_distributed_tensors_of_a_template() -> None:
    """Leaves are made anew; a DTensor is filled where the layouts agree."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))

        def made(fill: float, *shape: int) -> Any:
            return distribute_tensor(torch.full(shape, fill), mesh, [Shard(0)])

        sent = {"w": made(1, 4, 2), "m": made(2, 4, 2), "x": made(3, 3)}
        own = {"w": made(0, 4, 2), "x": made(0, 5), "leaf": Leaf(torch.zeros(3))}
        leaf, whole, other = own["leaf"], own["w"], own["x"]
        got = await healed({**sent, "leaf": Leaf(torch.ones(3))}, own)
        assert got["w"] is whole
        for name, tensor in sent.items():
            assert torch.equal(got[name].to_local(), tensor.to_local())
            assert got[name].placements == tensor.placements
        assert not other.to_local().any()
        assert torch.equal(got["leaf"].tensor, torch.ones(3))
        assert not leaf.tensor.any()


async def test_memory_for_what_the_template_has_is_given_back() -> None:
    """New tensors do not keep the pages that the template's bytes arrived in."""
    big, small = 64 * MIB, 4 * MIB
    own = {"w": torch.zeros(big, dtype=torch.uint8)}
    state = {
        name: torch.ones(n, dtype=torch.uint8) for name, n in (("w", big), ("m", small))
    }
    gc.collect()
    before = resident("VmRSS")
    got = await healed(state, own)
    gc.collect()
    await asyncio.sleep(0)
    assert_same(got, state)
    assert resident("VmRSS") - before < big / 2


def row_of(fill: float) -> State:
    """Return a row of tensors, one of another dtype, and two that share memory."""
    row: State = {f"layer.{n}": torch.full((n + 1,), fill + n) for n in range(COUNT)}
    row["counter"] = torch.tensor(int(fill))
    row["view"] = row["layer.7"][2:]
    return row


def retype(state: State) -> None:
    """Give a tensor another dtype behind torch's back."""
    state["layer.4"].data = state["layer.4"].double()


def resize(state: State) -> None:
    """Give a tensor another shape, the object staying the same."""
    state["layer.5"].data = torch.zeros(2, 3)


def replace(state: State) -> None:
    """Free a tensor, and make one that may be at the same address."""
    del state["layer.9"]
    state["layer.9"] = torch.zeros(10)


CHANGES: dict[str, Callable[[State], object]] = {
    "tie": lambda state: state.update({"layer.3": state["layer.2"]}),
    "untie": lambda state: state.update({"view": state["view"].clone()}),
    "retype": retype,
    "resize": resize,
    "reorder": lambda state: state.update({"layer.0": state.pop("layer.0")}),
    "rename": lambda state: state.update({"renamed": state.pop("layer.1")}),
    "widen": lambda state: state.update({"layer.6": torch.zeros(14)[::2]}),
    "shift": lambda state: state.update({"view": state["layer.7"][1:-1]}),
    "require grad": lambda state: state["layer.8"].requires_grad_(),
    "replace": replace,
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_template_and_a_state_that_change_between_receives(change: str) -> None:
    """The predicted header is never wrong: either end looks at what there is."""
    state, into = row_of(1.0), row_of(0.0)
    async with transports() as (sender, receiver):
        for turn in range(2):
            got = await moved(sender, receiver, state, into=into, direct=bool(turn))
            assert [*got] == [*state]
            for name, tensor in got.items():
                assert tensor is into[name]
                assert torch.equal(tensor, state[name])
            if not turn:
                CHANGES[change](into)
                sent, got = await both(sender, receiver, state, into=into)
                if not isinstance(got, TemplateMismatchError):
                    assert sent is None
                    for name, tensor in into.items():
                        assert torch.equal(tensor.double(), state[name].double())
                CHANGES[change](state)
        assert_same(into, state)


async def test_two_senders_and_one_receiver() -> None:
    """The receiver does not take the layout of one for that of the other."""
    async with transports(3) as (receiver, one, other):
        states = [row_of(1.0), {"w": torch.ones(5), **row_of(2.0)}]
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
        state, into = weights(1.0), weights(0.0)
        await moved(sender, receiver, state, into=into)
        gone = [weakref.ref(each["w0"]) for each in (state, into)]
        del state, into
        async with asyncio.timeout(20):  # a thread holds its result for a moment
            while any(each() is not None for each in gone):
                gc.collect()
                await asyncio.sleep(0)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", ["a", "z"])
async def test_a_template_that_changes_meanwhile(direct: bool, name: str) -> None:
    """No tensor is filled, whether its bytes go straight or are copied in the end."""
    own = {"a": torch.zeros(27)[::9], "z": torch.zeros(6)}

    def changed(progress: Any) -> None:
        if progress.stop == "rebuild":
            own[name].data = own[name].data[:1]

    state = {"a": torch.ones(27)[::9], "z": torch.ones(6)}
    options = {"state_dict": lambda: own}
    async with transports(receiver=options) as (sender, receiver):
        _, got = await both(sender, receiver, state, direct=direct, progress=changed)
    assert isinstance(got, LocalProtocolError)
    assert str(got).startswith(f"{name} ")
    if not direct:
        assert not any(each.any() for each in own.values())
