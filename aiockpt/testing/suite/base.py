"""What the parts of the suite have in common: the transports, and how to use them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch

from aiockpt.runtime.tasks import run_all
from aiockpt.transport import CheckpointTransport, Timeout

__all__ = ["PROMPT", "TURNS", "Conformance", "cancelled_after", "sample", "turn"]

T = TypeVar("T", bound=CheckpointTransport[Any])

TURNS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)
"""After how many turns of the event loop a call is cancelled."""

PROMPT: Final = 0.5
"""Seconds within which a call ends whose deadline has passed."""


class Conformance(ABC, Generic[T]):
    """Tests of a transport: how to make it, and how to move a checkpoint with it."""

    timeout: ClassVar[float] = 20.0
    """Seconds that a call which should succeed may take."""

    @abstractmethod
    def transports(self, count: int) -> AbstractAsyncContextManager[Sequence[T]]:
        """Give ``count`` started transports that reach one another; shut them down.

        The transport of rank k is at index k.
        """

    async def send(self, sender: T, state: object, *, step: int = 1) -> None:
        """Send to everybody."""
        await sender.send_checkpoint([1], step, state, self.timeout)

    async def receive(
        self,
        sender: T,
        receiver: T,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Receive from ``sender``; ``options`` are those beyond the base class."""
        limit = self.timeout if timeout is None else timeout
        receive: Any = receiver.recv_checkpoint
        return await receive(0, sender.metadata(), step, limit, **options)

    async def move(
        self, sender: T, receiver: T, state: object, *, step: int = 1, **options: Any
    ) -> Any:
        """Send and receive at the same time; return what arrived."""
        arrived: list[Any] = []

        async def receive() -> None:
            arrived.append(await self.receive(sender, receiver, step=step, **options))

        await run_all([partial(self.send, sender, state, step=step), receive])
        return arrived[0]


def sample(seed: int = 0) -> dict[str, Any]:
    """Return 360 kB of state dict, which differ from those of any other seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 300, generator=generator)
    return {
        "seed": seed,
        "weight": weight,
        "tied": weight.t(),
        "bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "sparse view": torch.randn(64, generator=generator)[::4],
        "nested": [{"scale": torch.tensor(seed)}, (None, "text")],
    }


async def cancelled_after(turns: int, call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call after some turns of the loop, and wait for its end.

    A call that ends before is fine; one that fails raises here.
    """
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            break
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def turn(count: int = 20) -> None:
    """Let everything run that can run now."""
    for _ in range(count):
        await asyncio.sleep(0)
