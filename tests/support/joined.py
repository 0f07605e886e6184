"""Senders that each publish what one rank holds, and what all of them hold together.

The ranks do not exist: this process is each of them in turn. So all senders and all
receivers live on one loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import aiockpt
from aiockpt.testing import FaultProxy
from tests.support.mesh_ranks import as_rank, distributed
from tests.support.transports import MIB, Transport, port_of, proxied, transport

STEP = 7
"""The step that is published unless another one is given."""

WHOLE = torch.arange(24.0).view(8, 3)
"""A full tensor that four ranks split evenly."""

States = Callable[[int], Any]
"""Returns what a rank holds; it is called as that rank."""


def flat(world: int) -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh("cpu", (world,))


def grid() -> DeviceMesh:
    """Return a mesh of two by two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def cut(world: int, *placements: Placement, whole: torch.Tensor = WHOLE) -> DTensor:
    """Return a DTensor over all ranks, split by rows if nothing is said."""
    return distributed(whole, flat(world), *(placements or (Shard(0),)))


def numbers(mib: float) -> torch.Tensor:
    """Return a full tensor of which no two elements are equal."""
    return torch.arange(int(mib * MIB) // 4, dtype=torch.int32).view(-1, 64)


KINDS: dict[str, Callable[[torch.Tensor], DTensor]] = {
    "fsdp": lambda whole: cut(4, whole=whole),
    "hsdp": lambda whole: distributed(whole, grid(), Replicate(), Shard(0)),
}
"""How four ranks hold a full tensor: each part once, or twice."""


def states(state_of: States, world: int = 4) -> list[Any]:
    """Return what each of the ranks holds."""
    found = []
    for rank in range(world):
        with as_rank(rank, world):
            found.append(state_of(rank))
    return found


async def publish(
    senders: Sequence[Transport], state_of: States, step: int = STEP
) -> None:
    """Publish what each rank holds by the sender of that number."""
    every = zip(senders, states(state_of, len(senders)), strict=True)
    for sender, state in every:
        await sender.send_checkpoint([], step, state)


@asynccontextmanager
async def shards(
    state_of: States | None = None, world: int = 4, *, step: int = STEP, **options: Any
) -> AsyncIterator[list[Transport]]:
    """Give the senders of a job, which have published if it is said what."""
    async with AsyncExitStack() as stack:
        senders = [
            await stack.enter_async_context(transport(**options)) for _ in range(world)
        ]
        if state_of is not None:
            await publish(senders, state_of, step)
        yield senders


def joined(senders: Sequence[Transport]) -> str:
    """Return the metadata that names all senders."""
    return aiockpt.join_metadata([each.metadata() for each in senders])


@asynccontextmanager
async def proxies(senders: Sequence[Transport]) -> AsyncIterator[list[FaultProxy]]:
    """Give a proxy in front of each sender; faults are assigned later."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(proxied(each)) for each in senders]


def through(proxies: Sequence[FaultProxy], senders: Sequence[Transport]) -> str:
    """Return the metadata that names all senders, by way of their proxies."""
    return aiockpt.join_metadata(
        [
            sender.metadata().replace(f":{port_of(sender)}/", f":{proxy.port}/")
            for proxy, sender in zip(proxies, senders, strict=True)
        ]
    )


async def received(metadata: str | Sequence[str], **options: Any) -> Any:
    """Receive `STEP` by a new transport."""
    async with transport() as receiver:
        return await receiver.recv_checkpoint(
            metadata=metadata, **{"step": STEP, **options}
        )
