"""Template: values beside its tensors, which are never filled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from aiockpt.errors import (
    RemoteProtocolError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.state.flatten import register_leaf
from aiockpt.state.template import Template
from pipeline import LIMITS
from templates import match, staged


@dataclass
class Holder:
    """A type of the user's."""

    weight: torch.Tensor


register_leaf(Holder, tag="tests.Holder")


WEIGHT = torch.zeros(1)


class TestValues:
    """What is made anew from what arrived."""

    def test_registered_leaves_are_values(self) -> None:
        """Even those that are made of tensors: nothing of the template's is filled."""
        found = match({"x": Holder(torch.ones(2)), "w": torch.ones(1)}, {"w": WEIGHT})
        assert list(found.tensors.values()) == [WEIGHT]
        assert len(found.parts) == 1

    @pytest.mark.parametrize("shared", ["values", "bytes"])
    def test_a_value_in_the_memory_of_a_tensor(self, shared: str) -> None:
        """It would change after it has been made and checked."""
        sparse: Any = ["tuple", [["tensor", 0], ["tensor", 0]]]
        trees: dict[str, Any] = {"values": ["ext", "x", sparse], "bytes": ["blob", 0]}
        manifest, _ = staged({"w": torch.ones(2), "x": None})
        tree: Any = ["dict", ["w", "x"], [["tensor", 0], trees[shared]]]
        template = Template({"w": torch.ones(2)}, limits=LIMITS, allow_pickle=False)
        with pytest.raises(TemplateMismatchError, match="value in the memory") as error:
            template.match(replace(manifest, tree=tree))
        assert error.value.path.startswith("x")

    @pytest.mark.parametrize("number", [-1, 1, 1 << 40])
    def test_a_number_of_no_tensor(self, number: int) -> None:
        """The sender's fault."""
        manifest, _ = staged({"w": torch.ones(2)})
        tree: list[Any] = ["dict", ["w"], [["tensor", number]]]
        template = Template({"w": torch.ones(2)}, limits=LIMITS, allow_pickle=False)
        with pytest.raises(RemoteProtocolError, match="names tensor"):
            template.match(replace(manifest, tree=tree))

    @pytest.mark.parametrize(
        "leaf",
        [
            Holder(torch.ones(2)),
            [Holder(torch.ones(2))],
        ],
    )
    def test_a_leaf_that_is_made_of_tensors(self, leaf: object) -> None:
        """Indices that fit the sender's size would leave the memory of ours."""
        with pytest.raises(
            UnsupportedLeafError, match="put None in its place"
        ) as error:
            Template({"x": leaf}, limits=LIMITS, allow_pickle=False)
        assert error.value.path in {"x", "x[0]"}
