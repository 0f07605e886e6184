"""What a receive says of a template that does not fit, and of what cannot be sent."""

from __future__ import annotations

import re
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import TemplateMismatchError
from aiockpt.errors import LimitExceededError, StateDictError, UnsupportedLeafError

W = torch.ones(2)

MISFITS: list[tuple[Any, Any, str]] = [
    ({"a": W}, {"a": 3}, "float32 [2], the template has a value of type int"),
    ({"a": W}, {"a": "x"}, "float32 [2], the template has a value of type str"),
    ({"a": W}, {"a": [1]}, "float32 [2], the template has a list"),
    ({"a": {"b": W}}, {"a": {"c": 1}}, "a tensor, the template has nothing"),
    ({"a": 3}, {"a": W}, "a value of type int, the template has float32 [2]"),
    ({"a": None}, {"a": W}, "None, the template has float32 [2]"),
    ({"m.a": W}, {"a": W}, "the template has nothing, but a, which the checkpoint"),
    ({"a": {"b": W}}, {"a": {}}, "a is empty here and has 1 key in the checkpoint"),
    ({"a": [W, 1]}, {"a": []}, "a is empty here and has 2 items in the checkpoint"),
    ({"a": (W,)}, {"a": ()}, "a is empty here and has 1 item in the checkpoint"),
    ({"a": W}, {}, "the template is empty here and has 1 key in the checkpoint"),
    ({"a": W}, [], "template: the checkpoint has a dict, the template has a list"),
    (
        {"a": [W]},
        {"a": {}},
        "template a: the checkpoint has a list, the template has a",
    ),
    ({"a": [W]}, {"a": ()}, "the checkpoint has a list, the template has a tuple"),
    ({"a": (W, 1)}, {"a": {"x": 1}}, "has a tuple, the template has a dict"),
    ({"a": W}, {"a": OrderedDict(x=1)}, "float32 [2], the template has an OrderedDict"),
    ({"a": W}, {"a": {"x": W}}, "float32 [2], the template has a dict"),
    ({"m": {"module.w": W, "module.b": W}}, {"m": {"w": W, "b": W}}, "take 'module.'"),
    ({"w": W, "b": W}, {"module.w": W, "module.b": W}, "without 'module.' in its"),
    (
        {"optim": {"state": {0: W}, "param_groups": [{"params": [0]}]}},
        {"optim": {"state": {}, "param_groups": [{"params": [0]}]}},
        "get_optimizer_state_dict",
    ),
]


@pytest.mark.asyncio
async def test_what_the_template_has_instead() -> None:
    """The message says what is there; without a template, all is received."""
    async with aiockpt.HTTPTransport() as transport:
        for step, (state, template, words) in enumerate(MISFITS):
            await transport.send_checkpoint(step=step, state_dict=state)
            metadata = transport.metadata()
            with pytest.raises(TemplateMismatchError, match=re.escape(words)) as caught:
                await transport.recv_checkpoint(metadata=metadata, into=template)
            if "empty" in words:
                assert "or receive without into=" in str(caught.value)
            await transport.recv_checkpoint(metadata=metadata)


@pytest.mark.asyncio
async def test_a_template_on_the_meta_device() -> None:
    """Both remedies that the message names work."""
    model = torch.nn.Linear(2, 2)
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    async with aiockpt.HTTPTransport() as transport:
        await transport.send_checkpoint(step=1, state_dict=model.state_dict())
        metadata = transport.metadata()
        with pytest.raises(UnsupportedLeafError, match="no memory to receive into"):
            await transport.recv_checkpoint(metadata=metadata, into=empty.state_dict())
        state = await transport.recv_checkpoint(metadata=metadata)
        empty.load_state_dict(state, assign=True)
        assert torch.equal(empty.weight, model.weight)
        made = empty.to("meta").to_empty(device="cpu")
        await transport.recv_checkpoint(metadata=metadata, into=made.state_dict())
        assert torch.equal(made.weight, model.weight)
        with pytest.raises(UnsupportedLeafError, match="it has no data to send"):
            await transport.send_checkpoint(
                step=2, state_dict=empty.to("meta").state_dict()
            )


@pytest.mark.asyncio
async def test_a_limit_has_its_name() -> None:
    """The option that the message names lets the checkpoint pass."""
    state = {"l": [*range(100)]}
    small = aiockpt.Limits(max_nodes=50)
    async with (
        aiockpt.HTTPTransport() as sender,
        aiockpt.HTTPTransport(receive=aiockpt.Receive(limits=small)) as receiver,
    ):
        words = r"nodes in the tree is 1\d\d, more than the limit of 50; raise "
        match = rf"the number of {words}Limits\(max_nodes=...\)"
        with pytest.raises(LimitExceededError, match=match):
            await receiver.send_checkpoint(step=1, state_dict=state)
        await sender.send_checkpoint(step=1, state_dict=state)
        with pytest.raises(LimitExceededError, match=match):
            await receiver.recv_checkpoint(metadata=sender.metadata(), step=1)
        assert await sender.recv_checkpoint(metadata=sender.metadata()) == state


def a_cycle(kind: str) -> Any:
    """Return a state dict that contains a container twice on one path."""
    loop: Any = [] if kind == "list" else {}
    if kind == "list":
        loop.append(loop)
        return {"x": loop}
    if kind == "whole":
        loop["again"] = loop
        return loop
    loop["a"] = [1, (2, loop)]
    return {"x": loop, "y": [loop["a"]]}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("list", "x[0] is x itself: leave it out"),
        ("dict", "x.a[1][1] is x itself: leave it out"),
        ("whole", "again is the state dict itself: leave it out"),
    ],
)
@pytest.mark.allow_error_logs
def test_a_cycle_is_named(tmp_path, kind: str, words: str) -> None:
    """Saves and templates name it; a shared container is no cycle."""
    with aiockpt.make_sync_checkpointer() as checkpointer:
        with pytest.raises(LimitExceededError, match=re.escape(words)) as caught:
            checkpointer.save(a_cycle(kind), tmp_path / "a")
        assert "Limits" not in str(caught.value)
        shared = [1]
        checkpointer.save({"a": shared, "b": [shared]}, tmp_path / "b")


REPEATING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(4, 1).expand(4, 5),
    "windows": lambda: torch.zeros(20).unfold(0, 3, 1),
    "sparse": lambda: torch.zeros(1000, 100)[:, :1].expand(1000, 2),
    "sparse windows": lambda: torch.zeros(100_000).as_strided(
        (1000, 2, 3), (100, 1, 1)
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", REPEATING)
async def test_elements_that_share_memory_get_no_others(tmp_path, kind: str) -> None:
    """Every verb refuses two values for one memory, since one would be lost."""
    place = REPEATING[kind]()
    state = {"w": torch.arange(1.0, 1 + place.numel()).reshape(place.shape)}
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "s", step=1)
    with pytest.raises(TemplateMismatchError, match=r"w: .* elements that share"):
        aiockpt.load(tmp_path / "s", {"w": place})
    async with aiockpt.HTTPTransport() as transport:
        await transport.send_checkpoint(step=1, state_dict=state)
        for select in (None, ["w"]):
            with pytest.raises(StateDictError, match=r"w.*(stride|share memory)"):
                await transport.recv_checkpoint(
                    metadata=transport.metadata(), into={"w": place}, select=select
                )
    assert not place.any()


def test_too_deep_is_no_cycle(tmp_path) -> None:
    """The error names the limit if the state dict is only deep."""
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep, "b": deep}
    with (
        aiockpt.make_sync_checkpointer() as checkpointer,
        pytest.raises(LimitExceededError, match="nest the state dict less deeply"),
    ):
        checkpointer.save(deep, tmp_path / "a")


def test_the_search_for_a_cycle_takes_little_memory(tmp_path) -> None:
    """It goes below the limit, and a path for each level would be gigabytes."""
    outer = deep = dict[str, Any]()
    for _ in range(4000):
        deep["a"] = deep = {}
    tracemalloc.start()
    try:
        with (
            aiockpt.make_sync_checkpointer() as checkpointer,
            pytest.raises(LimitExceededError, match="nest the state dict"),
        ):
            checkpointer.save({"x": outer}, tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
        while outer:  # freeing it in one go would recurse
            outer = outer.pop("a", {})
