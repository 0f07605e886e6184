"""A model that the commands serve, fetch and look at, and a way to run them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commandline import CHUNK, Commands, Serving, run_aiockpt, serving


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Run commands in this process."""
    return Commands(capsys)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a torch file of two and a half chunks, some values, and tied weights."""
    import torch

    weight = torch.arange(2 * CHUNK // 4 + CHUNK // 8, dtype=torch.float32).sin()
    state = {
        "model": OrderedDict(weight=weight, tied=weight, bias=torch.ones(3)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "step": 7,
    }
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(state, path)
    return path


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Serving]:
    """Serve the model as step 7."""
    with serving(model, "--step", 7) as running:
        yield running


@pytest.fixture(scope="session")
def file(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what fetching the model gives."""
    path = tmp_path_factory.mktemp("fetched") / "model.safetensors"
    done = run_aiockpt("fetch", server.metadata, "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a torch file that no plain safetensors file can hold."""
    import torch

    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3), "optimizer": {"lr": 0.1}}, path)
    return path
