"""A trainer in a process of its own: publishes a step for each line that it reads."""

from __future__ import annotations

import sys
from typing import Any

from vllm.distributed.weight_transfer.base import ModuleSource

from aiockpt import Server
from aiockpt.vllm import TrainerEngine, TrainerInitInfo
from tests.vllm.conftest import Model


class Printing:
    """A client that says what the trainer would have the engines do."""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        print(">", info["metadata"], flush=True)

    def start_weight_update(self) -> None:
        """Engines do nothing yet."""

    def update_weights(self, info: Any) -> None:
        print(">", info["step"], flush=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The test asks its own engine."""


def main() -> None:
    """Serve until killed."""
    model = Model()
    info = TrainerInitInfo(rank=0, server=Server(host="127.0.0.1"), timeout=60)
    engine = TrainerEngine.trainer_init(
        info, client=Printing(), source=ModuleSource(model.module)
    )
    for line in sys.stdin:
        model.step(int(line))
        engine.send_weights()


if __name__ == "__main__":
    main()
