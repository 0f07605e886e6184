"""Every call ends: by its deadline, by a cancel, by the end of the transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    StepNotFoundError,
    TransferTimeoutError,
)
from aiockpt.state.equality import assert_same
from aiockpt.testing.suite.base import (
    PROMPT,
    TURNS,
    Conformance,
    cancelled_after,
    sample,
    turn,
)
from aiockpt.transport import CheckpointTransport

__all__ = ["Endings"]

T = TypeVar("T", bound=CheckpointTransport[Any])


class Endings(Conformance[T]):
    """No call outlives its deadline, and no cancel breaks a transport."""

    @pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)], ids=str)
    async def test_a_receive_times_out_promptly(self, timeout: Any) -> None:
        """The message says so in the words that torchft looks for."""
        async with self.transports(2) as (sender, receiver):
            with _prompt(), pytest.raises(TransferTimeoutError, match="timed out"):
                await self.receive(sender, receiver, timeout=timeout)
            assert_same(await self.move(sender, receiver, sample()), sample())

    async def test_a_receive_without_time_does_not_look(self) -> None:
        """A deadline of 0 has passed even if the checkpoint is there."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            with _prompt(), pytest.raises(TimeoutError, match="timed out"):
                await self.receive(sender, receiver, timeout=0)

    async def test_a_send_times_out_promptly(self) -> None:
        """Nothing is offered, and the transport goes on."""
        async with self.transports(2) as (sender, receiver):
            with _prompt(), pytest.raises(TransferTimeoutError, match="timed out"):
                await sender.send_checkpoint([1], 1, sample(1), 0)
            assert_same(await self.move(sender, receiver, sample(2)), sample(2))

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    async def test_a_senseless_timeout_is_refused(self, timeout: float) -> None:
        """It is the caller's mistake, and nothing happens."""
        async with self.transports(2) as (sender, receiver):
            with pytest.raises(ValueError, match="timeout"):
                await self.receive(sender, receiver, timeout=timeout)
            with pytest.raises(ValueError, match="timeout"):
                await sender.send_checkpoint([1], 1, sample(), timeout)

    async def test_a_cancelled_receive_leaves_the_transport_usable(self) -> None:
        """Wherever it was."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            for turns in TURNS:
                await cancelled_after(turns, self.receive(sender, receiver))
            assert_same(await self.receive(sender, receiver), sample())

    async def test_a_cancelled_wait_leaves_the_transport_usable(self) -> None:
        """Nothing was sent yet when the receive was cancelled."""
        async with self.transports(2) as (sender, receiver):
            for turns in TURNS:
                await cancelled_after(turns, self.receive(sender, receiver))
            assert_same(await self.move(sender, receiver, sample()), sample())

    async def test_a_cancelled_send_leaves_something_whole(self) -> None:
        """The old checkpoint or the new one is offered, never a mixture."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(0), step=0)
            serving = 0
            for step, turns in enumerate(TURNS, 1):
                send = self.send(sender, sample(step), step=step)
                await cancelled_after(turns, send)
                serving = await self._serving(sender, receiver, serving, step)
                assert_same(
                    await self.receive(sender, receiver, step=serving), sample(serving)
                )

    async def test_a_cancelled_disallow_can_be_repeated(self) -> None:
        """Nothing is offered after the second."""
        async with self.transports(2) as (sender, receiver):
            for turns in TURNS[:6]:
                await self.send(sender, sample())
                await cancelled_after(turns, sender.disallow_checkpoint())
                await sender.disallow_checkpoint()
                with pytest.raises(TransferTimeoutError):
                    await self.receive(sender, receiver, timeout=0.05)

    @pytest.mark.parametrize("wait", [True, False])
    async def test_shutdown_is_idempotent(self, wait: bool) -> None:  # noqa: FBT001
        """The second one finds nothing to do; no use is possible afterwards."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            metadata = sender.metadata()
            for transport in (sender, receiver) * 2:
                with _prompt():
                    await transport.shutdown(wait=wait)
            with pytest.raises(ClosedError):
                await self.send(sender, sample())
            with pytest.raises(ClosedError):
                await receiver.recv_checkpoint(0, metadata, 1, self.timeout)

    async def test_a_cancelled_shutdown_can_be_repeated(self) -> None:
        """The second one finishes what the first began."""
        for turns in TURNS[:8]:
            async with self.transports(2) as (sender, receiver):
                await self.move(sender, receiver, sample())
                await cancelled_after(turns, sender.shutdown())
                await sender.shutdown()

    async def test_a_receive_ends_with_its_transport(self) -> None:
        """It does not wait for its deadline."""
        async with self.transports(2) as (sender, receiver):
            waiting = asyncio.create_task(self.receive(sender, receiver))
            await turn()
            with _prompt():
                await receiver.shutdown(wait=False)
                await asyncio.wait({waiting})
            assert isinstance(waiting.exception(), AiockptError)

    async def _serving(self, sender: T, receiver: T, old: int, new: int) -> int:
        """Return which of two steps is offered."""
        try:
            await self.receive(sender, receiver, step=old)
        except StepNotFoundError:
            return new
        return old


@contextmanager
def _prompt() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < PROMPT
