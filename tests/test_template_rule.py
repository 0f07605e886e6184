"""One rule for templates: ``into=`` and ``load`` leave the checkpoint in them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import AiockptError, IntegrityError, make_async_checkpointer
from aiockpt.errors import MissingKeysError
from aiockpt.testing import assert_same
from tests.support.groups import moved, transports
from tests.support.saved import flip, load, save
from tests.support.transports import (
    MIB,
    HoldBack,
    pair,
    proxied,
    receive,
    through,
    transport,
    weights,
)

State = dict[str, Any]
Fill = Callable[[Any, Any, Path], Awaitable[Any]]


def state_of(fill: float) -> State:
    """Return a state dict as a trainer has it: tensors and plain values."""
    row = {f"w{n}": torch.full((n + 1,), fill) for n in range(20)}
    layers: OrderedDict[str, Any] = OrderedDict(a=torch.full((3,), fill))
    layers._metadata = {"": {"version": int(fill)}}  # type: ignore[attr-defined]
    return {
        "model": row,
        "layers": layers,
        "optimizer": {
            "state": {0: {"step": int(fill), "exp_avg": torch.full((4,), fill)}},
            "param_groups": [{"lr": fill / 10, "params": [0, 1], "name": f"g{fill}"}],
        },
        "betas": (fill, 0.5),
        "pair": (torch.full((2,), fill), {"epoch": int(fill)}),
        "window": deque([fill, torch.full((2,), fill)], 8),
        "seen": {int(fill)},
        "history": [fill] * 3,
        "note": f"step {fill}",
        "nothing": None,
    }


async def over_http(state: Any, template: Any, _: Path) -> Any:
    """Receive into the template."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template)


async def over_http_directly(state: Any, template: Any, _: Path) -> Any:
    """Receive into the template's memory."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template, direct=True)


async def selected(state: Any, template: Any, _: Path) -> Any:
    """Receive all that is selected, which is everything."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template, select=[""])


async def what_differs(state: Any, template: Any, _: Path) -> Any:
    """Receive the chunks that the template has not got yet."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template, have=True)


async def over_a_group(state: Any, template: Any, _: Path) -> Any:
    """Receive from another rank."""
    async with transports() as (sender, receiver):
        return await moved(sender, receiver, state, into=template)


async def over_a_group_directly(state: Any, template: Any, _: Path) -> Any:
    """Receive from another rank into the template's memory."""
    async with transports() as (sender, receiver):
        return await moved(sender, receiver, state, into=template, direct=True)


async def loaded(state: Any, template: Any, path: Path) -> Any:
    """Load a file."""
    return load(save(path / "s", state), template)


async def loaded_strictly(state: Any, template: Any, path: Path) -> Any:
    """Load a file in which nothing may be missing."""
    return load(save(path / "s", state), template, strict=True)


async def loaded_selected(state: Any, template: Any, path: Path) -> Any:
    """Load all that is selected, which is everything."""
    return load(save(path / "s", state), template, select=[""])


async def loaded_mapped(state: Any, template: Any, path: Path) -> Any:
    """Load a mapped file."""
    return load(save(path / "s", state), template, mmap=True)


async def loaded_in_the_background(state: Any, template: Any, path: Path) -> Any:
    """Load a file from a coroutine."""
    saved = save(path / "s", state)
    async with make_async_checkpointer() as checkpointer:
        return await checkpointer.load(saved, template)


WAYS: tuple[Fill, ...] = (
    over_http,
    over_http_directly,
    selected,
    what_differs,
    over_a_group,
    over_a_group_directly,
    loaded,
    loaded_strictly,
    loaded_selected,
    loaded_mapped,
    loaded_in_the_background,
)
WHOLE = (over_http, over_http_directly, what_differs, over_a_group)
pytestmark = pytest.mark.asyncio


def containers(value: Any) -> list[int]:
    """Return the identities of all dicts and lists, and of all tensors."""
    found = [id(value)] if isinstance(value, dict | list | torch.Tensor) else []
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | deque):
        for each in value:
            found += containers(each)
    return found


@pytest.mark.parametrize("fill", WAYS)
async def test_the_template_is_the_checkpoint_afterwards(
    fill: Fill, tmp_path: Path
) -> None:
    """Its own tensors, dicts and lists have what the checkpoint has."""
    template, sent = state_of(1.0), state_of(2.0)
    if fill not in WHOLE:  # loads leave the attributes of an OrderedDict alone
        template["layers"]._metadata = sent["layers"]._metadata
    before = containers(template)
    got = await fill(sent, template, tmp_path)
    assert got is template
    assert containers(template) == before
    assert_same(template, sent)


@pytest.mark.parametrize("fill", WAYS)
async def test_a_tuple_at_the_top_is_made_anew(fill: Fill, tmp_path: Path) -> None:
    """It cannot change, but the tensors and dicts in it are the template's."""
    template, sent = (state_of(1.0)["model"], 1.5), (state_of(2.0)["model"], 2.5)
    got = await fill(sent, template, tmp_path)
    assert_same(got, sent)
    assert got[0] is template[0]
    assert template[1] == 1.5


@pytest.mark.parametrize("fill", WAYS)
async def test_a_shared_container_stays_shared(fill: Fill, tmp_path: Path) -> None:
    """Both of its places have the new values."""
    groups: list[Any] = [{"lr": 0.1}]
    template = {"a": groups, "b": {"again": groups}, "w": torch.zeros(2)}
    sent = {"a": [{"lr": 0.2}], "b": {"again": [{"lr": 0.2}]}, "w": torch.ones(2)}
    got = await fill(sent, template, tmp_path)
    assert got["a"] is got["b"]["again"] is groups
    assert groups == [{"lr": 0.2}]


@pytest.mark.parametrize("fill", WAYS)
async def test_the_order_of_keys_does_not_matter(fill: Fill, tmp_path: Path) -> None:
    """A value is found by its key, also where the checkpoint has the same objects."""
    template = {"w": torch.zeros(2), "group": {"epoch": 1, "step": 2, "done": False}}
    sent = {"w": torch.ones(2), "group": {"step": 1, "epoch": 2, "done": False}}
    got = await fill(sent, template, tmp_path)
    assert got is template
    assert got["group"] == {"step": 1, "epoch": 2, "done": False}


@pytest.mark.parametrize("fill", WAYS)
async def test_what_the_checkpoint_lacks_stays(fill: Fill, tmp_path: Path) -> None:
    """A plain value of the template's own."""
    template = {"w": torch.zeros(2), "mine": {"rank": 3}, "n": 1}
    if fill is loaded_strictly:
        with pytest.raises(MissingKeysError, match="mine"):
            await fill({"w": torch.ones(2), "n": 2}, template, tmp_path)
        assert_same(template, {"w": torch.zeros(2), "mine": {"rank": 3}, "n": 1})
        return
    if fill is selected:
        return  # it was asked for: `test_selecting` has that
    await fill({"w": torch.ones(2), "n": 2}, template, tmp_path)
    assert_same(template, {"w": torch.ones(2), "mine": {"rank": 3}, "n": 2})


@pytest.mark.parametrize("fill", WHOLE)
async def test_a_receive_adds_what_the_template_lacks(
    fill: Fill, tmp_path: Path
) -> None:
    """As far as it is plain; a load reads the template's keys only."""
    template = {"w": torch.zeros(2), "in": {"b": 1}}
    sent = {"w": torch.ones(2), "in": {"b": 2, "c": (3,)}, "n": [1, 2]}
    got = await fill(sent, template, tmp_path)
    assert got is template
    assert_same(got, sent)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_plain_changes_if_a_receive_ends_in_its_middle(
    *, direct: bool, cancelled: bool
) -> None:
    """By a failure or a cancellation, also where tensors are received into directly."""
    fault = HoldBack(4 * MIB)
    template = {**weights(0.0, mib=8), "step": 1, "groups": [{"lr": 0.1}]}
    async with (
        transport() as sender,
        transport(connections=1, reconnect_timeout=0) as receiver,
        proxied(sender, otherwise=fault) as proxy,
    ):
        sent = {**weights(mib=8), "step": 2, "groups": [{"lr": 0.2}]}
        await sender.send_checkpoint([], 1, sent)
        metadata = through(proxy, sender)
        task = asyncio.create_task(
            receiver.recv_checkpoint(0, metadata, 1, into=template, direct=direct)
        )
        async with asyncio.timeout(10):
            await fault.closed.wait()
        if cancelled:
            task.cancel()
        else:
            await sender.shutdown(wait=False)
            fault.gate.set()
        with pytest.raises((AiockptError, asyncio.CancelledError)):
            await task
    assert template["step"] == 1
    assert template["groups"] == [{"lr": 0.1}]
    assert direct or not template["w0"].any()


@pytest.mark.parametrize("mapped", [False, True])
async def test_nothing_plain_changes_if_a_load_fails(
    tmp_path: Path, *, mapped: bool
) -> None:
    """The values are put in their places when all tensors are verified."""
    sent = {"step": 2, "groups": [{"lr": 0.2}], "w": torch.ones(100_000)}
    path = save(tmp_path / "s", sent)
    flip(path / "checkpoint_0.safetensors", -1)
    template = {"step": 1, "groups": [{"lr": 0.1}], "w": torch.zeros(100_000)}
    with pytest.raises(IntegrityError):
        load(path, template, mmap=mapped)
    assert template["step"] == 1
    assert template["groups"] == [{"lr": 0.1}]
