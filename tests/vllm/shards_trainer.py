"""One of two FSDP ranks that publish their own shards: a step for each line it reads.

The arguments are the rank, the port at which the ranks meet, and the steps that the
model has taken. ``step SEED`` takes a step and sends it. ``meet PORT STEPS`` forms a
new group with a rank that has restarted, after so many steps. Each line is answered.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aiockpt import Server
from aiockpt.vllm import ShardSource, TrainerEngine, TrainerInitInfo
from tests.vllm.conftest import Model
from tests.vllm.trainer import Printing


def main(rank: int, port: int, steps: int) -> None:
    """Serve until killed."""
    model = sharded(rank, port, steps)
    info = TrainerInitInfo(
        rank=rank,
        server=Server(host="127.0.0.1", keep_base=True),
        timeout=60,
        shards=True,
    )
    source = ShardSource(model.module)
    engine = TrainerEngine.trainer_init(info, client=Printing(), source=source)
    for line in sys.stdin:
        verb, *numbers = line.split()
        answer = "done"
        try:
            if verb == "meet":
                dist.destroy_process_group()
                model = sharded(rank, *map(int, numbers))
                engine.source = ShardSource(model.module)
                engine.announce()
            else:
                model.step(int(numbers[0]))
                engine.send_weights()
        except Exception as error:  # noqa: BLE001 - the test reads its name
            answer = type(error).__name__
        print(">", answer, flush=True)


def sharded(rank: int, port: int, steps: int) -> Model:
    """Join a group, and return this rank's part of a model after some steps."""
    at = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2)
    model = Model()
    fully_shard(model.module, mesh=init_device_mesh("cpu", (2,)))
    for step in range(1, steps + 1):
        model.step(step)
    return model


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
