"""Background saves on hosts that lack what most hosts have."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import CheckpointProcess, CheckpointProcessConfig, RankInfo
from aiockpt.errors import StorageError, WorkerError
from aiockpt.testing import assert_same
from tests.support.commandline import ENVIRONMENT
from tests.support.shortages import in_read_only_root

SAVE = """
import aiockpt, torch
def save(path, **config):
    with aiockpt.make_background_checkpointer() as made:
        made.save({"w": torch.ones(3)}, path).result(timeout=60)
"""


def run(code: str, *arguments: str | bytes, before: str = "") -> None:
    """Run a program without a file, by a shell that prepares its place."""
    program = [sys.executable, "-c", SAVE + textwrap.dedent(code), *arguments]
    shell = ["sh", "-c", f'{before} exec "$@"', "sh"]
    done = subprocess.run(
        [*shell, *program],
        env=ENVIRONMENT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def is_saved(path: Path) -> None:
    """Check that the program has saved."""
    assert_same(aiockpt.load(path), {"w": torch.ones(3)})


def test_no_temporary_directory(tmp_path: Path) -> None:
    """A root file system that is read-only; only the target can be written."""
    code = """
    import sys, tempfile
    try: tempfile.gettempdir()
    except FileNotFoundError: save(sys.argv[1] + "/step-1")
    else: open(sys.argv[1] + "/another", "x")
    """
    program = [sys.executable, "-c", SAVE + textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(
        in_read_only_root(tmp_path, program),
        env={**ENVIRONMENT, "TMPDIR": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if (tmp_path / "another").exists():
        pytest.skip("another file system for temporary files is mounted here")
    assert done.returncode == 0, done.stderr
    is_saved(tmp_path / "step-1")


def test_closed_streams_and_an_argument_that_is_no_text(tmp_path: Path) -> None:
    """A daemon's streams are closed, and the directory of the program is gone, too.

    No socket or checkpoint gets the number of a closed stream.
    """
    code = """
    import os, sys
    os.mkdir(sys.argv[2] + "/gone")
    os.chdir(sys.argv[2] + "/gone")
    os.rmdir(sys.argv[2] + "/gone")  # torch cannot be imported there, so only now
    sys.path.append(sys.argv[1])
    save(sys.argv[2] + "/step-1")
    """
    run(code, b"--run=caf\xe9", str(tmp_path), before="exec <&- >&- 2>&-;")
    is_saved(tmp_path / "step-1")


def test_another_directory_and_a_function_of_no_module(tmp_path: Path) -> None:
    """The program has imported this package by a path that leads nowhere now.

    The error for a function of ``-c``, a notebook or a zip file says what to do.
    """
    code = """
    import multiprocessing, os, sys
    os.chdir("/")
    assert "" in sys.path or sys.flags.safe_path
    save(sys.argv[1])
    def mine(): pass
    with aiockpt.make_background_checkpointer(subprocess_init_fn=mine) as made:
        try: made.save({}, sys.argv[1]).result(timeout=60)
        except aiockpt.errors.LocalProtocolError as error:
            assert "move it to a module" in str(error), error
        else: sys.exit("it was saved")
    multiprocessing.set_start_method("spawn")  # nothing has chosen one
    """
    root = Path(aiockpt.__file__).parents[1]
    run(code, str(tmp_path / "step-1"), before=f"cd {root};")
    is_saved(tmp_path / "step-1")


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
async def test_no_place_for_the_last_snapshot(tmp_path, monkeypatch) -> None:
    """Only a process that keeps the last snapshot needs one, and the error says so."""

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    config = CheckpointProcessConfig(keep_last_seconds=5)
    made = CheckpointProcess(RankInfo(0, 1), config)
    with pytest.raises(WorkerError, match="set runtime_dir, or XDG_RUNTIME_DIR"):
        await made.ready()
    await made.close()
    with pytest.raises(StorageError, match="set runtime_dir, or XDG_RUNTIME_DIR"):
        await aiockpt.recover(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("frozen", True)])
@pytest.mark.asyncio
@pytest.mark.allow_error_logs
async def test_no_interpreter(monkeypatch, name, value) -> None:
    """An embedded or frozen Python would run itself; the error names the remedy."""
    monkeypatch.setattr(sys, name, value, raising=False)
    monkeypatch.setattr("multiprocessing.spawn._python_exe", sys.executable)
    made = CheckpointProcess(RankInfo(0, 1))
    with pytest.raises(WorkerError, match="use_process=False"):
        await made.ready()
    await made.close()
