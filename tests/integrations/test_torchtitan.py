"""torchtitan's parts are saved and loaded by a manager of ours."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import ConfigManager

from tests.integrations.torchtitan_manager import BackgroundManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital':UserWarning"),  # in torchdata
]


class Steps:
    """Stands for the trainer, which has a state of its own."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Numbers(IterableDataset):
    """Stands for the text, which has no length and knows its position."""

    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Adapter:
    """Stands for that of a model, which knows Hugging Face's names."""

    hf_assets_path = None

    def to_hf(self, state):
        return {f"model.{name}": state[name] for name in state}

    def from_hf(self, state):
        return {name.removeprefix("model."): state[name] for name in state}


class Run:
    """A sharded model, and what torchtitan makes for it."""

    def __init__(self, place, degree=1, **options) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        fully_shard(self.model)
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
        config = OptimizersContainer.Config(
            param_groups=groups, implementation="for-loop"
        )
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda _: 1.0)
        self.loader = ParallelAwareDataloader(Numbers(), 0, degree)
        self.trainer = Steps()
        config = BackgroundManager.Config(
            enable=True, folder=str(place), interval=2, **options
        )
        self.manager = config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.trainer},
            sd_adapter=Adapter(),
        )

    def train(self, last: int) -> None:
        numbers = iter(self.loader)
        while self.trainer.step < last:
            torch.manual_seed(int(next(numbers)))
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.trainer.step += 1
            self.manager.save(self.trainer.step)
        self.manager.close()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.allow_leaks("threads", "fds")  # gloo's
@pytest.mark.timeout(240)
def test_a_run_goes_on(group, tmp_path) -> None:
    """The weights are those of an undisturbed run, bit for bit."""
    undisturbed, first = Run(tmp_path / "undisturbed"), Run(tmp_path / "run")
    assert not first.manager.load()
    undisturbed.train(5)
    first.train(3)
    second = Run(tmp_path / "run")
    assert second.manager.load()
    assert second.trainer.step == 2
    second.train(5)
    assert second.manager.load(step=2)
    assert second.trainer.step == 2
    assert second.manager.load()
    assert second.trainer.step == 4
    second.train(5)
    one, other = (run.model.weight.to_local() for run in (undisturbed, second))
    assert torch.equal(one, other)


@pytest.mark.allow_leaks("threads", "fds")  # gloo's
def test_a_loader_takes_no_other_degree(group, tmp_path) -> None:
    """Without its state, the rest is loaded, and the data begin anew."""
    Run(tmp_path).train(2)
    second = Run(tmp_path, degree=2)
    with pytest.raises(AssertionError, match="dp_degree is inconsistent"):
        second.manager.load()
    second.manager.close()
    third = Run(tmp_path, degree=2, exclude_from_loading=["dataloader"])
    assert third.manager.load()
    third.manager.close()
    assert third.trainer.step == 2
    assert next(iter(third.loader)) == 1


@pytest.mark.allow_leaks("threads", "fds")  # gloo's
@pytest.mark.parametrize("in_hf", [False, True], ids=["dcp", "hugging face"])
def test_a_run_begins_from_given_weights(in_hf, group, tmp_path) -> None:
    """The model has them, and nothing else has changed."""
    given = {"weight": torch.randn(8, 8), "bias": torch.randn(8)}
    place = tmp_path / "given"
    if in_hf:
        place.mkdir()
        save_file(Adapter().to_hf(given), place / "model.safetensors")
    else:
        dcp.save(given, checkpoint_id=place)
    options = {"initial_load_path": str(place), "initial_load_in_hf": in_hf}
    run = Run(tmp_path / "run", **options)
    assert run.manager.load()
    assert run.trainer.step == 0
    for name, value in run.model.state_dict().items():
        assert torch.equal(value.full_tensor(), given[name])
    run.manager.close()


@pytest.mark.allow_leaks("threads", "fds")  # gloo's
def test_a_run_begins_from_the_assets(group, tmp_path, monkeypatch) -> None:
    """As torchtitan's configurations for fine-tuning do, which name no other path."""
    given = {"weight": torch.randn(8, 8), "bias": torch.randn(8)}
    save_file(Adapter().to_hf(given), tmp_path / "model.safetensors")
    monkeypatch.setattr(Adapter, "hf_assets_path", str(tmp_path))
    run = Run(tmp_path / "run", initial_load_in_hf=True)
    assert run.manager.load()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value.full_tensor(), given[name])
    run.manager.close()


def manager_of(folder: str, *, enable: bool) -> BackgroundManager:
    config = BackgroundManager.Config(enable=enable, folder=folder)
    names = ("dataloader", "optimizers", "lr_schedulers")
    parts = dict.fromkeys(names)
    return config.build(model_parts=[], states={}, base_folder="outputs", **parts)


def test_a_folder_may_be_an_address() -> None:
    """It is not put below torchtitan's own folder, as a name is."""
    for folder, where in (("s3://one/run", "s3://one/run"), ("run", "outputs/run")):
        manager = manager_of(folder, enable=True)
        assert manager.folder == where
        manager.close()


def test_a_manager_that_is_off_starts_nothing() -> None:
    """Nobody would close it."""
    manager = manager_of("run", enable=False)
    assert not manager.load()
    assert not manager.save(1)
    manager.close()


@dataclass
class Config:
    """Stands for the configuration of Llama 3, whose module needs Triton."""

    hf_assets_path: str = "."
    checkpoint: BaseCheckpointManager.Config = field(
        default_factory=BackgroundManager.Config
    )


def test_a_configuration_names_the_manager(monkeypatch) -> None:
    """Torchtitan finds it by the name of the module, and takes other options, too."""
    llama3 = ModuleType("torchtitan.models.llama3")
    monkeypatch.setattr(
        llama3, "config_registry", SimpleNamespace(llama3_8b=Config), raising=False
    )
    monkeypatch.setitem(sys.modules, "torchtitan.models.llama3", llama3)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    words = ["--module", "torchtitan_run", "--config", "llama3_8b"]
    words += ["--checkpoint.keep_latest_k", "3"]
    words += ["--checkpoint.exclude_from_loading", "dataloader"]
    config = ConfigManager().parse_args(words)
    assert config.checkpoint.enable
    assert config.checkpoint.interval == 500
    assert config.checkpoint.keep_latest_k == 3
    assert config.checkpoint.exclude_from_loading == ["dataloader"]
    assert type(config.checkpoint).__module__ == "torchtitan_manager"
