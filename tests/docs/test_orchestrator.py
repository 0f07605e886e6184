"""The workers of the orchestrator's example: real processes, sockets and kills."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession

from tests.support.servers import settle
from tests.support.transports import proxied, through, transport

pytestmark = pytest.mark.asyncio

EXAMPLES = Path(__file__).parents[2] / "examples"
INPUT = [1.0] * 64
PATIENCE = 50.0


def model_of(step: int) -> torch.nn.Module:
    """Return the model of a step, which no two steps have in common."""
    layers = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


async def publish(sender, step):
    """Offer the model of a step."""
    await sender.send_checkpoint([], step, model_of(step).state_dict())


class Worker:
    """A worker's process, and what it answered."""

    def __init__(self, process, session):
        self.process, self.url, self.steps = process, "", list[int | None]()
        self._session = session

    async def ask(self):
        """Ask once; the answer must be that of a single step."""
        async with self._session.post(self.url, json=INPUT) as answer:
            assert answer.status == 200
            document = await answer.json()
        step = document["step"]
        if step is not None:
            expected = float(model_of(step)(torch.tensor(INPUT)).detach())
            assert document["y"] == [pytest.approx(expected, rel=1e-3)]
        self.steps.append(step)
        return step

    async def until(self, step):
        """Ask until it serves a step."""
        async with asyncio.timeout(PATIENCE):
            while await self.ask() != step:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)


@asynccontextmanager
async def working(metadata):
    """Start a worker; kill it in the end."""
    script = str(EXAMPLES / "orchestrator_parts" / "worker.py")
    process = await create_subprocess_exec(
        *(sys.executable, script), stdin=PIPE, stdout=PIPE
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
    """Requests never fail, never mix two steps, and never go back.

    The end of its stdin ends the worker, and it ends well.
    """
    async with transport() as sender, working(sender.metadata()) as worker:
        await publish(sender, 1)
        await worker.until(1)
        asking = [asyncio.create_task(worker.until(8)) for _ in range(4)]
        for step in range(2, 9):
            await publish(sender, step)
            await settle(lambda: sender.statistics().waiting == 1, patience=PATIENCE)
        await asyncio.gather(*asking)
        assert {*worker.steps} - {None} <= {*range(1, 9)}
        # Each of the four asks one after the other: newer weights are never undone.
        for first, second in zip(worker.steps, worker.steps[8:], strict=False):
            assert (first or 0) <= (second or 0)
        async with asyncio.timeout(PATIENCE):
            await worker.process.communicate(b"")
        assert worker.process.returncode == 0


async def test_a_worker_serves_on_while_the_trainer_is_gone():
    """The worker serves what it has, and follows again later."""
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
