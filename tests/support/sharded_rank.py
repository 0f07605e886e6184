"""The ranks of jobs with distributed tensors, which share what is imported.

``python sharded_rank.py SCENARIO WORLD DIRECTORY``; the ranks of one job share a
directory, and those of a sending and a receiving job the one above.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import zeros
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
)

from aiockpt import HTTPTransport, PGTransport, Progress, Server
from aiockpt.testing import assert_same
from tests.support.groups import store_in
from tests.support.ranks import rank_of

TIMEOUT = 60
WORLD, DIRECTORY = int(sys.argv[2]), Path(sys.argv[3])
RANK = rank_of(WORLD)  # from here on there are as many processes


def transport() -> HTTPTransport:
    """Make one that stays on this machine."""
    return HTTPTransport(timeout=TIMEOUT, server=Server(host="127.0.0.1"))


def all_of(value: Any) -> list[Any]:
    """Return what every rank of this job has to say, by rank."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


@asynccontextmanager
async def offered(state: dict[str, Any]) -> AsyncIterator[list[str]]:
    """Offer a state dict until all ranks are through; yield who offers, by rank."""
    async with transport() as sender:
        await sender.send_checkpoint([0], step=1, state_dict=state)
        # Other ranks are served meanwhile, so nothing waits for them on the loop.
        yield await asyncio.to_thread(all_of, sender.metadata())
        await asyncio.to_thread(dist.barrier)


async def received(
    metadata: str, into: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Receive step 1."""
    async with transport() as receiver:
        return await receiver.recv_checkpoint(0, metadata, 1, into=into, **options)


class Net(nn.Module):
    """Layers of which ranks can have parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.last = nn.Linear(6, 3)  # three rows on two ranks: a short one

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return something to make smaller."""
        found: torch.Tensor = self.last(self.second(self.first(batch).relu()))
        return found


def training(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer."""
    torch.manual_seed(seed)
    net = Net()
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train one step; return the loss."""
    torch.manual_seed(7)
    optimizer.zero_grad()
    loss = net(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def load(state: dict[str, Any], net: nn.Module, optimizer: Any) -> None:
    """Give a model and its optimizer what was received."""
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def trained(net: nn.Module, *, foreach: bool) -> None:
    """Train one step."""
    step(net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=foreach))


def shares_of(net: Any) -> list[torch.Tensor]:
    """Return what this rank holds of the parameters."""
    return [each.to_local() for each in net.parameters()]


def scaled(net: nn.Module) -> None:
    """Write to what this rank holds."""
    with torch.no_grad():
        for each in shares_of(net):
            each.mul_(3)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "each": lambda net: trained(net, foreach=False),
    "foreach": lambda net: trained(net, foreach=True),
    "local": scaled,
    "gathered": lambda net: net.unshard(),
    "loaded": lambda net: net.load_state_dict(
        {name: torch.zeros_like(each) for name, each in net.state_dict().items()}
    ),
}


class Meanwhile:
    """Changes a model once, when bytes of it have been compared."""

    def __init__(self, change: Callable[[Any], Any], net: nn.Module) -> None:
        self.change, self.net, self.left = change, net, True

    def __call__(self, progress: Progress) -> None:
        if self.left and progress.stop == "fetch_chunk":
            self.left = False
            self.change(self.net)


async def prepared_while_trained() -> None:
    """A model gets all of a prepared checkpoint, whatever was done to it meanwhile."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    net, _ = training(mesh, seed=1)
    wanted = [each.clone() for each in shares_of(net)]
    async with offered(net.state_dict()) as peers, transport() as receiver:
        for change in CHANGES.values():
            for early in (True, False):
                # It holds what is offered, so nothing need be fetched or copied.
                other: Any = training(mesh, seed=1)[0]
                into = other.state_dict()
                meanwhile = Meanwhile(change, other)
                prepared = await receiver.prepare(
                    peers[RANK],
                    1,
                    into=into,
                    have=True,
                    progress=meanwhile if early else None,
                )
                meanwhile(Progress(stop="fetch_chunk"))
                await prepared.apply_async()
                assert not meanwhile.left
                for mine, right in zip(into.values(), wanted, strict=True):
                    assert torch.equal(mine.to_local(), right)
                other.reshard()
                for mine, right in zip(shares_of(other), wanted, strict=True):
                    assert torch.equal(mine, right)


def chunked() -> Any:
    """Return a ShardedTensor of one shard per rank, which tell their ranks."""
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in range(WORLD)])
    tensor = zeros(spec, 2 * WORLD, 3)
    tensor.local_shards()[0].tensor.fill_(RANK + 1)
    return tensor


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


def main(*scenarios: Callable[[], Any]) -> None:
    """Run one scenario as one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # torch's, about its own hooks
    store = f"file://{DIRECTORY / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=WORLD)
    asyncio.run({each.__name__: each for each in scenarios}[sys.argv[1]]())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        prepared_while_trained,
        sending_job,
        receiving_job,
    )
