"""Everything of the network rows at random, by one seed: nothing wrong ever arrives.

``AIOCKPT_SOAK_SEED`` repeats a run, ``AIOCKPT_SOAK_SECONDS`` makes it shorter.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from aiockpt import AiockptError
from aiockpt.testing import (
    Answer,
    BlackHole,
    CutAfter,
    Delay,
    Drip,
    Drop,
    Fault,
    FaultProxy,
    FlipBit,
    Refuse,
    StallAfter,
)
from tests.support.faultpeers import TOKEN, noise, sender
from tests.support.matrix import Record
from tests.support.proofs import proves
from tests.support.transports import MIB, Transport, port_of, transport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(1800)]

SECONDS = 600.0
LEAST = 1000
STEPS = 8  # states that are made once; step n has the content of n % STEPS
APART = 3.0  # MiB of the sender that is a process of its own
PATIENCE = 4.0

Send = Callable[[signal.Signals], None]


class Soak:
    """A trainer, receivers and faults that do what a seed says."""

    def __init__(self, seed: int, sends: Transport, record: Record) -> None:
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.over = False
        self._sends, self._record = sends, record
        self._states = [self._state(number) for number in range(STEPS)]
        self._apart = noise(APART)
        self._step = 0

    def _state(self, number: int) -> dict[str, Any]:
        size = self.random.choice([1000, MIB // 2, 3 * MIB, 6 * MIB])
        weight = noise(size / MIB, step=number)["weight"]
        return {"weight": weight, "tied": weight[7:], "number": number}

    def faults(self) -> list[Fault]:
        """Return what goes wrong with the next connections."""
        return [self._fault() for _ in range(self.random.randrange(1, 8))]

    def _fault(self) -> Fault:
        at = self.random.randrange(int(self.random.choice([2000, MIB, 6 * MIB])) + 1)
        broken: list[Fault] = [
            CutAfter(at),
            CutAfter(at, reset=True),
            StallAfter(at),
            FlipBit(at, bit=at % 8),
            Drop(at, at % 999 + 1),
            Drip(2e6, burst=20_000),
            Delay(at % 20 / 100),
            Refuse(),
            BlackHole(),
            Answer(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!"),
            Answer(self.random.randbytes(at % 999)),
        ]
        return self.random.choice([*broken, *[Fault()] * len(broken)])

    async def train(self) -> None:
        """Send, mutate what was sent, withdraw; now and then cancelled in between."""
        while not self.over:
            self._step += 1
            live = dict(self._states[self._step % STEPS])
            live["weight"] = live["weight"].clone()
            live["tied"] = live["weight"][7:]
            await self._perhaps(self._sends.send_checkpoint([], self._step, live, 10))
            live["weight"].fill_(0)
            await asyncio.sleep(self.random.uniform(0, 0.6))
            if self.random.random() < 0.2:
                await self._perhaps(self._sends.disallow_checkpoint())

    async def heal(self, receiver: Transport, proxy: FaultProxy) -> None:
        """Receive whatever step there is, through whatever goes wrong."""
        url = self._sends.metadata()
        url = url.replace(str(port_of(self._sends)), str(proxy.port))
        while not self.over:
            await self._break(proxy)
            step = max(1, self._step + self.random.choice([-1, 0, 0, 0, 1]))
            expected = self._states[step % STEPS]
            into = self._template(expected)
            await self._one(receiver, url, step, expected, into)

    async def fetch_apart(self, receiver: Transport) -> None:
        """Receive from a process that is killed, stopped and started again."""
        while not self.over:
            async with (
                sender(mib=APART) as peer,
                FaultProxy("127.0.0.1", peer.port) as proxy,
            ):
                url = peer.url.replace(str(peer.port), str(proxy.port))
                for _ in range(self.random.randrange(1, 6)):
                    await self._break(proxy)
                    end = self.random.choice([None, "kill", "stop"])
                    task = asyncio.create_task(self._hit(peer.signal, end))
                    await self._one(receiver, url, 1, self._apart, None)
                    await task
                    if end == "kill" or self.over:
                        break

    async def _hit(
        self, send: Callable[[signal.Signals], None], how: str | None
    ) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.05))
        if how == "kill":
            send(signal.SIGKILL)
        elif how == "stop":
            send(signal.SIGSTOP)
            await asyncio.sleep(self.random.uniform(0, 1))
            send(signal.SIGCONT)

    async def _break(self, proxy: FaultProxy) -> None:
        if self.random.random() < 0.5:
            await proxy.cut_all()
        done = proxy.statistics().connections
        proxy.faults = [Fault()] * done + self.faults()

    def _template(self, expected: dict[str, Any]) -> dict[str, Any] | None:
        if self.random.random() < 0.7:
            return None
        weight = torch.zeros_like(expected["weight"])
        return {"weight": weight, "tied": weight[7:], "number": -1}

    async def _one(
        self, receiver: Transport, url: str, step: int, expected: Any, into: Any
    ) -> None:
        fetch = receiver.recv_checkpoint(0, url, step, PATIENCE, into=into)
        since = time.monotonic()
        got = await self._perhaps(fetch)
        late = time.monotonic() - since - PATIENCE
        self._record.within("beyond the deadline", max(late, 0.0), 0.5)
        self._record.ran()
        if got is None:
            return
        if not torch.equal(got["weight"], expected["weight"]):
            self.outcomes["corrupt"] += 1
        if "tied" in expected:
            tied = got["tied"].data_ptr() - got["weight"].data_ptr()
            assert (tied, got["number"]) == (7, expected["number"])

    async def _perhaps(self, call: Any) -> Any:
        """Return what a call returns, unless it fails or is cancelled first."""
        task = asyncio.create_task(call)
        if self.random.random() < 0.1:
            await asyncio.wait({task}, timeout=self.random.uniform(0, 0.3))
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            self.outcomes["cancelled"] += 1
            return None
        error = task.exception()
        if error is not None and not isinstance(error, AiockptError):
            raise error
        self.outcomes["typed error" if error else "done"] += 1
        return None if error else task.result()


@proves("fault 39")
async def test_a_soak_of_random_faults_corrupts_nothing(record: Record) -> None:
    """Each result is one whole step, and everything works at the end."""
    seed = int(os.environ.get("AIOCKPT_SOAK_SEED", "39"))
    seconds = float(os.environ.get("AIOCKPT_SOAK_SECONDS", record.pick(2, SECONDS)))
    options: dict[str, Any] = {"stall_timeout": 0.5, "reconnect_timeout": 1.0}
    async with AsyncExitStack() as stack:
        sends = await stack.enter_async_context(transport(grace=0.3, **options))
        soak = Soak(seed, sends, record)
        works = [soak.train()]
        for number in range(6):
            receiver = transport(connections=number % 3 + 1, **options)
            await stack.enter_async_context(receiver)
            proxy = FaultProxy("127.0.0.1", port_of(sends))
            await stack.enter_async_context(proxy)
            works.append(soak.heal(receiver, proxy))
        apart = await stack.enter_async_context(transport(token=TOKEN, **options))
        works.append(soak.fetch_apart(apart))
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        soak.over = True
        await asyncio.gather(*tasks)
        await sends.send_checkpoint([], 10**6, soak._states[0])
        got = await receiver.recv_checkpoint(0, sends.metadata(), 10**6)
        assert torch.equal(got["weight"], soak._states[0]["weight"])
    done = soak.outcomes["done"]
    record.note(f"seed {seed}: {dict(sorted(soak.outcomes.items()))}")
    record.within("corrupt", soak.outcomes["corrupt"], 0, unit="", slack=1)
    if record.exhaustive and "AIOCKPT_SOAK_SECONDS" not in os.environ:
        record.at_least("done", done, LEAST)
