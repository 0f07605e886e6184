"""Named tuples and pytree nodes: they travel as structure, and are filled in place."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from aiockpt import TemplateMismatchError, register_leaf
from aiockpt.checkpointers import CheckpointStagerConfig, DefaultStager
from aiockpt.errors import RemoteProtocolError
from aiockpt.testing import assert_same
from tests.support.groups import moved, transports
from tests.support.saved import load, save
from tests.support.transports import pair, receive

Moments = namedtuple("Moments", ["mean", "square"])


class Known(NamedTuple):
    """A named tuple that is registered."""

    step: int
    weight: torch.Tensor


register_leaf(Known, tag="tests.Known")


class Unknown(NamedTuple):
    """A named tuple that nobody has registered."""

    step: int
    weight: torch.Tensor
    below: Any


class Bag:
    """A pytree node, with a context that is data."""

    def __init__(self, tensors: dict[str, Any], note: str) -> None:
        self.tensors, self.note = tensors, note


_pytree.register_pytree_node(
    Bag,
    lambda bag: ([*bag.tensors.values()], ([*bag.tensors], bag.note)),
    lambda values, context: Bag(dict(zip(context[0], values, strict=True)), context[1]),
    serialized_type_name="tests.Bag",
)


class Output(dict[str, Any]):
    """A pytree node that is a dict, as transformers' ``ModelOutput`` is."""


_pytree.register_pytree_node(
    Output,
    lambda output: ([*output.values()], [*output]),
    lambda values, context: Output(zip(context, values, strict=True)),
    serialized_type_name="tests.Output",
)

Fill = Callable[[Any, Any, Path], Awaitable[Any]]


def state_of(fill: float) -> dict[str, Any]:
    """Return one of each kind, also in each other."""
    weight = torch.full((3,), fill)
    return {
        "known": Known(int(fill), torch.full((2,), fill)),
        "unknown": Unknown(int(fill), weight, Moments(weight, fill)),
        "bag": Bag({"a": torch.full((4,), fill), "b": fill}, f"note {fill}"),
        "max": torch.max(torch.full((2, 2), fill), 0),
        "list": [Known(7, torch.full((1,), fill))],
    }


def facts(state: dict[str, Any]) -> Any:
    """Return a state's values without its types."""
    bag, most = state["bag"], state["max"]
    return {
        "known": [*state["known"]],
        "unknown": [*state["unknown"][:2], *state["unknown"].below],
        "bag": {**bag.tensors, "note": bag.note},
        "max": [*most],
        "list": [*state["list"][0]],
    }


def tensors(state: dict[str, Any]) -> list[int]:
    """Return the identities of a state's tensors."""
    found = [each for group in facts(state).values() for each in _values(group)]
    return [id(each) for each in found if isinstance(each, torch.Tensor)]


def _values(group: Any) -> list[Any]:
    return [*group.values()] if isinstance(group, dict) else [*group]


async def over_http(state: Any, template: Any, _: Path) -> Any:
    """Receive into a template."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template)


async def directly(state: Any, template: Any, _: Path) -> Any:
    """Receive into a template's memory."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template, direct=True)


async def selected(state: Any, template: Any, _: Path) -> Any:
    """Receive what is selected."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, state)
        return await receive(sender, receiver, into=template, select=[*template])


async def over_a_group(state: Any, template: Any, _: Path) -> Any:
    """Receive from another rank."""
    async with transports() as (sender, receiver):
        return await moved(sender, receiver, state, into=template)


async def loaded(state: Any, template: Any, path: Path) -> Any:
    """Load a file."""
    return load(save(path / "s", state), template)


@pytest.mark.asyncio
@pytest.mark.parametrize("fill", [over_http, directly, selected, over_a_group, loaded])
async def test_a_template_is_filled(fill: Fill, tmp_path: Path) -> None:
    """Its tensors are its own, in values of its own types."""
    template, sent = state_of(1.0), state_of(2.0)
    before = tensors(template)
    got = await fill(sent, template, tmp_path)
    assert got is template
    assert {key: type(each) for key, each in got.items()} == {
        key: type(each) for key, each in sent.items()
    }
    assert type(got["unknown"].below) is Moments
    assert_same(facts(got), facts(sent))
    assert tensors(got) == before


@pytest.mark.asyncio
@pytest.mark.parametrize("fill", [over_http, directly, selected, over_a_group, loaded])
async def test_a_node_that_is_a_dict_is_filled(fill: Fill, tmp_path: Path) -> None:
    """It is a node and no dict of the state dict's, also in another one."""
    weight = torch.zeros(3)
    template = {"x": Output(a=weight, b=Output(c=1))}
    sent = {"x": Output(a=torch.ones(3), b=Output(c=2))}
    got = await fill(sent, template, tmp_path)
    assert type(got["x"]) is type(got["x"]["b"]) is Output
    assert got["x"]["a"] is weight
    assert_same(
        {**got["x"], "b": {**got["x"]["b"]}}, {"a": torch.ones(3), "b": {"c": 2}}
    )


def lazy_node(number: int) -> Any:
    """Return a node that makes its only child, a named tuple, when it is asked."""
    make: Any = namedtuple
    child = make(f"Child{number}", ["value", "half"])

    class Lazy:
        def __init__(self, value: float) -> None:
            self.value = value

    Lazy.__qualname__ = f"Lazy{number}"
    _pytree.register_pytree_node(
        Lazy,
        lambda node: ([child(node.value, 0.5)], None),
        lambda values, _: Lazy(next(iter(values)).value),
        serialized_type_name=f"tests.Lazy{number}",
    )
    return Lazy


@pytest.mark.asyncio
async def test_nodes_may_make_their_children_when_they_are_asked() -> None:
    """The type of each child is found, also where one has the place of another."""
    nodes = {f"n{number}": lazy_node(number) for number in range(100)}
    template = {name: node(1.0) for name, node in nodes.items()}
    sent = {name: node(2.0) for name, node in nodes.items()}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        got = await receive(sender, receiver, into=template)
    assert {name: node.value for name, node in got.items()} == dict.fromkeys(nodes, 2.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("select", [None, ["known", "list", "max"]])
async def test_what_is_registered_comes_without_a_template(
    tmp_path: Path, select: list[str] | None
) -> None:
    """And what torch returns, which every process knows."""
    sent = {key: state_of(2.0)[key] for key in ("known", "list", "max")}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        found = [await receive(sender, receiver, select=select)]
    found.append(load(save(tmp_path / "s", sent), select=select))
    for got in found:
        assert_same({**got, "max": [*got["max"]]}, {**sent, "max": [*sent["max"]]})
        assert type(got["max"]) is torch.return_types.max


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["unknown", "bag"])
async def test_others_need_a_template_or_a_registration(
    key: str, tmp_path: Path
) -> None:
    """The error says so, and names the type and the path."""
    sent = {key: state_of(2.0)[key]}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        with pytest.raises(RemoteProtocolError, match=rf"{key}.*template"):
            await receive(sender, receiver)
    with pytest.raises(RemoteProtocolError, match=rf"{key}.*register_leaf"):
        load(save(tmp_path / "s", sent))


@pytest.mark.asyncio
async def test_a_template_of_other_fields_is_untouched() -> None:
    """A tensor that one of them lacks is a mismatch, as in a dict."""
    Other = namedtuple("Other", ["mean"])
    template = {"x": Other(torch.zeros(2)), "y": Moments(torch.zeros(1), 0)}
    sent = {"x": Moments(torch.ones(2), torch.ones(2)), "y": Moments(torch.ones(1), 1)}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        with pytest.raises(TemplateMismatchError):
            await receive(sender, receiver, into=template)
    assert not template["x"][0].any()


@pytest.mark.asyncio
async def test_a_staged_state_has_the_types_of_what_was_staged() -> None:
    """Nobody else needs to know them."""
    stager = DefaultStager(CheckpointStagerConfig())
    sent = state_of(2.0)
    staged = await stager.stage(sent)
    with staged:
        got = staged.state_dict()
        assert type(got["unknown"].below) is Moments
        assert_same(facts(got), facts(sent))
    await stager.close()
