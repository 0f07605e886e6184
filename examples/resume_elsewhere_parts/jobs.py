"""Starts the ranks of a job, as torchrun does, and kills them while they train."""

import os
import socket
import sys
from collections import defaultdict
from pathlib import Path
from signal import SIGKILL
from subprocess import PIPE, Popen

TRAINER = str(Path(__file__).with_name("trainer.py"))
Losses = dict[int, float]


class Job:
    """What a job has told: its losses by step, and checksums of its states."""

    def __init__(self, mesh: str, ranks: int) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.losses: dict[str, Losses] = defaultdict(dict)  # by run
        self.saved: dict[int, str] = {}
        self.resumed: dict[int, str] = {}

    def run(self, place: str, *, kill: bool) -> None:
        """Train undisturbed from the beginning; then go on with the common run."""
        ranks = self._started(f"{place}/{self.mesh}", f"{place}/run")
        assert ranks[0].stdout
        with ranks[0].stdout as lines:
            for run, what, step, value in map(str.split, lines):
                if what == "trained":
                    self.losses[run][int(step)] = float(value)
                elif run == "run" and what == "resumed":
                    self.resumed[int(step)] = value
                elif run == "run" and what == "saving":
                    self.saved[int(step)] = value
                elif run == "run" and kill:  # it has saved a step, and trains on
                    break
            if kill:
                for rank in ranks:
                    rank.kill()
        ended = [rank.wait() for rank in ranks]
        # A rank that had ended by itself would have another code.
        assert ended == [-SIGKILL if kill else 0] * self.ranks, ended

    def _started(self, *runs: str) -> list[Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": f"{self.ranks}"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # no trace for each lost connection
        return [
            Popen(  # noqa: S603 - the program beside this one
                [sys.executable, TRAINER, self.mesh, *runs],
                env=env | {"RANK": f"{rank}"},
                stdout=None if rank else PIPE,
                text=True,
            )
            for rank in range(self.ranks)
        ]
