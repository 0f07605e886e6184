"""Staging from, and loading to, a real CUDA device.

The same code runs on a fake device in ``tests/test_staging.py`` and
``tests/test_device.py``; what only a device can show is here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiockpt import HTTPTransport
from aiockpt.testing import assert_same

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.allow_leaks("CUDA keeps threads and descriptors of its own"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest_asyncio.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    """One transport that sends to itself."""
    async with HTTPTransport(120, host="127.0.0.1") as transport:
        yield transport


async def moved(transport: HTTPTransport, state: dict, **how: Any) -> dict:
    """Send a state dict and receive it again."""
    await transport.send_checkpoint([1], 1, state)
    return await transport.recv_checkpoint(0, transport.metadata(), 1, **how)


async def test_device_tensors_arrive_on_the_host(transport: HTTPTransport) -> None:
    """Every bit, with ties and views, next to tensors of the host."""
    weight = torch.randn(1000, 1000, device="cuda")
    state = {
        "weight": weight,
        "tied": weight,
        "rows": weight[10:20],
        "column": weight[:, 3],
        "half": torch.randn(999, device="cuda").bfloat16(),
        "host": torch.arange(10),
    }
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    received = await moved(transport, state)
    assert received["tied"] is received["weight"]
    assert all(torch.equal(received[name], expected[name]) for name in state)


async def test_staging_waits_for_what_training_has_enqueued(
    transport: HTTPTransport,
) -> None:
    """The side stream reads after the producer's kernels, though nobody waited."""
    tensor = torch.zeros(64 << 20, device="cuda")
    producer = torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(500_000_000)
        tensor.fill_(7)
        received = await moved(transport, {"tensor": tensor})
    assert bool((received["tensor"] == 7).all())


async def test_what_is_sent_does_not_change_any_more(transport: HTTPTransport) -> None:
    """The state dict may be mutated when the send has returned."""
    tensor = torch.ones(64 << 20, device="cuda")
    await transport.send_checkpoint([1], 1, {"tensor": tensor})
    tensor.zero_()
    received = await transport.recv_checkpoint(0, transport.metadata(), 1)
    assert bool((received["tensor"] == 1).all())


@pytest.mark.parametrize("direct", [False, True])
async def test_a_template_on_the_device_is_filled(
    transport: HTTPTransport, direct: bool
) -> None:
    """Through the arena and a side stream, ready for the current stream."""
    state = {"a": torch.randn(3_000_000), "b": torch.randn(5, 7)}
    template = {name: torch.zeros_like(t, device="cuda") for name, t in state.items()}
    filled = await moved(transport, state, into=template, direct=direct)
    assert all(filled[name] is template[name] for name in state)
    assert_same({name: tensor.cpu() for name, tensor in template.items()}, state)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
async def test_the_arena_is_page_locked_and_reused(transport: HTTPTransport) -> None:
    """Sending again takes no new page-locked memory once two snapshots took turns."""
    state = {"tensor": torch.ones(16 << 20, device="cuda")}
    addresses = []
    for step in range(1, 5):
        await transport.send_checkpoint([1], step, state)
        published = transport._endpoint.shelf.latest
        assert published is not None
        view = torch.frombuffer(published.servable.views(0, 64)[0], dtype=torch.uint8)
        assert view.is_pinned()
        addresses.append(view.data_ptr())
        del published, view
    assert len(set(addresses)) <= 2
