"""A batch script under a stand-in for SLURM: it is told to end, and starts again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from tests.integrations.test_resume import differences, states
from tests.support.ports import free_port

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/integrations/slurm.md"
SECONDS = 240
LAST = 1000


def put_up(place: Path) -> None:
    """Put the job, its program, and what it calls into a directory."""
    place.mkdir()
    shutil.copy(HERE / "preempted_job.py", place / "train.py")
    text = (HERE / "job.sbatch").read_text()
    for old, new in (
        ("$((20000 + SLURM_JOB_ID % 10000))", free_port()),
        ("100000", LAST),
    ):
        assert old in text
        text = text.replace(old, str(new))
    (place / "job.sbatch").write_text(text)
    commands = {
        "python": f'{sys.executable} -W ignore "$@"',
        "srun": f'{sys.executable} {HERE}/slurm_stand_in.py srun "$@"',
        "scontrol": f'{sys.executable} {HERE}/slurm_stand_in.py scontrol "$@"',
    }
    for name, command in commands.items():
        (place / name).write_text(f"#!/bin/sh\nexec {command}\n")
        (place / name).chmod(0o755)


def run(place: Path, **more: str) -> bool:
    """Run the batch script; return whether it asked to be started again."""
    (place / "requeue").unlink(missing_ok=True)
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONSAFEPATH"}
    env |= {"PATH": f"{place}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host"}
    env |= more
    code = subprocess.call(["bash", "job.sbatch"], cwd=place, env=env, timeout=SECONDS)
    again = (place / "requeue").exists()
    assert code == (75 if again else int(env.get("FAILS_BY", "0")))
    return again


def test_the_page_shows_the_script() -> None:
    """As it runs here."""
    assert f"```bash\n{(HERE / 'job.sbatch').read_text()}```\n" in PAGE.read_text()


def test_a_crash_is_a_failure_of_the_job(tmp_path: Path) -> None:
    """The batch script has the program's exit code, and asks for no other run."""
    place = tmp_path / "crashed"
    put_up(place)
    (place / "train.py").write_text("raise SystemExit(3)")
    assert not run(place, FAILS_BY="3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the job to its end; return what its ranks have saved last."""
    place = tmp_path_factory.mktemp("jobs") / "undisturbed"
    put_up(place)
    assert not run(place)
    assert not run(place)  # a job that has ended may be started again
    return states(place)


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("whom", ["", "children too"], ids=["tasks", "all"])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_preempted_job_goes_on(name, whom, undisturbed, tmp_path) -> None:
    """It commits the step at which it was told to end, and goes on from there."""
    place = tmp_path / "preempted"
    put_up(place)
    told = {"STAND_IN_SIGNAL": name, "STAND_IN_FILE": "run", "STAND_IN_CHILDREN": whom}
    assert run(place, **told)
    saved = aiockpt.latest(place / "run")
    assert saved
    assert 100 < saved.step < LAST
    assert not run(place)
    assert differences(undisturbed, states(place)) == []
