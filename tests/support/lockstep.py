"""The public suite in several processes, which all run it in step: one for each rank.

pytest runs this file in every process. `suites/test_group_transport.py` starts them.
Rank 0 sends to all others at once, and the last of them sends to rank 0 what it has
received: so each of them has a checkpoint that came from another process, by a group
that they share from the first test to the last, and each checks it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import distributed

from aiockpt.errors import PeerFailedError
from aiockpt.testing.conformance import Endings, RoundTrips, Templates
from aiockpt.transport import Timeout
from tests.support.groups import TIMEOUT, Transport, store_in

VARIABLE = "AIOCKPT_LOCKSTEP"
"""What the environment tells a process: a file to meet by, its rank, their number."""


@pytest.fixture(scope="session")
def place() -> tuple[Any, int, int]:
    """Return the group, the rank in it, and how many there are."""
    path, rank, count = os.environ[VARIABLE].split(os.pathsep)
    store = store_in(path, int(count))
    group = distributed.ProcessGroupGloo(store, int(rank), int(count), TIMEOUT)
    return group, int(rank), int(count)


class Elsewhere(Transport):
    """A transport that takes another rank where the suite names this process's own.

    The suite calls the sender 0 and the receiver 1, and every rank runs it.
    """

    async def send_checkpoint(
        self, dst_ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Send to another rank."""
        assert dst_ranks is not None
        await super().send_checkpoint([*map(self._other, dst_ranks)], *args, **kwargs)

    async def recv_checkpoint(
        self, src_rank: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        """Receive from another rank."""
        return await super().recv_checkpoint(self._other(src_rank), *args, **kwargs)

    def _other(self, rank: int) -> int:
        group: Any = self._group
        return rank if rank != group.rank() else (rank + 1) % self._size()


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestInStep(RoundTrips[Transport], Templates[Transport]):
    """Both transports that a test asks for are this process's one."""

    @pytest.fixture(autouse=True)
    def _in_step(self, place: tuple[Any, int, int]) -> Iterator[None]:
        self._group, self._rank, self._count = place
        self._offered: tuple[object, int] | None = None
        torch.manual_seed(0)  # all of them make the same state
        yield
        del self._group, self._offered

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make one, and give it both names."""
        options: dict[str, Any] = {"timeout": self.timeout, "chunk_bytes": 64 << 10}
        async with Elsewhere(self._group, **options) as ours:
            yield [ours] * count

    async def send(self, sender: Transport, state: object, *, step: int = 1) -> None:
        """Remember what the next receive is going to meet."""
        sender.metadata()  # raises once it is closed
        self._offered = state, step

    async def receive(
        self,
        sender: Transport,
        receiver: Transport,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Do this rank's part; what it did not receive it can still send."""
        limit = self.timeout if timeout is None else timeout
        peer = self._count - 1 if self._rank == 0 else 0
        receive: Any = receiver.recv_checkpoint
        receiving = receive(peer, sender.metadata(), step, limit, **options)
        if self._offered is None:
            return await receiving
        got, offered = self._offered
        if self._rank == 0:
            await self._deliver(sender, range(1, self._count), offered, got)
            return await receiving
        try:
            got = await receiving
        finally:
            if self._rank == self._count - 1:
                await self._deliver(sender, [0], offered, got)
        return got

    async def _deliver(
        self, sender: Transport, ranks: Sequence[int], step: int, state: object
    ) -> None:
        with suppress(PeerFailedError):  # what a receiver refuses it tells its test
            await sender.send_checkpoint([*ranks], step, state, self.timeout)

    test_a_senseless_timeout_is_refused = Endings.test_a_senseless_timeout_is_refused
    test_a_send_times_out_promptly = Endings.test_a_send_times_out_promptly
    test_shutdown_is_idempotent = Endings.test_shutdown_is_idempotent
    test_a_cancelled_shutdown_can_be_repeated = (
        Endings.test_a_cancelled_shutdown_can_be_repeated
    )
