"""Train until done, or until a signal says that the time is over; then go on later."""

import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import aiockpt

AGAIN = 75  # the exit code that asks the batch script for another run
LAST = int(sys.argv[1])

signals = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: signals.append(number))


def time_is_over():
    flag = torch.tensor(len(signals))
    dist.all_reduce(flag, dist.ReduceOp.MAX)  # all ranks stop after the same step
    return flag.item() > 0


def training_state(model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    own = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return {"model": weights, "optimizer": moments, "random": own, "step": step}


def resume(model, optimizer):
    found = [aiockpt.latest("run")]
    dist.broadcast_object_list(found)  # all ranks take the one that rank 0 sees
    if found[0] is None:
        return 0
    state = aiockpt.load(found[0], into=training_state(model, optimizer, step=0))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    cpu, *gpus = state["random"]
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus)
    return state["step"]


def train(checkpointer):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step, over, handle = resume(model, optimizer), False, None
    while step < LAST and not over:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        over = time_is_over()
        if over or step % 100 == 0 or step == LAST:
            if handle:
                handle.result()  # raises if the save before has failed
            state = training_state(model, optimizer, step)
            if dist.get_rank() > 0:  # all have the same model: rank 0 saves it
                del state["model"], state["optimizer"]
            handle = checkpointer.save(state, f"run/step-{step}")
    if handle:
        handle.result()  # committed by all ranks, or this raises the reason
    return 0 if step == LAST else AGAIN


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with aiockpt.make_background_checkpointer() as checkpointer:
        code = train(checkpointer)
    dist.destroy_process_group()
    sys.exit(code)
