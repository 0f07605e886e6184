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


class Counted:
    """A group that remembers the lengths of what it sends."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.lengths: list[int] = []

    def size(self) -> int:
        """Return how many ranks there are."""
        return int(self._group.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Send, and remember."""
        assert tensors[0].is_cuda
        self.lengths.append(tensors[0].nbytes)
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Receive."""
        assert tensors[0].is_cuda
        return self._group.recv(tensors, rank, tag)


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


def peak_rss() -> int:
    """Return the most host memory that this process has had, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def fresh(transport: Transport, group: Counted, rank: int) -> None:
    """Move it without a template; small tensors share messages."""
    if rank == 0:
        group.lengths.clear()
        await transport.send_checkpoint([1], 1, state(0, 1.5))
        assert len(group.lengths) < 50  # the large tensor has 16, of 4 MiB each
        return
    check(await transport.recv_checkpoint(0, "", 1), 1, 1.5)


async def host_memory(transport: Transport, group: Counted, rank: int) -> None:
    """Move a gigabyte that never comes to the host, at either end."""
    await fresh(transport, group, rank)  # whatever CUDA and NCCL need for themselves
    device, before = torch.device("cuda", rank), peak_rss()
    if rank == 0:
        weights = {"w": torch.ones(256 * MIB, device=device)}
        on_device = torch.cuda.memory_allocated(device)
        await transport.send_checkpoint([1], 2, weights)
        peak = torch.cuda.max_memory_allocated(device)
        assert peak - on_device < 200 * MIB  # and no second copy on the device
    else:
        got = await transport.recv_checkpoint(0, "", 2)
        assert got["w"].device == device
        assert (got["w"] == 1).all()
    assert peak_rss() - before < 200 * MIB


async def in_place(transport: Transport, group: Counted, rank: int) -> None:
    """Fill a template, at the end and straight away."""
    for step, direct in enumerate((False, True), 1):
        if rank == 0:
            await transport.send_checkpoint([1], step, state(0, float(step)))
            continue
        into = state(1, 0.0)
        got = await transport.recv_checkpoint(0, "", step, into=into, direct=direct)
        assert got["large"] is into["large"]
        check(into, 1, float(step))


async def behind_the_producer(transport: Transport, group: Counted, rank: int) -> None:
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


async def in_turn(transport: Transport, group: Counted, rank: int) -> None:
    """Two calls at once, on the one communicator of two ranks."""
    if rank == 0:
        calls = [transport.send_checkpoint([1], n, state(0, n)) for n in (1, 2)]
        await asyncio.gather(*calls)
        return
    got = await asyncio.gather(*(transport.recv_checkpoint(0, "", n) for n in (1, 2)))
    for fill, each in enumerate(got, 1):
        check(each, 1, fill)


async def refused(transport: Transport, group: Counted, rank: int) -> None:
    """A template that does not fit is told, and the group is well."""
    if rank == 0:
        with pytest.raises(aiockpt.errors.PeerFailedError, match="TemplateMismatch"):
            await transport.send_checkpoint([1], 1, state(0, 1.0))
    else:
        with pytest.raises(aiockpt.TemplateMismatchError):
            await transport.recv_checkpoint(0, "", 1, into={"w": torch.ones(2)})
    await fresh(transport, group, rank)


async def nobody_comes(transport: Transport, group: Counted, rank: int) -> None:
    """The deadline ends the wait, and nothing is aborted."""
    if rank == 1:
        with pytest.raises(
            (aiockpt.errors.TransferTimeoutError, aiockpt.errors.ProcessGroupError)
        ):
            await transport.recv_checkpoint(0, "", 1, timeout=2)
        with pytest.raises(aiockpt.errors.ProcessGroupError):
            await transport.recv_checkpoint(0, "", 1)


WHATS: dict[str, Callable[[Transport, Counted, int], Any]] = {
    what.__name__: what
    for what in (
        fresh,
        host_memory,
        in_place,
        behind_the_producer,
        in_turn,
        refused,
        nobody_comes,
    )
}


async def main(path: str, rank: int, what: str) -> None:
    """Join the group and do it."""
    torch.cuda.set_device(rank)
    store = distributed.FileStore(path, 2)  # type: ignore[attr-defined]
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    group = Counted(distributed.group.WORLD)
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
