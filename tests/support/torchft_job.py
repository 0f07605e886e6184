"""A job of several replica groups under torchft, whose ranks can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiockpt

SCRIPT = Path(__file__).parent / "torchft_replica.py"
PATHS = [str(Path(aiockpt.__file__).parents[1]), str(SCRIPT.parent)]
SECONDS = 120

Event = dict[str, Any]


@dataclass
class Life:
    """One process of one rank, from its start to its end."""

    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    def events(self, kind: str = "") -> list[Event]:
        """Return what it has told, or that of a kind."""
        lines = self.output.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if kind in ("", each["event"])]

    @property
    def digest(self) -> str:
        """What it ended with."""
        (done,) = self.events("done")
        return str(done["digest"])

    def has_trained(self) -> bool:
        """Wait until it has trained to the end, or has ended otherwise."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and '"done"' not in self.output.read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def account(self) -> str:
        """Return what it told, what it logged last, and where its threads are."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # it writes where its threads are
        told, log = self.output.read_text()[-2000:], self.log.read_text()[-6000:]
        return f"{self.output.name}, {self.process.returncode}:\n{told}\n{log}"

    def let_go(self) -> None:
        """Allow it to end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        """Return its exit code."""
        return self.process.wait(SECONDS)


class Job:
    """Starts ranks with common options; kills what is left at the end.

    Args:
        path: Where the ranks' output goes.
        options: What all ranks are told; see ``torchft_replica.Options``.
    """

    def __init__(self, path: Path, *, replicas: int, **options: Any) -> None:
        self.lives: dict[tuple[int, int], list[Life]] = {}
        self._path = path
        self._options = {"until": 8, **options, "replicas": replicas}
        self._ranks = int(options.get("ranks", 1))
        self._count = 0
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        wanted = str(self._options.get("min_replicas", 1))
        self._lighthouse = self._run(
            "lighthouse", wanted, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._lighthouse.stdout is not None
        told = json.loads(self._lighthouse.stdout.readline())
        self._options["lighthouse"] = told["address"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for life in self.all():
            life.process.kill()
            life.let_go()
            life.process.wait()
        assert self._lighthouse is not None
        self._lighthouse.kill()
        self._lighthouse.communicate()

    def all(self) -> list[Life]:
        """Return every life of every rank."""
        return [life for lives in self.lives.values() for life in lives]

    def start(self, replica: int, **options: Any) -> list[Life]:
        """Start the ranks of a replica, which may have lived before."""
        port = free_port() if self._ranks > 1 else 0
        common = {**self._options, **options, "replica": replica, "store_port": port}
        per_rank = {key: common.pop(key) for key in [*common] if key.endswith("_of")}
        started = []
        for rank in range(self._ranks):
            own = {key[:-3]: value[rank] for key, value in per_rank.items()}
            started.append(self._start({**common, **own, "rank": rank}))
            self.lives.setdefault((replica, rank), []).append(started[-1])
        return started

    def _start(self, options: dict[str, Any]) -> Life:
        name = f"{options['replica']}-{options['rank']}-{self._count}"
        self._count += 1
        output, log = self._path / f"{name}.out", self._path / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            process = self._run(
                json.dumps(options), stdin=subprocess.PIPE, stdout=out, stderr=err
            )
        return Life(process, output, log)

    def _run(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment |= {"PYTHONWARNINGS": "ignore", "TORCHFT_LOG_LEVEL": "warn"}
        options.setdefault("stderr", subprocess.DEVNULL)
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.Popen(command, env=environment, **options)

    def finish(self) -> list[Life]:
        """Wait for the last life of every rank; all must end well and alike.

        None ends before all have trained to the end: their groups need each other.
        Returns those lives, in the order of replicas and ranks.
        """
        last = [lives[-1] for _, lives in sorted(self.lives.items())]
        for life in last:
            assert life.has_trained(), "\n".join(each.account() for each in self.all())
        for life in last:
            life.let_go()
        for life in last:
            assert life.wait() == 0, f"{life.log.read_text()[-3000:]}"
        for rank in range(self._ranks):
            digests = {life.digest for life in last[rank :: self._ranks]}
            assert len(digests) == 1, digests
        return last


def killed(life: Life) -> bool:
    """Wait for the end of a rank that kills itself; tell whether it did."""
    return life.wait() == -signal.SIGKILL


def free_port() -> int:
    """Return a port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
