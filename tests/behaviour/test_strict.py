"""What a load does with keys and containers that only one side has."""

from __future__ import annotations

import os
import re
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import aiockpt
from aiockpt import TemplateMismatchError
from aiockpt.checkpointers import CheckpointReader, RankInfo
from aiockpt.errors import MissingKeysError

READER = CheckpointReader(RankInfo(0, 1))
HINT = "get_optimizer_state_dict(model, optimizer)"


def save(path, state) -> str:
    """Save a state dict; return its path."""
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(state, path)
    return os.fspath(path)


def a_step():
    """Return a model and an optimizer after a step."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


# ------------------------------------------------------------------ empty containers


@pytest.fixture
def of_an_optimizer(tmp_path):
    """Return the path of a checkpoint with an optimizer's state."""
    model, optimizer = a_step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    return save(tmp_path / "step-1", state)


def fresh():
    """Return the template of a model and an optimizer that has not stepped."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def test_a_fresh_optimizer_is_no_success(of_an_optimizer) -> None:
    """A strict load says what is empty, and changes nothing."""
    template = fresh()
    before = template["model"]["weight"].clone()
    with pytest.raises(TemplateMismatchError) as caught:
        aiockpt.load(of_an_optimizer, template)
    assert str(caught.value) == (
        "optim.state is empty here and has 2 keys in the checkpoint: make the state "
        "first with get_optimizer_state_dict(model, optimizer) of torch.distributed."
        "checkpoint.state_dict and take optimizer.state_dict() again, or put None "
        "there to take it as it is"
    )
    assert caught.value.path == "optim.state"
    assert torch.equal(template["model"]["weight"], before)


def test_both_ways_out_of_it_work(of_an_optimizer) -> None:
    """None takes the state as it is, and torch's function makes a template of it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    template = fresh()
    template["optim"]["state"] = None
    loaded = aiockpt.load(of_an_optimizer, template)
    assert {*loaded["optim"]["state"]} == {0, 1}

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    named: Any = get_optimizer_state_dict(model, optimizer)
    template = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    loaded = aiockpt.load(of_an_optimizer, template)
    optimizer.load_state_dict(loaded["optim"])
    assert optimizer.state[model.weight]["step"] == 1

    with pytest.raises(TemplateMismatchError, match="names them: make the template by"):
        aiockpt.load(of_an_optimizer, {"optim": named})


def test_a_state_whose_parameters_have_names(tmp_path) -> None:
    """Torch's function makes the template; the optimizer's own state is none."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    path = save(tmp_path / "step-1", {"optim": get_optimizer_state_dict(*a_step())})
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TemplateMismatchError, match="names them: make the template by"):
        aiockpt.load(path, {"optim": {**optimizer.state_dict(), "state": None}})
    named: Any = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(TemplateMismatchError) as caught:
        aiockpt.load(path, {"optim": {**named, "state": {}}})
    assert HINT in str(caught.value)
    assert "state_dict() again" not in str(caught.value)
    loaded = aiockpt.load(path, {"optim": named})
    assert loaded["optim"]["state"]["weight"]["step"] == 1


CASES = [
    ({"a": {}}, {"a": {"x": torch.ones(1)}}, "a", "1 key"),
    ({"a": OrderedDict()}, {"a": OrderedDict(x=1, y=2)}, "a", "2 keys"),
    ({"a": []}, {"a": [torch.ones(1), 2]}, "a", "2 items"),
    ({"a": ()}, {"a": (1, 2, 3)}, "a", "3 items"),
    ({"a": deque()}, {"a": deque([1])}, "a", "1 item"),
    ({"a": [{}]}, {"a": [{"x": 1}]}, "a[0]", "1 key"),
    ({"a": (1, [])}, {"a": (1, [2])}, "a[1]", "1 item"),
    ({}, {"a": 1}, "", "1 key"),
]


@pytest.mark.parametrize("kind", ["directory", "file", "torch"])
@pytest.mark.parametrize(("template", "state", "path", "many"), CASES)
def test_one_rule_for_every_container(
    tmp_path, template, state, path, many, kind, caplog
) -> None:
    """Strict: an error. Else a warning, and the container stays empty."""
    place = tmp_path / "step-1"
    if kind == "torch" and isinstance(state["a"], deque):
        pytest.skip("torch does not load it")
    if kind == "torch":
        place = tmp_path / "step-1.pt"
        torch.save(state, place)
    else:
        save(place, state)
    if kind == "file":
        place = place / "checkpoint_0.safetensors"
    words = f"{path or 'the template'} is empty here and has {many} in the checkpoint"
    with pytest.raises(TemplateMismatchError, match=re.escape(words)) as caught:
        aiockpt.load(place, template)
    assert HINT not in str(caught.value)
    shape = repr(template)
    assert READER.read(place, template)[0] == template
    assert repr(template) == shape
    assert words in caplog.text
    if path:
        assert "put None there" in str(caught.value)
        assert aiockpt.load(place, {"a": None})["a"] == state["a"]
    else:
        assert "leave out into=" in str(caught.value)


@pytest.mark.parametrize("empty", [{}, [], (), deque(), OrderedDict()])
def test_empty_on_both_sides_is_no_error(tmp_path, empty) -> None:
    """There is nothing to take, and nothing is missing."""
    path = save(tmp_path / "step-1", {"a": empty, "b": 1})
    assert aiockpt.load(path, {"a": type(empty)(), "b": 0}) == {"a": empty, "b": 1}


def test_a_foreign_file(tmp_path) -> None:
    """Another tool's file is a full dict, too."""
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TemplateMismatchError, match="has 1 key in the checkpoint"):
        aiockpt.load(tmp_path / "model.safetensors", {})


def test_only_what_is_selected_counts(tmp_path) -> None:
    """An empty container is an error if something in it was asked for."""
    path = save(tmp_path / "step-1", {"a": {"x": 1}, "l": [1], "b": 2})
    assert aiockpt.load(path, {"a": {}, "b": 0}, select=["b"]) == {"a": {}, "b": 2}
    no_a = lambda name: name == "b"  # noqa: E731
    assert aiockpt.load(path, {"a": {}, "l": [], "b": 0}, select=no_a)["b"] == 2
    for select in (["a"], ["a.x"], lambda name: name == "a.x"):
        with pytest.raises(TemplateMismatchError, match="a is empty here"):
            aiockpt.load(path, {"a": {}, "b": 0}, select=select)
    with pytest.raises(TemplateMismatchError, match="l is empty here"):
        aiockpt.load(path, {"l": []}, select=lambda name: name == "l[0]")


# --------------------------------------------------------------------- missing keys


def test_who_is_strict(tmp_path) -> None:
    """`load` and the background checkpointer are; the seeds' classes are not."""
    path = save(tmp_path / "step-1", {"a": 1, "extra": 2})
    template = {"a": 0, "b": 0}
    config = aiockpt.CheckpointerConfig(use_process=False)
    with aiockpt.make_background_checkpointer(config) as background:
        for load in (aiockpt.load, background.load):
            with pytest.raises(MissingKeysError, match="is missing keys: b"):
                load(path, dict(template))
            assert load(path, dict(template), strict=False) == {"a": 1, "b": 0}
            assert load(path, {"a": 0}) == {"a": 1}  # extra keys never count
    with aiockpt.make_sync_checkpointer() as sync:
        assert sync.load(path, dict(template)) == {"a": 1, "b": 0}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("saved", "template", "words"),
    [
        ("module.", "", "take 'module.' out of the keys"),
        ("_orig_mod.", "", "take '_orig_mod.' out of the keys"),
        ("net.", "", "take 'net.' out of the keys"),
        ("", "module.", "such as model.module.state_dict()"),
        ("", "_orig_mod.", "such as model._orig_mod.state_dict()"),
        ("", "net.", "a template without 'net.' in its keys"),
    ],
)
@pytest.mark.parametrize("kind", ["directory", "foreign", "torch"])
def test_no_key_is_found(tmp_path, saved, template, words, strict, kind) -> None:
    """Every load raises an error that shows a key of each side."""
    weight = torch.ones(2)
    state = {f"{saved}weight": weight, f"{saved}bias": weight}
    into = {f"{template}weight": torch.zeros(2), f"{template}bias": torch.zeros(2)}
    path = tmp_path / "step-1"
    if kind == "directory":
        save(path, state)
    elif kind == "foreign":
        path = tmp_path / "x.safetensors"
        save_file({name: each.clone() for name, each in state.items()}, path)
    else:
        path = tmp_path / "x.pt"
        torch.save(state, path)
    with pytest.raises(MissingKeysError, match="has no key of the template") as caught:
        aiockpt.load(path, into, strict=strict)
    assert words in str(caught.value)
    assert f"'{saved}weight'" in str(caught.value)
    assert f"'{template}weight'" in str(caught.value)
    assert not any(each.any() for each in into.values())


def test_the_remedies_for_a_prefix_work(tmp_path) -> None:
    """What the message says makes a state dict that fits."""
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    wrapped = torch.nn.Sequential(OrderedDict(module=inner))
    path = save(tmp_path / "step-1", {"model": wrapped.state_dict()})
    with pytest.raises(MissingKeysError) as caught:
        aiockpt.load(path, {"model": inner.state_dict()})
    code = re.search(r"\{key.*items\(\)\}", str(caught.value))
    assert "state is the dict at model of the loaded state" in str(caught.value)
    assert code is not None
    state = aiockpt.load(path)["model"]
    inner.load_state_dict(eval(code[0], {"state": state}))


@pytest.mark.parametrize(
    ("state", "template", "words"),
    [
        ({"a.module.b": 1}, {"a.b": 0}, "take 'module.' out"),
        ({"a.b": 1}, {"a._orig_mod.b": 0}, "without '_orig_mod.'"),
        ({"model": {"w": 1}}, {"w": 0}, "pass into={'model': template} there"),
        ({"w": 1}, {"model": {"w": 0}}, "pass what the template has there"),
        ({"x": 1}, {"y": 0}, "the template has 'y', and the checkpoint 'x'"),
        ({1: 1}, {2: 0}, "the template has 2, and the checkpoint 1"),
        ({"m": {"x": 1}}, {"m": {"y": 0}}, "the template has 'y' at m"),
    ],
)
def test_the_difference_is_named(tmp_path, state, template, words) -> None:
    """A word within the names, another depth, or simply other names."""
    path = save(tmp_path / "step-1", state)
    for strict in (False, True):
        with pytest.raises(MissingKeysError, match=re.escape(words)):
            aiockpt.load(path, template, strict=strict)


@pytest.mark.parametrize(
    ("template", "lacking"),
    [
        ({"m": {"w": 0}, "b": 0}, ["m.w"]),
        ({"m": {"module.w": 0, "w": 0}}, ["m.w"]),
        ({"m": {"deep": {"x": 0, "y": [1]}}}, ["m.deep.x", "m.deep.y[0]"]),
        ({"t": ({"x": 0},)}, ["t[0].x"]),
    ],
)
def test_a_function_selects_what_must_be_there(tmp_path, template, lacking) -> None:
    """A missing key of the template that a function selects is an error."""
    path = save(tmp_path / "step-1", {"m": {"module.w": 1}, "b": 1, "t": ({"y": 1},)})
    chosen = lambda name: name.startswith(("m", "t"))  # noqa: E731
    before = repr(template)
    with pytest.raises(MissingKeysError) as caught:
        aiockpt.load(path, template, select=chosen)
    assert caught.value.keys == lacking
    assert repr(template) == before
    other = lambda name: name == "b"  # noqa: E731
    assert aiockpt.load(path, {"b": 0, "m": {"w": 0}}, select=other)["b"] == 1


def test_a_list_that_is_too_long(tmp_path) -> None:
    """The message compares both lengths."""
    path = save(tmp_path / "step-1", {"l": [torch.ones(1)]})
    words = "template l: the checkpoint has a list of 1, the template has a list of 2"
    with pytest.raises(TemplateMismatchError, match=words):
        aiockpt.load(path, {"l": [torch.zeros(1), torch.zeros(1)]}, strict=False)
