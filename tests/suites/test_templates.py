"""One rule for templates: ``into=`` and ``load`` leave the checkpoint in them.

Over HTTP, over a process group, and from a file; whole and selected.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque, namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from aiockpt import (
    AiockptError,
    CheckpointerConfig,
    IntegrityError,
    TemplateMismatchError,
    make_async_checkpointer,
    register_leaf,
)
from aiockpt.checkpointers import CheckpointStagerConfig, DefaultStager
from aiockpt.errors import (
    RemoteProtocolError,
    UnsupportedLeafError,
)
from aiockpt.testing import assert_same
from tests.support.groups import both, transports
from tests.support.saving import flip, load, save
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

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, Any]
pytestmark = pytest.mark.asyncio

WAYS: dict[str, dict[str, Any]] = {
    "http": {},
    "http, direct": {"direct": True},
    "http, selected": {"select": [""]},
    "http, what differs": {"have": True},
    "group": {},
    "group, direct": {"direct": True},
    "load": {},
    "load, strict": {"strict": True},
    "load, selected": {"select": [""]},
    "load, mapped": {"mmap": True},
    "async load": {},
}
ANY = pytest.mark.parametrize("way", WAYS)
WHOLE = ("http", "http, direct", "http, what differs", "group", "group, direct")
"""Those that add to a template what it lacks."""


async def fill(way: str, state: Any, template: Any, path: Path) -> Any:
    """Bring a state dict into a template; return what the call returns."""
    options = WAYS[way]
    if way.startswith("group"):
        async with transports() as (sender, receiver):
            sent, got = await both(sender, receiver, state, into=template, **options)
        if isinstance(got, BaseException):
            raise got
        assert sent is None, sent
        return got
    if way.startswith("http"):
        async with pair() as (sender, receiver):
            await sender.send_checkpoint([], 1, state)
            return await receive(sender, receiver, into=template, **options)
    saved = save(path / "s", state)
    if way == "async load":
        config = CheckpointerConfig(use_process=False)  # no process loads anyway
        async with make_async_checkpointer(config) as checkpointer:
            return await checkpointer.load(saved, template)
    return load(saved, template, **options)


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
        "pair": (torch.full((2,), fill), {"epoch": int(fill)}),
        "window": deque([fill, torch.full((2,), fill)], 8),
        "seen": {int(fill)},
        "history": [fill] * 3,
        "nothing": None,
    }


def containers(value: Any) -> list[int]:
    """Return the identities of all dicts and lists, and of all tensors."""
    found = [id(value)] if isinstance(value, dict | list | torch.Tensor) else []
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | deque):
        for each in value:
            found += containers(each)
    return found


@ANY
async def test_the_template_is_the_checkpoint_afterwards(
    way: str, tmp_path: Path
) -> None:
    """Its own tensors, dicts and lists have what the checkpoint has."""
    template, sent = state_of(1.0), state_of(2.0)
    if way not in WHOLE:  # the others leave the attributes of an OrderedDict alone
        template["layers"]._metadata = sent["layers"]._metadata
    before = containers(template)
    got = await fill(way, sent, template, tmp_path)
    assert got is template
    assert containers(template) == before
    assert_same(template, sent)


@ANY
async def test_a_tuple_at_the_top_is_made_anew(way: str, tmp_path: Path) -> None:
    """It cannot change, but the tensors and dicts in it are the template's."""
    template, sent = (state_of(1.0)["model"], 1.5), (state_of(2.0)["model"], 2.5)
    got = await fill(way, sent, template, tmp_path)
    assert_same(got, sent)
    assert got[0] is template[0]
    assert template[1] == 1.5


@ANY
async def test_places_are_found_by_key(way: str, tmp_path: Path) -> None:
    """The order of keys does not matter, nor whether a container is shared."""
    groups: list[Any] = [{"lr": 0.1, "epoch": 1, "done": False}]
    template: State = {"a": groups, "b": {"again": groups}, "w": torch.zeros(2)}
    new = {"epoch": 2, "done": False, "lr": 0.2}
    sent: State = {"b": {"again": [{**new}]}, "w": torch.ones(2), "a": [{**new}]}
    got = await fill(way, sent, template, tmp_path)
    assert got is template
    assert got["a"] is got["b"]["again"] is groups
    assert groups == [new]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_plain_changes_if_a_receive_ends_in_its_middle(
    *, direct: bool, cancelled: bool
) -> None:
    """The receive fails or is cancelled, also with ``direct=True``."""
    fault = HoldBack(MIB)
    template = {**weights(0.0, mib=2), "step": 1, "groups": [{"lr": 0.1}]}
    async with (
        transport() as sender,
        transport(connections=1, reconnect_timeout=0) as receiver,
        proxied(sender, otherwise=fault) as proxy,
    ):
        sent = {**weights(mib=2), "step": 2, "groups": [{"lr": 0.2}]}
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


def nodes_of(fill: float) -> dict[str, Any]:
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


def identities(state: dict[str, Any]) -> list[int]:
    """Return the identities of a state's tensors."""
    found = [each for group in facts(state).values() for each in values_of(group)]
    return [id(each) for each in found if isinstance(each, torch.Tensor)]


def values_of(group: Any) -> list[Any]:
    """Return a state dict of one node of each kind, also in each other."""
    return [*group.values()] if isinstance(group, dict) else [*group]


@ANY
async def test_nodes_of_a_template_are_filled(way: str, tmp_path: Path) -> None:
    """Named tuples and pytree nodes keep their types, and their tensors are its own."""
    template, sent = nodes_of(1.0), nodes_of(2.0)
    weight = torch.zeros(3)
    template["node"] = Output(a=weight, b=Output(c=1))
    sent["node"] = Output(a=torch.ones(3), b=Output(c=2))  # it is a dict as well
    before = identities(template)
    got = await fill(way, sent, template, tmp_path)
    assert got is template
    assert {key: type(each) for key, each in got.items()} == {
        key: type(each) for key, each in sent.items()
    }
    assert type(got["unknown"].below) is Moments
    assert_same(facts(got), facts(sent))
    assert identities(template) == before
    node = got["node"]
    assert type(node["b"]) is Output
    assert node["a"] is weight
    assert_same({**node, "b": {**node["b"]}}, {"a": torch.ones(3), "b": {"c": 2}})


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


async def test_nodes_may_make_their_children_when_they_are_asked() -> None:
    """The type of each child is found, also where one has the place of another."""
    nodes = {f"n{number}": lazy_node(number) for number in range(100)}
    template = {name: node(1.0) for name, node in nodes.items()}
    sent = {name: node(2.0) for name, node in nodes.items()}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        got = await receive(sender, receiver, into=template)
    assert {name: node.value for name, node in got.items()} == dict.fromkeys(nodes, 2.0)


@pytest.mark.parametrize("select", [None, ["known", "list", "max"]])
async def test_what_is_registered_comes_without_a_template(
    tmp_path: Path, select: list[str] | None
) -> None:
    """Registered values come, and torch's own results."""
    sent = {key: nodes_of(2.0)[key] for key in ("known", "list", "max")}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        found = [await receive(sender, receiver, select=select)]
    found.append(load(save(tmp_path / "s", sent), select=select))
    for got in found:
        assert_same({**got, "max": [*got["max"]]}, {**sent, "max": [*sent["max"]]})
        assert type(got["max"]) is torch.return_types.max


@pytest.mark.parametrize("key", ["unknown", "bag"])
async def test_others_need_a_template_or_a_registration(
    key: str, tmp_path: Path
) -> None:
    """The error says so, and names the type and the path."""
    sent = {key: nodes_of(2.0)[key]}
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, sent)
        with pytest.raises(RemoteProtocolError, match=rf"{key}.*template"):
            await receive(sender, receiver)
    with pytest.raises(UnsupportedLeafError, match=rf"{key}.*register_leaf"):
        load(save(tmp_path / "s", sent))


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


async def test_a_staged_state_has_the_types_of_what_was_staged() -> None:
    """Nobody else needs to know them."""
    stager = DefaultStager(CheckpointStagerConfig())
    sent = nodes_of(2.0)
    staged = await stager.stage(sent)
    with staged:
        got = staged.state_dict()
        assert type(got["unknown"].below) is Moments
        assert_same(facts(got), facts(sent))
    await stager.close()


def empties() -> State:
    """Return tensors of no elements whose strides are not the usual ones."""
    return {
        "transposed": torch.empty(0, 3).t(),
        "permuted": torch.empty(2, 0, 4).permute(2, 0, 1),
        "columns": torch.ones(6, 4)[:, 1:1],
        "expanded": torch.empty(0, 1).expand(0, 5),
        "strided": torch.empty_strided((3, 0), (7, 2)),
        "parameter": torch.nn.Parameter(torch.empty(0, 3).t()),
        "usual": torch.empty(3, 0),
        "weight": torch.ones(3),
    }


@ANY
async def test_tensors_of_no_elements_keep_their_strides(
    way: str, tmp_path: Path
) -> None:
    """A template may have others: nothing of it is filled, so any stride fits."""
    sent = empties()
    if way not in ("http, direct", "http, what differs", "group, direct"):
        got = await fill(way, sent, None, tmp_path)
        assert {key: each.stride() for key, each in got.items()} == {
            key: each.stride() for key, each in sent.items()
        }
    into = {key: torch.zeros(each.shape) for key, each in sent.items()}
    before = {**into}
    got = await fill(way, sent, into, tmp_path / "again")
    assert all(got[key] is each for key, each in before.items())
