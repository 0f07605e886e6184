"""Publish from a plain training script; a worker follows it. No event loop anywhere."""

import subprocess
import sys

import torch

import aiockpt

STEPS = 3


def train() -> None:
    model = torch.nn.Linear(8, 1, bias=False)
    with aiockpt.make_background_transport() as transport:
        # Your worker may be anywhere; here it is another process of this program.
        worker = subprocess.Popen(  # noqa: S603 - itself
            [sys.executable, __file__, "work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            # Not an argument, which every user of the host can read: it has the token.
            print(transport.metadata(), file=worker.stdin, flush=True)
            for step in range(1, STEPS + 1):
                with torch.no_grad():
                    model.weight.fill_(step)  # whatever a step of training does
                transport.send_checkpoint(step=step, state_dict=model.state_dict())
                # The model may change again. A real trainer goes on at once, and its
                # worker skips steps; this one waits, so that all are shown.
                print(worker.stdout.readline(), end="")
        assert worker.returncode == 0


def work(metadata: str) -> None:
    model = torch.nn.Linear(8, 1, bias=False)
    with aiockpt.make_background_transport() as transport:
        for step, _ in transport.follow(metadata, into=model.state_dict()):
            answer = model(torch.ones(8)).item()
            print(f"the worker serves step {step}: {answer:.0f}", flush=True)
            if step == STEPS:
                break


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.stdin.readline().strip())
    else:
        train()
