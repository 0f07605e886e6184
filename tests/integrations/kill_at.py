"""Run a program, and kill its process after a step of the optimizer, as a fault would.

`python kill_at.py 13 program.py`
"""

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

last, program = int(sys.argv[1]), sys.argv[2]
steps = []


def count(*_):
    steps.append(None)
    if len(steps) == last:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
sys.argv = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
