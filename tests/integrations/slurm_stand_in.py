"""What a job needs of SLURM: `srun` with signals, and `scontrol`.

As slurmstepd does, ``srun`` sends a signal to its tasks only, and kills what they
leave behind when they have ended. ``STAND_IN_SIGNAL`` names the signal, which it sends
when ``STAND_IN_FILE`` exists. With ``STAND_IN_CHILDREN``, their children get it, too.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def descendants() -> set[int]:
    """Return all processes below this one."""
    found, parents = {os.getpid()}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = place.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(place.parent.name)] = int(text.rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def srun(*command: str) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ranks = int(os.environ["SLURM_NTASKS"])
    tasks = []
    for rank in map(str, range(ranks)):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        tasks.append(subprocess.Popen(command, env={**os.environ, **own}))
    if name := os.environ.get("STAND_IN_SIGNAL"):
        while not Path(os.environ["STAND_IN_FILE"]).exists():
            assert tasks[0].poll() is None
            time.sleep(0.01)
        told = {task.pid for task in tasks}
        if os.environ.get("STAND_IN_CHILDREN"):
            told = descendants()
        for pid in told:
            os.kill(pid, signal.Signals[name])
    codes = [task.wait() for task in tasks]
    for pid in descendants():
        os.kill(pid, signal.SIGKILL)
    return max(codes, key=abs)


def scontrol(verb: str, *words: str) -> int:
    if verb == "show":
        print("127.0.0.1")
    else:
        Path(verb).write_text(" ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
