"""One rank of one of two jobs that share no world: each has its own groups and meshes.

``python job_rank.py SCENARIO WORLD DIRECTORY``; the ranks of a job share a
directory, and the sending and the receiving job the one above. It prints ``done``.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from aiockpt import PGTransport
from aiockpt.testing import assert_same
from tests.support.groups import store_in
from tests.support.sharded_rank import (
    DIRECTORY,
    RANK,
    TIMEOUT,
    WORLD,
    chunked,
    load,
    main,
    received,
    state_of,
    step,
    training,
    transport,
)


def of_a_pair(number: int) -> Any:
    """Make the group of a rank of either job: the same one of each, as torchft does."""
    store = store_in(str(DIRECTORY.parent / f"pair{RANK}"), 2)
    return dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=TIMEOUT))


async def sending_job() -> None:
    """Train, offer, and stay until the other job is through."""
    net, optimizer = training(init_device_mesh("cpu", (WORLD,)), seed=1)
    step(net, optimizer)
    state = state_of(net, optimizer) | {"sharded": chunked()}
    async with transport() as sender:
        await sender.send_checkpoint([0], step=1, state_dict=state)
        handed = DIRECTORY.parent / f"metadata{RANK}"
        handed.with_suffix(".part").write_text(sender.metadata())
        handed.with_suffix(".part").rename(handed)
        await appears(DIRECTORY.parent / f"through{RANK}")
    async with PGTransport(of_a_pair(0), TIMEOUT) as pair:
        for number in (2, 3):
            await pair.send_checkpoint([1], number, state)
    await appears(DIRECTORY.parent / f"loss{RANK}")
    whole = {name: each.full_tensor() for name, each in state["model"].items()}
    losses = [repr(step(net, optimizer)), repr(digest_of(whole))]
    assert (DIRECTORY.parent / f"loss{RANK}").read_text().split() == losses * 3


async def receiving_job() -> None:
    """Receive into models of its own, in another world of process groups."""
    mesh = init_device_mesh("cpu", (WORLD,))
    handed = DIRECTORY.parent / f"metadata{RANK}"
    await appears(handed)
    said = await resumed(mesh, await received(handed.read_text()))
    (DIRECTORY.parent / f"through{RANK}").touch()
    async with PGTransport(of_a_pair(1), TIMEOUT) as pair:
        said += await resumed(mesh, await pair.recv_checkpoint(0, "", 2))
        net, optimizer = training(mesh, seed=3)
        step(net, optimizer)
        into = state_of(net, optimizer) | {"sharded": chunked()}
        state = await pair.recv_checkpoint(0, "", 3, into=into)
        assert state["model"]["last.bias"] is into["model"]["last.bias"]
        said += await resumed(mesh, state)
    part = DIRECTORY.parent / f"loss{RANK}.part"
    part.write_text(" ".join(said))
    part.rename(DIRECTORY.parent / f"loss{RANK}")


async def resumed(mesh: DeviceMesh, state: dict[str, Any]) -> list[str]:
    """Go on with what arrived; return the loss, and what the whole tensors are."""
    assert_same(state["sharded"], chunked())
    whole = {}
    for name, tensor in state["model"].items():
        assert type(tensor) is DTensor, name
        assert tensor.device_mesh == mesh, name
        whole[name] = tensor.full_tensor()
    net, optimizer = training(mesh, seed=2)
    load(state, net, optimizer)
    return [repr(step(net, optimizer)), repr(digest_of(whole))]


def digest_of(whole: dict[str, torch.Tensor]) -> str:
    """Return what differs where one bit does."""
    data = b"".join(bytes(each.detach().numpy()) for each in whole.values())
    return hashlib.sha256(data).hexdigest()


async def appears(path: Path) -> None:
    """Wait for another process to make a file."""
    until = time.monotonic() + TIMEOUT
    while not path.exists():  # noqa: ASYNC240 - nothing else runs on this loop
        assert time.monotonic() < until, f"{path.name} never came"
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    main(sending_job, receiving_job)
