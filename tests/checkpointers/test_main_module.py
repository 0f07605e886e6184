"""What the checkpoint process does with the trainer's main module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpointing import PATIENCE
from tests.support.commandline import ENVIRONMENT

PLAIN = """
import asyncio, torch, aiockpt
print("main runs")

async def main():
    async with aiockpt.make_async_checkpointer() as checkpointer:
        handle = await checkpointer.save({"a": torch.ones(3)}, "step-1")
        assert await handle.written()

asyncio.run(main())
"""

GUARDED = """
import asyncio, os, torch, aiockpt
print("main runs as", __name__)

def init(text):
    print("child says", text, flush=True)

async def main():
    async with aiockpt.make_async_checkpointer(
        subprocess_init_fn=init, subprocess_init_args=("hello",)
    ) as checkpointer:
        assert await (await checkpointer.save({"a": torch.ones(3)}, "step-1")).written()

if __name__ == "__main__":
    asyncio.run(main())
"""

UNGUARDED = GUARDED.replace('if __name__ == "__main__":', "if True:")


def run(place: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script."""
    (place / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-u", "script.py"],
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )


def test_it_is_not_run_again(tmp_path: Path) -> None:
    """A script without a guard trains once, as multiprocessing's spawn would not."""
    done = run(tmp_path, PLAIN)
    assert (done.returncode, done.stdout) == (0, "main runs\n"), done.stderr
    assert (tmp_path / "step-1" / "commit.json").exists()


def test_a_function_of_it_makes_the_child_import_it(tmp_path: Path) -> None:
    """Under another name, so that the guard keeps it from training."""
    done = run(tmp_path, GUARDED)
    lines = ["main runs as __main__", "main runs as __mp_main__", "child says hello"]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


def test_a_missing_guard_is_named(tmp_path: Path) -> None:
    """And the child does not train."""
    done = run(tmp_path, UNGUARDED)
    assert done.returncode
    assert "guard it by `if __name__ == '__main__':`" in done.stderr
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("flag", ["-I", "-P"])
def test_isolated_interpreters_work(tmp_path: Path, flag: str) -> None:
    """The child finds what the trainer has found."""
    code = f"import sys; sys.path[:] = {sys.path!r}; exec({PLAIN!r})"
    done = subprocess.run(
        [sys.executable, flag, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
