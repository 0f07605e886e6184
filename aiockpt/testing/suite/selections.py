"""``select=``, with and without ``into=``."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import pytest
import torch

from aiockpt.errors import AiockptError, MissingKeysError, TemplateMismatchError
from aiockpt.events import Progress
from aiockpt.state.equality import assert_same
from aiockpt.testing.suite.base import Conformance, sample
from aiockpt.transport import CheckpointTransport

__all__ = ["Selections"]

T = TypeVar("T", bound=CheckpointTransport[Any])

SELECTIONS: Final[dict[str, tuple[Any, list[str]]]] = {
    "a tensor": (["bias"], ["bias"]),
    "a value": (["seed"], ["seed"]),
    "tied tensors": (["weight", "tied"], ["weight", "tied"]),
    "one of two that are tied": (["tied"], ["tied"]),
    "everything below": (["nested"], ["nested"]),
    "everything": ([""], [*sample()]),
    "nothing": ([], []),
    "a function": (lambda path: path in ("bias", "seed"), ["seed", "bias"]),
    "no path": (lambda path: False, []),
}
"""What is asked for -> how, and which keys of the sample come."""


class Selections(Conformance[T]):
    """For a transport whose ``recv_checkpoint`` takes ``select``, and ``into``."""

    @pytest.mark.parametrize("kind", SELECTIONS)
    async def test_what_is_selected_arrives(self, kind: str) -> None:
        """And nothing else is returned."""
        select, keys = SELECTIONS[kind]
        async with self.transports(2) as (sender, receiver):
            got = await self.move(sender, receiver, sample(1), select=select)
        state = sample(1)
        assert_same(got, {key: state[key] for key in state if key in keys})

    async def test_a_part_of_a_list_keeps_its_places(self) -> None:
        """None stands where nothing is selected."""
        async with self.transports(2) as (sender, receiver):
            state = {"layers": [torch.zeros(1), torch.ones(1), {"w": torch.ones(2)}]}
            got = await self.move(
                sender, receiver, state, select=["layers[1]", "layers[2].w"]
            )
        assert_same(got, {"layers": [None, *state["layers"][1:]]})

    async def test_a_single_path_is_no_list_of_paths(self) -> None:
        """Its letters would be taken for paths."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            with pytest.raises(TypeError, match="list of paths"):
                await self.receive(sender, receiver, select="bias")

    async def test_a_path_that_is_not_there_is_an_error(self) -> None:
        """It names all of them."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            with pytest.raises(MissingKeysError) as caught:
                await self.receive(sender, receiver, select=["bias", "bia", "nested.x"])
        assert caught.value.keys == ["bia", "nested.x"]

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled_where_selected(
        self,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """Its own tensors and dicts are changed there, and returned."""
        template = {**sample(2), "more": torch.zeros(3)}
        bias, weight = template["bias"], template["weight"]
        async with self.transports(2) as (sender, receiver):
            got = await self.move(
                sender,
                receiver,
                sample(1),
                into=template,
                select=["bias", "seed", "nested"],
                direct=direct,
            )
        assert got is template
        assert template["bias"] is bias
        assert template["weight"] is weight
        new = sample(1)
        expected = {**sample(2), "more": torch.zeros(3)}
        expected |= {key: new[key] for key in ("bias", "seed", "nested")}
        assert_same(template, expected)

    async def test_a_template_may_have_only_what_is_selected(self) -> None:
        """Other keys of the checkpoint are not looked for."""
        template = {"bias": torch.zeros(3, dtype=torch.bfloat16)}
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, sample(1), into=template, select=["bias"])
        assert_same(template, {"bias": sample(1)["bias"]})

    async def test_a_template_that_does_not_fit_there_is_untouched(self) -> None:
        """No byte of what would fit is written either."""
        template = {**sample(2), "weight": torch.zeros(3, 3)}
        before = {**sample(2), "weight": torch.zeros(3, 3)}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            for select, path in ((["bias", "weight"], "weight"), (["seed", "x"], "x")):
                with pytest.raises((TemplateMismatchError, MissingKeysError)) as caught:
                    await self.receive(sender, receiver, into=template, select=select)
                assert path in str(caught.value)
                assert caught.value.__notes__ == ["the template was not modified"]
            assert_same(template, before)

    async def test_a_path_that_the_template_lacks_is_an_error(self) -> None:
        """Or its caller would go on with what is nowhere."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            with pytest.raises(AiockptError, match="bias"):
                await self.receive(
                    sender, receiver, into={"seed": 0}, select=["seed", "bias"]
                )

    async def test_progress_counts_what_is_selected(self) -> None:
        """The totals are those of the chunks that hold it."""
        seen: list[Progress] = []
        state = {"small": torch.ones(3), "big": torch.ones(5 << 20)}
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, state, progress=seen.append)
            whole = seen[-1]
            await self.move(
                sender, receiver, state, select=["small"], progress=seen.append
            )
        last = seen[-1]
        assert 12 <= last.bytes_done == last.bytes_total <= whole.bytes_total
        assert 0 < last.chunks_done == last.chunks_total
        # Its sender may have chunks of any length, and so only one.
        assert last.chunks_total < whole.chunks_total or whole.chunks_total == 1
