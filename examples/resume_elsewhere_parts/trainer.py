"""A trainer on any number of ranks; it goes on from the newest checkpoint of its run.

It runs by itself, too: `torchrun --nproc-per-node 4 trainer.py fsdp RUN`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Loader, checksum, make_model  # type: ignore[import-not-found]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import aiockpt

STEPS = int(os.environ.get("STEPS", "60"))  # it saves six times
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def train(mesh: str, run: str, checkpointer: aiockpt.BackgroundCheckpointer) -> None:
    model = make_model(mesh, RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    part, parts = (RANK, RANKS) if mesh == "fsdp" else (0, 1)  # of each batch
    loader = Loader(part, parts)
    torch.manual_seed(part)

    def training_state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        own = {"random": torch.get_rng_state(), "position": loader.at}
        return {"model": weights, "optimizer": moments, "step": step, "own": own}

    def tell(what: str, step: int, value: object) -> None:
        if RANK == 0:
            print(Path(run).name, what, step, value, flush=True)

    done, handle, found = 0, None, [aiockpt.latest(run)]
    if RANKS > 1:  # all ranks take the one that rank 0 sees
        dist.broadcast_object_list(found)
    if newest := found[0]:
        # Each rank reads what its part of the mesh needs. If another number of ranks
        # saved, what each of them had for itself ("own") stays as it is here.
        state = aiockpt.load(newest, into=training_state(0), rank_values="keep")
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        torch.set_rng_state(state["own"]["random"])
        done, loader.at = state["step"], state["own"]["position"]
        if newest.world_size != RANKS:
            loader.skip_to(done)
        tell("resumed", done, checksum(training_state(done)))
    for step in range(done + 1, STEPS + 1):
        inputs, targets = loader.next()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        mean = loss.detach() / parts
        if parts > 1:
            dist.all_reduce(mean)
        tell("trained", step, mean.item())
        is_due = step % (STEPS // 6) == 0
        if handle and (handle.done() or is_due):
            handle.result()  # all ranks have saved it; raises if one has failed
            tell("saved", handle.step, "-")
            handle = None
        if is_due:
            tell("saving", step, checksum(training_state(step)))
            handle = checkpointer.save(training_state(step), f"{run}/step-{step}")


if __name__ == "__main__":
    if RANKS > 1:
        dist.init_process_group("gloo")
    with aiockpt.make_background_checkpointer() as saving:
        for each in sys.argv[2:]:
            train(sys.argv[1], each, saving)
