"""An FSDP2 model on two ranks; a second model of another seed becomes the same one."""

import asyncio
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import aiockpt

RANKS = 2


def make_model(mesh: DeviceMesh, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    fully_shard(model, mesh=mesh)
    return model


async def heal(healing: torch.nn.Module, trainer: torch.nn.Module) -> list[int]:
    async with (
        aiockpt.HTTPTransport() as sender,
        aiockpt.HTTPTransport() as receiver,
    ):
        # Each rank sends its own shards, to the rank at the same place of the mesh.
        state = trainer.state_dict()
        await sender.send_checkpoint(step=1, state_dict=state)
        # into= fills the model's own shards; without it, they are made on an equal
        # mesh, over the process groups that there are.
        received = await receiver.recv_checkpoint(
            metadata=sender.metadata(), step=1, into=healing.state_dict()
        )
    return list(received["0.weight"].to_local().shape)


def run(rank: int, rendezvous: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    trainer, healing = make_model(mesh, seed=1), make_model(mesh, seed=2)
    shape = asyncio.run(heal(healing, trainer))
    batch = torch.ones(4, 64)
    assert torch.equal(trainer(batch), healing(batch))
    if rank == 0:
        print(f"rank 0 received its shards, the first of {shape}; the models agree")
    dist.barrier()  # a rank that leaves first takes the others' connections with it
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        spawn(run, (f"{directory}/store",), nprocs=RANKS)  # type: ignore[no-untyped-call]
