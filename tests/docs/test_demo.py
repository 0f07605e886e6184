"""The demo: a training state arrives whole, through a connection that is cut."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.commandline import ENVIRONMENT, PATIENCE

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def run_demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program in another process."""
    # The program's own directory has the modules that it imports.
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, DEMO, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.timeout(180)  # two processes import torch, on a machine that may be slow
def test_it_shows_a_resume_and_verifies_every_value(tmp_path: Path) -> None:
    """A small model is enough, with nested modules and a buffer."""
    tensors = {
        "encoder.0.weight": torch.randn(3000, 3000),
        "encoder.0.bias": torch.zeros(3000),
        "head.weight": torch.randn(10, 3000).half(),
        "positions": torch.arange(10),
    }
    save_file(tensors, tmp_path / "small.safetensors")
    done = run_demo(tmp_path / "small.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    model, sender, state, received, resumed, verified = done.stdout.splitlines()
    assert model == "model     small.safetensors: 36.1 MB in 4 tensors"
    assert re.fullmatch(r"sender +another process; staged in \d+\.\d+ s", sender)
    assert re.match(r"state +108\.\d MB, 3\.0 times the model: .* moments", state)
    assert re.fullmatch(r"received +in .* s \(.* GB/s\)", received)
    assert re.match(r"resumed +in .* s, all connections cut half way, ", resumed)
    assert int(re.findall(r"(\d+) requests made again", resumed)[0]) > 0
    assert verified.startswith("verified  both times, every tensor and value")
