"""Rows of tensors, looked at together, come out as if each were looked at alone."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format import tree
from aiockpt.format.registry import REGISTRY
from aiockpt.state import flatten as _flatten
from aiockpt.state.flatten import Description, describe
from tests.support.states import LIMITS, families

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = st.text(st.sampled_from("ab.é_"), max_size=4) | st.just("__metadata__")
LONG = 40


def plain(count: int = LONG) -> dict[str, torch.Tensor]:
    """Return a row of tensors in memory of their own."""
    return {f"layer.{n}": torch.full((n % 3 + 1,), float(n)) for n in range(count)}


def facts(found: Description) -> tuple[object, ...]:
    """Return everything that two descriptions must agree on."""
    return (
        found.tree,
        found.entries.names,
        [*found.entries],
        [(each.address, each.nbytes, len(each.parts)) for each in found.backings],
        [*found.views],
    )


def both_ways(state: object, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Describe in rows, however short, and tensor by tensor."""
    found = []
    for row, part in ((1, 3), (1 << 60, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(tree, "_MIN_ROW", row)
            patch.setattr(_flatten, "TENSORS_PER_CALL", part)
            try:
                found.append(facts(describe(state, limits=LIMITS)))
            except UnsupportedLeafError as error:
                found.append((str(error),))
    return found[0], found[1]


@st.composite
def rows(draw: st.DrawFn) -> Any:
    """Make containers of the same few tensors, with keys that may read alike."""
    tensors = draw(families())
    tensors += [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.empty(0)]
    # By number, since hypothesis shows what it samples from.
    numbers = st.integers(0, len(tensors) - 1)
    drawn = draw(st.lists(st.dictionaries(KEYS, numbers, max_size=9), max_size=3))
    found: list[Any] = [
        {key: tensors[number] for key, number in each.items()} for each in drawn
    ]
    kinds = draw(st.sampled_from([dict, OrderedDict]))
    return {"": [*map(kinds, found)], "a": found[0] if found else None}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
@given(drawn=st.data())
def test_a_row_says_what_its_tensors_say_one_by_one(
    drawn: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, views, parameters, names that repeat: nothing depends on the way."""
    state = drawn.draw(rows().map(_Shown)).state
    in_rows, one_by_one = both_ways(state, monkeypatch)
    assert in_rows == one_by_one


class _Shown:
    """A state that can be shown: torch cannot print tensors of every dtype."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return "<rows>"


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize(
    "change",
    [
        lambda row: row,
        lambda row: row | {"layer.7": row["layer.6"]},  # tied
        lambda row: row | {"layer.7": row["layer.5"][1:]},  # a view
        lambda row: row | {"layer.7": torch.nn.Parameter(torch.ones(2))},
        lambda row: row | {"layer.7": torch.ones(3, 4).t()},
        lambda row: row | {"layer.7": torch.ones(2, dtype=torch.complex64).conj()},
        lambda row: row | {"layer.7": 7},
        lambda row: row | {"": torch.ones(1), "__metadata__": torch.ones(1)},
        lambda row: {"layer": {"7": torch.ones(1)}, **row},
        lambda row: {"one": row, "again": row},
        lambda row: {"one": row, "one.layer.7": torch.ones(1)},
    ],
)
def test_one_that_differs_spoils_no_row(
    kind: Callable[[Any], Any], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is less plain than the others is found among them."""
    in_rows, one_by_one = both_ways(kind(change(plain())), monkeypatch)
    assert in_rows == one_by_one


def test_a_type_that_a_user_has_registered_travels_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are for tensors that this library carries by itself."""
    parameter = torch.nn.Parameter
    monkeypatch.setattr(REGISTRY, "_by_type", dict(REGISTRY._by_type))
    monkeypatch.setattr(REGISTRY, "_by_tag", dict(REGISTRY._by_tag))
    REGISTRY.register("mine", parameter, lambda each: each.tolist(), parameter)
    state = {f"p{n}": parameter(torch.ones(2)) for n in range(LONG)}
    found: Any = describe(state, limits=LIMITS).tree
    assert {node[1] for node in found[2]} == {"mine"}
