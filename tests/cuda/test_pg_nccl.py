"""Between two devices over NCCL; skipped where there are not two of them.

NCCL wants a device for each rank, so each runs in a process of its own: ``python
test_pg_nccl.py STORE RANK WHAT``. It asserts what it sees, and its exit code counts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import aiockpt
from tests.support.cards import on_a_loop
from tests.support.groups import Watched

MIB = 1 << 20
A_WHILE = 400_000_000
"""Cycles that a device is kept busy: some 200 ms."""

if __name__ != "__main__":
    pytestmark = [
        pytest.mark.skipif(
            torch.cuda.device_count() < 2 or not distributed.is_nccl_available(),
            reason="NCCL wants a CUDA device for each of two ranks",
        ),
        pytest.mark.timeout(180),
    ]

Transport = aiockpt.PGTransport[Any]


def state(rank: int, fill: float) -> dict[str, Any]:
    """Return tensors of the rank's device, large and small, and some beside them."""
    device = torch.device("cuda", rank)
    return {
        "large": torch.full((16 * MIB,), fill, device=device),
        "small": [torch.full((1000,), fill, device=device) for _ in range(200)],
        "half": torch.full((64, 64), fill, device=device)[:, ::2],
        "sparse": torch.full((64, 64), fill, device=device)[:, ::8],
        "host": torch.full((1000,), fill),
        "bytes": b"of the host",
    }


def check(got: Any, rank: int, fill: float) -> None:
    """Compare what arrived, and where it is."""
    expected = state(rank, fill)
    for key in ("large", "half", "sparse", "host"):
        assert got[key].device == expected[key].device, key
        assert got[key].equal(expected[key]), key
    for tensor in got["small"]:
        assert tensor.device == expected["large"].device
        assert (tensor == fill).all()
    assert got["bytes"] == b"of the host"


async def fresh(transport: Transport, group: Watched, rank: int) -> None:
    """Move it without a template; small tensors share messages."""
    if rank == 0:
        group.messages.clear()
        await transport.send_checkpoint([1], 1, state(0, 1.5))
        assert len(group.messages) < 50  # the large tensor has 16, of 4 MiB each
        return
    check(await transport.recv_checkpoint(0, "", 1), 1, 1.5)


async def in_place(transport: Transport, group: Watched, rank: int) -> None:
    """Fill a template, at the end and straight away."""
    for step, direct in enumerate((False, True), 1):
        if rank == 0:
            await transport.send_checkpoint([1], step, state(0, float(step)))
            continue
        into = state(1, 0.0)
        got = await transport.recv_checkpoint(0, "", step, into=into, direct=direct)
        assert got["large"] is into["large"]
        check(into, 1, float(step))


async def behind_the_producer(transport: Transport, group: Watched, rank: int) -> None:
    """Both ends work on their devices when they call."""
    device = torch.device("cuda", rank)
    weight = torch.zeros(16 * MIB, device=device)
    seen = torch.zeros((), device=device)
    torch.cuda._sleep(A_WHILE)
    if rank == 0:
        weight.fill_(7)
        await transport.send_checkpoint([1], 1, {"w": weight})
        weight.fill_(9)
        return
    seen.copy_(weight.max())
    weight.fill_(5)
    await transport.recv_checkpoint(0, "", 1, into={"w": weight}, direct=True)
    assert seen.item() == 0
    assert weight.unique().tolist() == [7]


WHATS: dict[str, Callable[[Transport, Watched, int], Any]] = {
    what.__name__: what for what in (fresh, in_place, behind_the_producer)
}


async def main(path: str, rank: int, what: str) -> None:
    """Join the group and do it."""
    torch.cuda.set_device(rank)
    store = distributed.FileStore(path, 2)  # type: ignore[attr-defined]
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    group = Watched(distributed.group.WORLD)
    device = torch.device("cuda")  # of the rank: the current one
    async with Transport(group, timeout=60, device=device) as transport:
        await WHATS[what](transport, group, rank)


@pytest.mark.parametrize("what", WHATS)
@on_a_loop
async def test_two_ranks(what: str, tmp_path: Path) -> None:
    """Both of them are content."""
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(tmp_path / "store"), str(rank), what),
        )
        for rank in range(2)
    ]
    try:
        async with asyncio.timeout(150):
            codes = [await each.wait() for each in started]
    finally:
        for each in started:
            if each.returncode is None:
                each.kill()
                await each.wait()
    assert codes == [0, 0]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # what a broken group has left must not hold up the end
