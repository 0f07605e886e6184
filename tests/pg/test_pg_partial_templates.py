"""The template of a constructor: filled where it has a tensor's place, and no further.

A replica's optimizer has no state before its first step, so the template that it gives
lacks two thirds of the checkpoint that heals it.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import aiockpt
from aiockpt.errors import PeerFailedError
from aiockpt.testing import assert_same
from tests.support.groups import Transport, both, flip_bits, gloo_groups, moved

pytestmark = pytest.mark.asyncio

State = dict[str, Any]
HOST = torch.device("cpu")
MIB = 1 << 20


@dataclass
class Leaf:
    """A registered leaf that is made of a tensor."""

    tensor: torch.Tensor


aiockpt.register_leaf(Leaf, tag="tests.partial.Leaf")


async def healed(
    state: object, template: Callable[[], object], *, times: int = 1, **options: Any
) -> Any:
    """Move a state to a transport whose constructor was given a template."""
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending, timeout=20) as sender,
        Transport(receiving, 20, HOST, template) as receiver,
    ):
        for _ in range(times):
            got = await moved(sender, receiver, state, **options)
    return got


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


@pytest.mark.parametrize("direct", [False, True])
async def test_a_first_heal_with_adam(direct: bool) -> None:
    """The weights come to their places, the optimizer's state to new memory."""
    source, heir = trainer(3), trainer(0)
    state = state_of(*source)
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending, timeout=20) as sender,
        Transport(receiving, 20, HOST, lambda: state_of(*heir)) as receiver,
    ):
        got = await moved(sender, receiver, state, direct=direct)
        weights = heir[0].state_dict()
        assert_same(got, state)
        assert_same(weights, state["model"])
        for name, tensor in got["model"].items():
            assert tensor.data_ptr() == weights[name].data_ptr()

        heir[1].load_state_dict(got["optim"])
        moments = heir[1].state_dict()["state"][0]["exp_avg"]
        moments.zero_()
        got = await moved(sender, receiver, state, direct=direct)
        assert_same(moments, state["optim"]["state"][0]["exp_avg"])
        assert got["optim"]["state"][0]["exp_avg"] is moments


async def test_what_differs_gets_new_memory() -> None:
    """Another shape, dtype or stride; and what the template has beyond that stays."""
    state = {
        "same": torch.arange(6.0),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(4),
        "stride": torch.ones(3, 4),
        "tensor here, value there": torch.ones(2),
        "value": 7,
        "layers": [torch.ones(5), torch.ones(6)],
    }
    own: State = {
        "same": torch.zeros(6),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(4, dtype=torch.float64),
        "stride": torch.zeros(4, 3).t(),
        "tensor here, value there": 3,
        "value": torch.zeros(1),
        "layers": [torch.zeros(5)],
        "more": torch.zeros(9),
    }
    before = {**own, "layers": [*own["layers"]]}
    got = await healed(state, lambda: own)
    assert_same(got, state)
    assert got["same"] is own["same"]
    assert got["layers"][0] is before["layers"][0]
    for name in ("shape", "dtype", "stride", "more"):
        assert not before[name].any(), name


@pytest.mark.parametrize("tied_here", [False, True])
async def test_tensors_that_share_memory(tied_here: bool) -> None:
    """They are filled only where the same ones share memory in the template."""
    weight = torch.arange(12.0)
    state: State = {"a": weight, "b": weight, "tail": weight[8:], "c": torch.ones(3)}
    own: State = {"a": torch.zeros(12), "tail": torch.zeros(4), "c": torch.zeros(3)}
    own["b"] = own["a"] if tied_here else torch.zeros(12)
    if tied_here:
        own["tail"] = own["a"][8:]
    got = await healed(state, lambda: own)
    assert_same(got, state)
    assert got["a"] is got["b"]
    assert got["tail"].data_ptr() == got["a"][8:].data_ptr()
    assert got["c"] is own["c"]
    assert (got["a"] is own["a"]) == tied_here
    assert bool(own["a"].any()) == tied_here


async def test_memory_with_other_tensors_in_it_is_left_alone() -> None:
    """What the checkpoint does not have in the template's memory keeps its elements."""
    buffer = torch.zeros(20)
    own = {"even": buffer[::2], "odd": buffer[1::2], "c": torch.zeros(3)}
    state = {"even": torch.ones(20)[::2], "c": torch.ones(3)}
    got = await healed(state, lambda: own)
    assert_same(got, state)
    assert not buffer.any()
    assert got["c"] is own["c"]


async def test_a_model_that_has_no_memory_yet() -> None:
    """Tensors of the meta device are no place to receive into."""
    state = {"w": torch.ones(4), "b": torch.ones(2)}
    own = {"w": torch.empty(4, device="meta"), "b": torch.zeros(2)}
    got = await healed(state, lambda: own)
    assert_same(got, state)
    assert got["b"] is own["b"]


async def test_registered_leaves_of_a_template_are_made_anew() -> None:
    """They are values, and values never stand in the way of a heal."""
    state = {"leaf": Leaf(torch.ones(3)), "w": torch.ones(4)}
    own: State = {"leaf": Leaf(torch.zeros(3)), "w": torch.zeros(4)}
    got = await healed(state, lambda: own)
    assert torch.equal(got["leaf"].tensor, torch.ones(3))
    assert not own["leaf"].tensor.any()
    assert got["w"] is own["w"]


async def test_distributed_tensors() -> None:
    """The template's own where the layouts agree; others are made on a mesh here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group(
        "gloo",
        rank=0,
        world_size=1,
        store=distributed.HashStore(),  # type: ignore[attr-defined]
    )
    try:
        mesh = init_device_mesh("cpu", (1,))

        def made(fill: float, *shape: int) -> Any:
            return distribute_tensor(torch.full(shape, fill), mesh, [Shard(0)])

        state = {"w": made(1, 4, 2), "m": made(2, 4, 2), "x": made(3, 3)}
        own = {"w": made(0, 4, 2), "x": made(0, 5)}
        got = await healed(state, lambda: own)
        assert got["w"] is own["w"]
        for name, tensor in state.items():
            assert torch.equal(got[name].to_local(), tensor.to_local())
            assert got[name].placements == tensor.placements
        assert not own["x"].to_local().any()
    finally:
        distributed.destroy_process_group()


async def test_a_failure_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is filled before everything is verified; the next receive is well."""
    state = {"a": torch.ones(300_000), "b": torch.ones(300_000)}
    own = {"a": torch.zeros(300_000)}
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending, timeout=20) as sender,
        Transport(receiving, 20, HOST, lambda: own) as receiver,
    ):
        flip_bits(monkeypatch)
        sent, got = await both(sender, receiver, state)
        assert isinstance(sent, PeerFailedError)
        assert isinstance(got, aiockpt.IntegrityError)
        assert not own["a"].any()
        monkeypatch.undo()
        assert_same(await moved(sender, receiver, state), state)
        assert_same(own["a"], state["a"])


async def test_an_argument_must_fit_as_ever() -> None:
    """``into`` names the place of everything."""
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending, timeout=20) as sender,
        Transport(receiving, timeout=20) as receiver,
    ):
        sent, got = await both(
            sender, receiver, {"w": torch.ones(2), "m": torch.ones(2)}, into={"w": 1}
        )
        assert isinstance(sent, PeerFailedError)
        assert isinstance(got, aiockpt.TemplateMismatchError)


async def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the first path, so that a template that never fits is noticed."""
    caplog.set_level("INFO", "aiockpt")
    await healed({"a": torch.ones(2), "b": torch.ones(3)}, lambda: {"b": torch.ones(3)})
    assert "1 of 2 tensors get new memory" in caplog.text
    assert re.search(r"first a$", caplog.text, re.MULTILINE)


async def test_memory_for_what_the_template_has_is_given_back() -> None:
    """New tensors do not keep the pages that the template's bytes arrived in."""
    big, small = 192 * MIB, 16 * MIB
    own = {"w": torch.zeros(big, dtype=torch.uint8)}
    state = {
        "w": torch.ones(big, dtype=torch.uint8),
        "m": torch.ones(small, dtype=torch.uint8),
    }
    gc.collect()
    before = resident()
    got = await healed(state, lambda: own)
    gc.collect()
    await asyncio.sleep(0)
    assert got["w"] is own["w"]
    assert bool((got["w"] == 1).all())
    assert bool((got["m"] == 1).all())
    assert resident() - before < big / 2


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024
