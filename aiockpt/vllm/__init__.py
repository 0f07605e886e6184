"""Weight transfer engines for vLLM: backend ``"aiockpt"``.

vLLM finds `register` by the entry point group ``vllm.general_plugins``. Then an engine
takes the backend by its name, and the trainer uses `TrainerInitInfo`::

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="aiockpt"))

    trainer = WeightTransferTrainerFactory.trainer_init(
        aiockpt.vllm.TrainerInitInfo(rank=0), client=client, source=source
    )
    trainer.send_weights()

Only `engine` imports vLLM.

========= ==================================================================
engine    the engines of a vLLM worker and of a trainer, and a source of shards
mirror    `HostMirror`: prefetches each step once per host, into shared memory
========= ==================================================================
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.vllm.engine import (
        InitInfo,
        ReceivingEngine,
        ShardSource,
        TrainerEngine,
        TrainerInitInfo,
        UpdateInfo,
    )
    from aiockpt.vllm.mirror import HostMirror

__all__ = [
    "HostMirror",
    "InitInfo",
    "ReceivingEngine",
    "ShardSource",
    "TrainerEngine",
    "TrainerInitInfo",
    "UpdateInfo",
    "register",
]

_ENGINE: Final = "aiockpt.vllm.engine"
_HOMES = {
    "HostMirror": "aiockpt.vllm.mirror",
    "InitInfo": _ENGINE,
    "ReceivingEngine": _ENGINE,
    "ShardSource": _ENGINE,
    "TrainerEngine": _ENGINE,
    "TrainerInitInfo": _ENGINE,
    "UpdateInfo": _ENGINE,
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)


def register() -> None:
    """Register the backend with vLLM's factories, in each process. Idempotent."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    factories = {
        WeightTransferEngineFactory: "ReceivingEngine",
        WeightTransferTrainerFactory: "TrainerEngine",
    }
    for factory, name in factories.items():
        with suppress(ValueError):  # it is registered already
            factory.register_engine("aiockpt", _ENGINE, name)
