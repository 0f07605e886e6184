"""Train with accelerate: a run that is killed within an epoch goes on bit for bit."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list

import aiockpt

EPOCHS = 3
WHOLE = ["model", "optimizer", "scheduler"]  # equal on all ranks

accelerator = Accelerator(
    cpu=True,  # for the test; leave it out on a GPU
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
torch.manual_seed(accelerator.process_index)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
)
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
linear = torch.optim.lr_scheduler.LinearLR(adam, total_iters=20)
loader = torch.utils.data.DataLoader(
    data, batch_size=4, shuffle=True, generator=torch.Generator()
)
model, optimizer, loader, scheduler = accelerator.prepare(net, adam, loader, linear)
unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)


def training_state(step):
    own = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    state = {"random": own, "step": step}
    if accelerator.is_main_process:  # once, not once a rank
        state["model"] = unwrapped.state_dict()
        state["optimizer"] = optimizer.state_dict()
        state["scheduler"] = scheduler.state_dict()
    return state


def resume():
    found = [aiockpt.latest("run")]
    broadcast_object_list(found)  # all ranks take the one that rank 0 sees
    if found[0] is None:
        return 0
    state = aiockpt.load(found[0], select=[*WHOLE, "random", "step"])
    unwrapped.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    cpu, *gpus = state["random"]
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus)
    return state["step"]


def train(checkpointer):
    step, handle = resume(), None
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        done = step % len(loader)
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        for batch in batches:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                if handle:
                    handle.result()  # raises if the save before has failed
                handle = checkpointer.save(training_state(step), f"run/step-{step}")
    checkpointer.save(training_state(step), f"run/step-{step}").result()


if __name__ == "__main__":
    with aiockpt.make_background_checkpointer() as checkpointer:
        train(checkpointer)
    accelerator.end_training()
