"""A state dict that gives up its memory while a checkpoint goes into it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiockpt.errors import LocalProtocolError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.transports import pair, receive

if TYPE_CHECKING:
    from tests.support.matrix import Record

COUNT = 40_000
CHANGES = [
    lambda state, key: setattr(state[key], "data", torch.zeros(3)),
    lambda state, key: state[key].resize_(4 * COUNT),
    lambda state, key: state[key].untyped_storage().resize_(0),
    lambda state, key: state.update({key: torch.zeros(COUNT)}),
    lambda state, key: state.pop(key),
]


def state_of(fill: float) -> dict[str, Any]:
    """Return a state dict of several chunks."""
    return {f"w{n}": torch.full((COUNT,), fill) for n in range(4)}


class Changing:
    """A template of which a tensor changes at a certain progress report."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.change, self.key = chance.choice(CHANGES), f"w{chance.randrange(4)}"
        self.left = chance.randrange(2, 16)  # after the second, it is described
        self.template = state_of(1.0)
        self.others: list[torch.Tensor] = []

    def __call__(self, _: object) -> None:
        self.left -= 1
        if not self.left:
            self.change(self.template, self.key)
            # They would get the memory that was freed.
            self.others = [torch.full((COUNT,), 5.0) for _ in range(4)]


@proves("fault 65")
@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
async def test_a_template_that_changes_at_any_moment(
    record: Record, *, direct: bool
) -> None:
    """All of it is the checkpoint, or an error names the path."""
    errors: list[LocalProtocolError] = []
    async with pair(state=state_of(2.0), chunk_bytes=64 << 10) as (sender, receiver):
        for seed in record.part_of(range(60), few=10):
            case = Changing(seed)
            options: dict[str, Any] = {"into": case.template, "progress": case}
            options["direct"] = direct
            try:
                assert_same(await receive(sender, receiver, **options), state_of(2.0))
            except LocalProtocolError as error:
                errors.append(error)
                assert str(error).startswith(case.key)  # noqa: PT017 - not always
            else:
                assert_same(case.template, state_of(2.0))
            assert all(bool((other == 5.0).all()) for other in case.others)
            record.ran()
    assert errors
