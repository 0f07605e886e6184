"""From device to device over gloo, through the host memory of both ends."""

from __future__ import annotations

import pytest
import torch

from aiockpt.testing import assert_same
from groups import moved, transports

DEVICE = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def state(fill: float) -> dict[str, torch.Tensor]:
    """Return tensors on the device, large and small, and some beside them."""
    return {
        "large": torch.full((1 << 20,), fill, device=DEVICE),
        "small": torch.full((3,), fill, device=DEVICE),
        "view": torch.full((64, 64), fill, device=DEVICE)[:, ::2],
        "host": torch.full((1000,), fill),
    }


async def test_a_device_s_tensors_arrive() -> None:
    """In host memory, without a template."""
    async with transports() as (sender, receiver):
        got = await moved(sender, receiver, state(1.0))
    assert_same(got, {name: tensor.cpu() for name, tensor in state(1.0).items()})


@pytest.mark.parametrize("direct", [False, True])
async def test_a_template_on_the_device_is_filled(*, direct: bool) -> None:
    """Each tensor where it is."""
    into = state(0.0)
    async with transports() as (sender, receiver):
        await moved(sender, receiver, state(1.0), into=into, direct=direct)
    assert_same(into, state(1.0))
