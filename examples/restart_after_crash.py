"""A trainer is killed; its successor takes over what it staged last, from memory."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile

import torch

import aiockpt
from aiockpt.checkpointers import CheckpointProcessConfig


async def train(place: str, crash_at: int) -> None:
    weight, done = torch.zeros(1000), 0
    try:
        found = await aiockpt.recover(f"{place}/all", runtime_dir=f"{place}/run")
        weight, done = found.state_dict["weight"], found.step
        print(f"took over step {found.step} from memory")
    except aiockpt.errors.CheckpointNotFoundError:
        newest = aiockpt.latest(f"{place}/all")
        print(f"nobody keeps anything; the disk has {newest and newest.name}")
    process = CheckpointProcessConfig(keep_last_seconds=60, runtime_dir=f"{place}/run")
    config = aiockpt.CheckpointerConfig(process_config=process)
    async with aiockpt.make_async_checkpointer(config) as checkpointer:
        for step in range(done + 1, 10):
            weight += 1
            await checkpointer.save({"weight": weight}, f"{place}/all/step-{step}")
            if step == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)  # in the middle of everything
    print(f"done at step {step}, weight {weight[0]:.0f}")


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        trainer = [sys.executable, __file__, place]
        killed = subprocess.run([*trainer, "4"], check=False)  # noqa: S603 - itself
        assert killed.returncode == -signal.SIGKILL
        done = subprocess.run([*trainer, "0"], check=False)  # noqa: S603 - itself
        # Both processes have finished what they were given.
        names = [each.name for each in aiockpt.list_checkpoints(f"{place}/all")]
        print(f"on the disk: {names[0]} to {names[-1]}, {len(names)} of them")
    return done.returncode


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(train(sys.argv[1], int(sys.argv[2])))
    else:
        sys.exit(main())
