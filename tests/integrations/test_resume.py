"""A run that is killed, and goes on, ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from tests.support.ports import free_port
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/howto/resume-training.md"
SECONDS = 240


def run(
    place: Path,
    program: str,
    *words: str,
    kill_at: int = 0,
    ranks: int = 1,
    own: dict[str, str] | None = None,
) -> int:
    """Run a program in a directory, with torchrun on several ranks.

    Args:
        kill_at: The step after which its processes are killed. 0: none.
        ranks: Their number; but see `own`.
        own: Variables by which the program itself starts the other ranks.
    """
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        port = ("--master-port", str(free_port()))
        command += ["-m", "torch.distributed.run", *port, f"--nproc-per-node={ranks}"]
    if kill_at:
        command += [str(HERE / "kill_at.py"), str(kill_at)]
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*command, str(HERE / program), *words],
        cwd=place,
        env={**env, "OMP_NUM_THREADS": "1", **(own or {})},
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode


def wait_for(place: Path, step: int) -> str:
    """Wait until what a killed job has handed over is committed."""

    def newest() -> int:
        found = aiockpt.latest(place / "run")
        return found.step if found else 0

    wait_until(lambda: newest() == step, f"the commit of step {step}")
    return os.fspath(aiockpt.latest(place / "run") or "")


def states(place: Path) -> list[Any]:
    """Return what each rank has saved last."""
    found = aiockpt.latest(place / "run")
    assert found
    return [aiockpt.load(found, rank=rank) for rank in range(found.world_size)]


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two states differ."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [path]
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        pairs = [(at, *each) for at, each in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [path]
    return [
        found for key, a, b in pairs for found in differences(a, b, f"{path}.{key}")
    ]


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", ["accelerate_job.py", "trainer_job.py"])
def test_a_killed_run_goes_on_within_its_epoch(program, ranks, tmp_path) -> None:
    """All that was saved at the end is equal, of every rank."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run(undisturbed, program, ranks=ranks) == 0
    # An epoch has 16 steps, or 8 on each of two ranks.
    assert run(killed, program, kill_at=13, ranks=ranks) != 0
    wait_for(killed, step=10)
    assert run(killed, program, ranks=ranks) == 0
    assert run(killed, program, ranks=ranks) == 0  # nothing is left to do
    assert differences(states(undisturbed), states(killed)) == []


@pytest.mark.timeout(4 * SECONDS)
def test_the_page_resumes_on_other_numbers_of_ranks(tmp_path) -> None:
    """Its first program goes on with FSDP under torchrun, and by itself."""
    text = PAGE.read_text().split("```python\n")[1].partition("```")[0]
    assert "31)" in text
    for last, ranks in ((10, 2), (20, 3), (30, 1)):
        program = tmp_path / "train.py"
        program.write_text(text.replace("31)", f"{last + 1})"))
        assert run(tmp_path, str(program), ranks=ranks) == 0
        wait_for(tmp_path, step=last)
        assert len(states(tmp_path)) == ranks
        [moments] = states(tmp_path)[:1]
        assert moments["optimizer"]["state"]["weight"]["step"] == last


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_goes_on(ranks, tmp_path) -> None:
    """It begins the epoch again in which it was killed; the two best stay."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    program, own = "lightning_job.py", {"RANKS": str(ranks)}
    assert run(undisturbed, program, own=own) == 0
    epoch = 16 // ranks
    assert run(killed, program, kill_at=2 * epoch + 3, own=own) != 0
    newest = wait_for(killed, step=2 * epoch)
    assert run(killed, program, newest, own=own) == 0
    assert len(aiockpt.list_checkpoints(undisturbed / "run")) == 2
    kept = aiockpt.list_checkpoints(killed / "run")
    assert len(kept) == 3  # Lightning leaves the one from which it resumed
    [one], [other] = states(undisturbed), states(killed)
    for state in (one, other):
        del state["callbacks"]  # it has the paths of checkpoints
    assert one["global_step"] == 4 * epoch
    assert differences(one, other) == []
