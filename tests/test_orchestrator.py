"""The orchestrator's example, piece by piece: real processes, sockets and kills."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession

import aiockpt
from tests.support.serving import settle
from tests.support.transports import Transport, proxied, through, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGE = str(Path(aiockpt.__file__).parents[1])
INPUT = [1.0] * 64
PATIENCE = 90.0


def module(path: Path) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def model_of(step: int) -> torch.nn.Module:
    """Return the model of a step, which no two steps have in common."""
    layers = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def answer_of(step: int) -> float:
    """Return what the model of a step answers."""
    return float(model_of(step)(torch.tensor(INPUT)).detach())


async def publish(sender: Transport, step: int) -> None:
    """Offer the model of a step."""
    await sender.send_checkpoint([], step, model_of(step).state_dict())


class Worker:
    """A worker's process, and what it answered."""

    def __init__(self, process: Process, session: ClientSession) -> None:
        self.process = process
        self.url = ""
        self.steps: list[int | None] = []
        self._session = session

    async def ask(self) -> int | None:
        """Ask once; the answer must be that of a single step, and no older one."""
        async with self._session.post(self.url, json=INPUT) as answer:
            assert answer.status == 200
            document = await answer.json()
        step: int | None = document["step"]
        if step is not None:
            assert document["y"] == [pytest.approx(answer_of(step), rel=1e-3)]
        self.steps.append(step)
        return step

    async def until(self, step: int) -> None:
        """Ask until it serves a step."""
        async with asyncio.timeout(PATIENCE):
            while await self.ask() != step:  # noqa: ASYNC110 - it is asked all the time
                await asyncio.sleep(0.01)


@asynccontextmanager
async def working(metadata: str) -> AsyncIterator[Worker]:
    """Start a worker; kill it in the end."""
    process = await create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / "orchestrator_parts" / "worker.py"),
        stdin=PIPE,
        stdout=PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with ClientSession() as session:
            worker = Worker(process, session)
            process.stdin.write(f"{metadata}\n".encode())
            worker.url = (await process.stdout.readline()).decode().strip()
            assert worker.url, "it did not start"
            yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_every_answer_is_of_one_step_while_steps_come():
    """Requests never fail, never mix two steps, and never go back."""
    async with transport() as sender, working(sender.metadata()) as worker:
        await publish(sender, 1)
        await worker.until(1)
        asking = [asyncio.create_task(worker.until(12)) for _ in range(4)]
        for step in range(2, 13):
            await publish(sender, step)
            await settle(lambda: sender.statistics().waiting == 1, patience=PATIENCE)
        await asyncio.gather(*asking)
        assert worker.steps[-1] == 12
        assert {*worker.steps} - {None} <= {*range(1, 13)}
        # Each of the four asks one after the other: newer weights are never undone.
        for first, second in zip(worker.steps, worker.steps[8:], strict=False):
            assert (first or 0) <= (second or 0)


async def test_a_worker_that_was_killed_catches_up():
    """It gets the newest step at once, and its death disturbs nobody."""
    async with transport() as sender, working(sender.metadata()) as kept:
        async with working(sender.metadata()) as lost:
            await publish(sender, 1)
            await lost.until(1)
            lost.process.kill()
            await lost.process.wait()
        for step in (2, 3):
            await publish(sender, step)
        await kept.until(3)
        async with working(sender.metadata()) as again:
            await again.until(3)
            assert {*again.steps} <= {None, 3}  # it replays nothing
            await publish(sender, 4)
            await again.until(4)
            await kept.until(4)


async def test_a_worker_serves_on_while_the_trainer_is_gone():
    """With what it has, and follows again when the trainer is back."""
    async with (
        transport() as sender,
        proxied(sender) as proxy,
        working(through(proxy, sender)) as worker,
    ):
        await publish(sender, 1)
        await worker.until(1)
        proxy.refuse()
        await proxy.cut_all()
        await publish(sender, 2)
        for _ in range(20):
            assert await worker.ask() == 1
        await proxy.listen()
        await worker.until(2)


async def test_a_worker_ends_with_its_controller():
    """The end of its stdin is enough, and it ends well."""
    async with transport() as sender, working(sender.metadata()) as worker:
        await publish(sender, 1)
        await worker.until(1)
        async with asyncio.timeout(PATIENCE):
            await worker.process.communicate(b"")
        assert worker.process.returncode == 0


async def test_a_worker_that_may_not_read_fails():
    """To wait for another answer would help nobody."""
    async with (
        transport() as sender,
        working(sender.address() + "#another") as worker,
        asyncio.timeout(PATIENCE),
    ):
        await settle(lambda: sender.statistics().refused, patience=PATIENCE)
        await worker.process.communicate(b"")
        assert worker.process.returncode == 1


class Pulse:
    """Measures the longest pause of a loop."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def beat(self) -> None:
        """Come again and again."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


async def test_the_loop_of_the_controller_stays_responsive(monkeypatch, capsys):
    """Whatever it waits for, its other tasks go on."""
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    try:
        await module(EXAMPLES / "orchestrator.py").main()
    finally:
        beating.cancel()
        await asyncio.wait({beating})
    assert "is new, and serves 4" in capsys.readouterr().out
    assert pulse.longest < 2  # to start an interpreter takes longer


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_cancelled_controller_leaves_nothing(how, monkeypatch):
    """No process, no connection, at whatever it was waiting."""
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    task = asyncio.create_task(module(EXAMPLES / "orchestrator.py").main())
    if how == "cancel":
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        return
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await task
