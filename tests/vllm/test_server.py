"""vLLM's HTTP server: its routes, and an engine that is killed and replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from aiockpt import Server
from aiockpt.vllm import TrainerEngine, TrainerInitInfo
from tests.support.ports import free_port
from tests.vllm.conftest import Make, Model, answers, prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own
    pytest.mark.allow_leaks("shm"),  # semaphores of vLLM's processes that are killed
    pytest.mark.timeout(900),
]

STARTED = 240  # seconds


@contextmanager
def served(place: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run ``vllm serve`` for a model; kill it at the end."""
    port = free_port()
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(place)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--max-model-len", "128"]
    command += ["--weight-transfer-config", json.dumps({"backend": "aiockpt"})]
    command += ["--served-model-name", "tiny"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},  # it adds the routes
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + STARTED
        while not _is_healthy(url):
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < until, log.read_text()[-5000:]
            time.sleep(0.5)
        yield url, process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with all of its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_healthy(url: str) -> bool:
    with suppress(requests.ConnectionError):
        return requests.get(f"{url}/health", timeout=5).ok
    return False


def completions(url: str) -> list[list[int]]:
    """Return the tokens that a server generates."""
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    asked |= {"return_token_ids": True, "detokenize": False}
    found = []
    for each in prompts():
        body = {**asked, "prompt": each["prompt_token_ids"]}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


def version(url: str) -> str | None:
    """Return the version of the weights, as the server says it."""
    return requests.get(f"{url}/weight_info", timeout=10).json()["weight_version"]


def test_a_server_that_is_killed_and_replaced(
    model: Model, make: Make, tmp_path: Path
) -> None:
    """Each update is the same over the routes as in a freshly loaded engine."""
    place = model.save(tmp_path / "old")
    info = TrainerInitInfo(rank=0, server=Server(host="127.0.0.1"), timeout=60)
    trainer, fresh = None, []
    try:
        for number in (1, 2):
            with served(place, tmp_path / f"log-{number}") as (url, process):
                client = HTTPVLLMWeightSyncClient(url, timeout=60)
                if trainer is None:
                    trainer = TrainerEngine.trainer_init(
                        info, client=client, source=ModuleSource(model.module)
                    )
                else:
                    trainer.client = client
                    trainer.announce()
                for _ in range(2):
                    model.step(number)
                    trainer.send_weights()
                    assert version(url) == str(trainer.version)
                # The end of an engine would end the groups of the one after it.
                fresh.append(make(model.save(tmp_path / f"new-{number}")))
                assert completions(url) == answers(fresh[-1])
                assert trainer.version == 2 * number
                kill(process)
                with pytest.raises(requests.ConnectionError):
                    trainer.send_weights(step=2 * number + 1) if number == 2 else (
                        client.start_weight_update()
                    )
                assert trainer.version == 2 * number
    finally:
        if trainer is not None:
            trainer.shutdown()
