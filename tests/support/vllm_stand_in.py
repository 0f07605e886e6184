"""Stand-ins for the modules of vLLM, so that our engines run where it is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

import aiockpt.vllm

Init = TypeVar("Init")
Update = TypeVar("Update")
Info = TypeVar("Info")


class StandIn(Generic[Init, Update]):
    """What vLLM's own engine does before ours."""

    def __init__(self, config: Any, vllm: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, config


class StandInTrainer(Generic[Info]):
    """What vLLM's own trainer's engine does before ours."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class StandInSource:
    """A source that has everything."""

    def held_names(self) -> Any:
        return None


class GatheringSource(StandInSource):
    """A source that gathers."""


class Declared(NamedTuple):
    """What a source says of a parameter."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


@dataclass
class StandInInfo:
    """What vLLM's own record of a trainer has."""

    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether this rank drives the client."""
        return self.rank == 0


@contextmanager
def engines_on_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the module of our engines."""
    names: dict[str, Any] = {
        "WeightTransferInitInfo": object,
        "WeightTransferUpdateInfo": object,
        "TrainerInitInfo": StandInInfo,
        "WeightTransferEngine": StandIn,
        "TrainerWeightTransferEngine": StandInTrainer,
        "WeightSource": StandInSource,
        "ModuleSource": GatheringSource,
        "ParamMeta": Declared,
        "VLLMWeightSyncClient": object,
    }
    loader = "vllm.model_executor.model_loader"
    parts = {
        **dict.fromkeys(("vllm", "vllm.distributed", "vllm.model_executor", loader)),
        "vllm.distributed.weight_transfer": None,
        "vllm.distributed.weight_transfer.base": names,
        f"{loader}.mtp_validation": {"disable_mtp_completeness_check": nullcontext},
        f"{loader}.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }
    for name, inside in parts.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(inside or {})
        monkeypatch.setitem(sys.modules, name, module)
    base = sys.modules["vllm.distributed.weight_transfer.base"]
    monkeypatch.setattr(
        sys.modules["vllm.distributed.weight_transfer"], "base", base, raising=False
    )
    from aiockpt.vllm import engine

    yield engine
    del sys.modules[engine.__name__]
    del aiockpt.vllm.engine
