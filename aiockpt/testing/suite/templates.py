"""``into=``, ``direct=`` and ``progress=``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, TypeVar

import pytest
import torch

from aiockpt.errors import TemplateMismatchError, UnsupportedLeafError
from aiockpt.events import Progress
from aiockpt.state.equality import assert_same
from aiockpt.testing.leaves import LEAVES
from aiockpt.testing.suite.base import Conformance, sample
from aiockpt.transport import CheckpointTransport

__all__ = ["Templates"]

T = TypeVar("T", bound=CheckpointTransport[Any])

Change = Callable[[dict[str, Any]], object]


def _untie(state: dict[str, Any]) -> None:
    state["tied"] = state["tied"].clone(memory_format=torch.preserve_format)


def _tie(state: dict[str, Any]) -> None:
    state["other"] = state["weight"]


def _conjugated() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex64).conj()


MISMATCHES: Final[dict[str, tuple[str, Change]]] = {
    "dtype": ("bias", lambda state: state.update(bias=state["bias"].half())),
    "shape": ("weight", lambda state: state.update(weight=torch.ones(299, 300))),
    "rank": ("bias", lambda state: state.update(bias=state["bias"][None])),
    "stride": ("other", lambda state: state.update(other=state["other"].t())),
    "missing": ("bias", lambda state: state.pop("bias")),
    "missing below": ("nested[0].scale", lambda state: state["nested"][0].clear()),
    "left over": ("more", lambda state: state.update(more=torch.ones(1))),
    "no tensor": ("bias", lambda state: state.update(bias="text")),
    "not tied": ("tied", _untie),
    "tied": ("other", _tie),
    "conjugated": ("complex", lambda state: state.update(complex=_conjugated())),
    "offset": ("window", lambda state: state.update(window=state["weight"][1:3])),
}
"""What is wrong with a template -> where that is, and how to do it."""

FILLED: Final = (
    "every dtype",
    "every dtype, transposed",
    "every dtype, sparse view",
    "every dtype, 0 bytes",
    "mixed sizes",
    "half of the memory",
    "channels_last",
    "expanded",
    "windows",
    "same sparse view twice",
    "conjugated and negated",
    "conjugated sparse view",
    "tied",
    "overlapping views",
    "module state",
    "named tuple",
)
"""Kinds of leaves that a template receives in its own memory."""

REFUSED: Final = ("dataclass",)
"""Kinds of leaves that are made of tensors, and so are never filled."""

RETURNED: Final = tuple(
    kind for kind in ("numpy arrays", "bytes", "keys", "sets") if kind in LEAVES
)
"""Kinds of leaves that come back beside a template's tensors."""


def rich(seed: int = 0) -> dict[str, Any]:
    """Return the sample, and some tensors that invite mistakes."""
    state = sample(seed)
    generator = torch.Generator().manual_seed(seed)
    return {
        **state,
        "other": torch.randn(300, 300, generator=generator),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
        "window": state["weight"][2:4],
        "parameter": torch.nn.Parameter(torch.randn(5, generator=generator)),
    }


def _addresses(state: object) -> list[int]:
    found: list[int] = []
    match state:
        case torch.Tensor():
            found.append(state.data_ptr())
        case dict():
            found += _addresses(list(state.values()))
        case list() | tuple():
            for each in state:
                found += _addresses(each)
    return found


class Templates(Conformance[T]):
    """For a transport whose ``recv_checkpoint`` takes these options."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled(self, direct: bool) -> None:  # noqa: FBT001
        """Its own memory holds the checkpoint, and its own tensors are returned."""
        template = rich(seed=2)
        addresses = _addresses(template)
        async with self.transports(2) as (sender, receiver):
            got = await self.move(
                sender, receiver, rich(seed=1), into=template, direct=direct
            )
        assert_same(got, rich(seed=1))
        template["seed"] = 1  # no tensor: only what is returned has it
        assert_same(template, rich(seed=1))
        assert _addresses(template) == _addresses(got) == addresses
        assert got["parameter"] is template["parameter"]

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", [*FILLED, *RETURNED])
    async def test_a_leaf_arrives_in_a_template(self, kind: str) -> None:
        """A template made like the state fits it."""
        state = {"leaf": LEAVES[kind]()}
        async with self.transports(2) as (sender, receiver):
            for direct in (False, True):
                into = {"leaf": LEAVES[kind]()}
                got = await self.move(sender, receiver, state, into=into, direct=direct)
                assert_same(got, state)
                if kind in FILLED:
                    assert_same(into, state)

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", REFUSED)
    async def test_a_template_that_cannot_be_filled_is_refused(self, kind: str) -> None:
        """What its caller would go on using must not stay as it was."""
        state = {"leaf": LEAVES[kind]()}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            with pytest.raises(UnsupportedLeafError) as caught:
                await self.receive(sender, receiver, into=state)
        assert caught.value.path == "leaf"

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("kind", REFUSED)
    async def test_such_a_leaf_is_returned_where_the_template_has_none(
        self,
        kind: str,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """It is a value, made anew from what arrived."""
        state = {"leaf": LEAVES[kind](), "weight": torch.ones(3)}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            into = {"leaf": None, "weight": torch.zeros(3)}
            got = await self.receive(sender, receiver, into=into, direct=direct)
        assert_same(got, state)
        assert got["weight"] is into["weight"]

    @pytest.mark.parametrize("kind", MISMATCHES)
    async def test_a_template_that_does_not_fit_is_untouched(self, kind: str) -> None:
        """The error names the tensor, and no byte moves."""
        path, change = MISMATCHES[kind]
        template, before = rich(seed=2), rich(seed=2)
        change(template)
        change(before)
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, rich(seed=1))
            for direct in (False, True):
                with pytest.raises(TemplateMismatchError) as caught:
                    await self.receive(sender, receiver, into=template, direct=direct)
                assert caught.value.path == path
                assert_same(template, before)

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("step", [2, 3, 8])
    async def test_memory_beside_the_template_is_untouched(
        self,
        step: int,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """Only the elements of its tensors are written, not what lies between."""
        theirs, ours = torch.ones(40, 16), torch.zeros(40, 16)
        async with self.transports(2) as (sender, receiver):
            await self.move(
                sender,
                receiver,
                {"columns": theirs[:, ::step]},
                into={"columns": ours[:, ::step]},
                direct=direct,
            )
        expected = torch.zeros(40, 16)
        expected[:, ::step] = 1
        assert torch.equal(ours, expected)

    async def test_autograd_notices_a_filled_template(self) -> None:
        """A tensor saved for a backward pass must not change silently."""
        template = {"weight": torch.nn.Parameter(torch.ones(3))}
        loss = (template["weight"] ** 2).sum()
        async with self.transports(2) as (sender, receiver):
            state = {"weight": torch.nn.Parameter(torch.zeros(3))}
            await self.move(sender, receiver, state, into=template)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)

    async def test_an_inference_tensor_can_be_filled(self) -> None:
        """Serving engines keep their weights in inference mode."""
        with torch.inference_mode():
            template = {"weight": torch.zeros(3)}
        async with self.transports(2) as (sender, receiver):
            state = {"weight": torch.ones(3)}
            await self.move(sender, receiver, state, into=template)
        assert template["weight"].tolist() == [1, 1, 1]

    async def test_progress_grows_up_to_the_totals(self) -> None:
        """Numbers never fall, and the last ones are the totals."""
        seen: list[Progress] = []
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, sample(), progress=seen.append)
        for before, after in pairwise(seen):
            assert before.bytes_done <= after.bytes_done
            assert before.chunks_done <= after.chunks_done
        last = seen[-1]
        assert 0 < last.bytes_done == last.bytes_total
        assert 0 < last.chunks_done == last.chunks_total

    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """Somebody else's bug is logged."""

        def fail(_: Progress) -> None:
            raise ValueError("on purpose")

        async with self.transports(2) as (sender, receiver):
            got = await self.move(sender, receiver, sample(), progress=fail)
        assert_same(got, sample())
