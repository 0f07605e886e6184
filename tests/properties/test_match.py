"""Templates that differ from a checkpoint in any way get its tensors, or none."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiockpt.checkpointers import make_sync_checkpointer
from aiockpt.errors import StateDictError

BASE = torch.arange(24.0)
NAMES = st.sampled_from("abcd")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor: of its own, a view of a common one, or an odd one."""
    size = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["own", "own", "view", "column", "expanded", "whole"]))
    if kind == "view":
        start = draw(st.integers(0, 8))
        return BASE[start : start + size]
    if kind == "column":
        return BASE.view(6, 4)[:size, 1]
    if kind == "expanded":
        return torch.ones(1).expand(size)
    if kind == "whole":
        return BASE
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.int16]))
    return torch.arange(size).to(dtype)


VALUES = st.one_of(st.none(), st.integers(0, 9), st.just("x"), st.just((1, 2)))
LEAVES = st.one_of(tensors(), tensors(), tensors(), VALUES)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=6,
)
STATES = st.dictionaries(NAMES, NODES, min_size=1, max_size=4)


def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Return a template for a value: mostly alike, in memory of its own."""
    if draw(st.integers(0, 11)) == 0:
        return draw(NODES)
    if isinstance(value, torch.Tensor):
        twin = torch.zeros_like(value, memory_format=torch.contiguous_format)
        if draw(st.integers(0, 5)) == 0:
            twin = torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 0]
        trains = twin.is_floating_point() and draw(st.integers(0, 9)) == 1
        return torch.nn.Parameter(twin) if trains else twin
    if isinstance(value, dict):
        some = [each for each in value.items() if draw(st.integers(0, 9))]
        kept = {key: mutated(draw, each) for key, each in some}
        if draw(st.integers(0, 9)) == 0:
            kept[draw(NAMES)] = draw(LEAVES)
        return type(value)(kept)
    if isinstance(value, list | tuple):
        return type(value)(mutated(draw, each) for each in value)
    return value


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a state dict, and a template that differs here and there."""
    state = draw(STATES)
    template = {key: mutated(draw, each) for key, each in state.items()}
    if template and draw(st.integers(0, 9)) == 0:
        names = [*template]
        template[draw(NAMES)] = template[draw(st.sampled_from(names))]  # a tie
    return state, template


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the paths of tensors, and the tensors."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from paths(each, (*path, key))
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from paths(each, (*path, at))


@settings(suppress_health_check=[HealthCheck.data_too_large])
@given(pair=pairs(), strict=st.booleans(), mmap=st.booleans())
def test_a_template_gets_what_is_there_or_nothing(
    pair: tuple[dict[str, Any], Any], strict: bool, mmap: bool
) -> None:
    """Every tensor of both is filled, or none has changed."""
    # Copied, since what is saved and the template may share memory.
    (state, template), there = pair, dict(paths(deepcopy(pair[0])))
    template = deepcopy(template)
    own = dict(paths(template))
    before = {path: tensor.clone() for path, tensor in own.items()}
    with tempfile.TemporaryDirectory() as place, make_sync_checkpointer() as loader:
        loader.save(state, f"{place}/c")
        try:
            got = loader.load(f"{place}/c", template, strict=strict, mmap=mmap)
        except StateDictError:
            assert all(torch.equal(before[path], own[path]) for path in own)
            return
        for path, tensor in paths(got):
            if path in there:
                assert torch.equal(tensor, there[path])
            elif not any(tensor is own.get(other) for other in there):  # not tied
                assert torch.equal(tensor, before[path])
            # A tuple of a template is made anew, with the tensors that it had.
            assert path not in own or tensor is own[path]
