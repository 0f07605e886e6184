"""A trainer is killed while a vLLM engine updates its weights, in each phase.

vLLM itself is a stand-in here: what it does with weights is not the question. The
engine, the mirror of the host, and the trainer in its process are real.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.errors import StepNotFoundError, TransferTimeoutError
from aiockpt.testing import Drip, Fault, FaultProxy, StallAfter
from tests.support.commandline import ENVIRONMENT, beside
from tests.support.matrix import Record
from tests.support.ports import free_port
from tests.support.proofs import proves
from tests.support.vllm_stand_in import engines_on_a_stand_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

TOKEN = "the-trainers-own-token"
COUNT = 1 << 20
NBYTES = 4 * COUNT
PATIENCE = 120.0

TRAINER = """
import asyncio, sys
import torch
from tests.support.transports import transport

async def main(port, token, step):
    state = {"w": torch.full((1 << 20,), float(step))}
    async with transport(port=int(port), token=token, same_host=False) as sender:
        await sender.start()
        if int(step):
            await sender.send_checkpoint(step=int(step), state_dict=state)
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Give the module of our engines, on a stand-in for vLLM."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with engines_on_a_stand_in(monkeypatch) as module:
        yield module


class Model:
    """Counts what is loaded into it."""

    def __init__(self) -> None:
        self.weights = torch.zeros(COUNT)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weights.copy_(tensor)

    @property
    def step(self) -> float:
        """Which step all weights are of."""
        (step,) = self.weights.unique().tolist()
        return float(step)


@contextmanager
def trainer(port: int, step: int) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer that publishes a step, or nothing for step 0; kill it."""
    command = [sys.executable, "-c", TRAINER, str(port), TOKEN, str(step)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def updated(engine: Any, update: Any) -> None:
    """Update until the step is there, as an orchestrator that tries again does."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            engine.receive_weights(update)
        except TransferTimeoutError:
            assert time.monotonic() < until
        else:
            engine.finish_weight_update()
            return


PHASES = {
    "before a step is published": 0,
    "in the manifest": 300,
    "in the body": NBYTES // 2,
    "after the last byte": NBYTES,
    "between two steps": NBYTES,
}


@proves("fault 73")
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_is_killed_while_an_engine_updates(
    engines: Any, record: Record, phase: str
) -> None:
    """The old weights stay, an update ends in time, and the next trainer counts."""
    port, model = free_port(), Model()
    update = engines.UpdateInfo
    engine = engines.ReceivingEngine(None, None, torch.device("cpu"), model)
    slow: Fault = Drip(rate=4e6, burst=64 << 10)
    if phase == "in the manifest":
        slow = Drip(rate=500, burst=100)
    elif phase == "in the body":
        slow = StallAfter(NBYTES // 2)
    with beside(FaultProxy("127.0.0.1", port, otherwise=slow)) as proxy:
        url = proxy.url("/checkpoint/")
        timeout = record.pick(2.0, 3.0)
        with trainer(port, int(phase != "before a step is published")) as first:
            engine.init_transfer_engine(
                engines.InitInfo(metadata=url, timeout=timeout, token=TOKEN)
            )
            try:
                if phase == "between two steps":
                    updated(engine, update(1))
                    assert model.step == 1
                wait_until(
                    lambda: proxy.statistics().bytes_down >= PHASES[phase], phase
                )
                first.kill()
                first.wait()
                before, wanted = model.step, 1 + int(phase == "between two steps")
                began = time.monotonic()
                try:
                    engine.receive_weights(update(wanted))
                except TransferTimeoutError:
                    assert model.step == before
                else:
                    assert phase == "after the last byte"
                    assert model.step == wanted
                late = time.monotonic() - began - timeout
                record.within("beyond the deadline", late, 1.0)
                engine.finish_weight_update()
                proxy.otherwise = Fault()
                with trainer(port, 5):
                    updated(engine, update(5))
                    assert model.step == 5
                    with pytest.raises(StepNotFoundError):
                        engine.receive_weights(update(wanted))
                    assert model.step == 5
            finally:
                engine.shutdown()
    record.ran()
