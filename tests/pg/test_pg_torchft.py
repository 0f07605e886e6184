"""PGTransport over torchft's process groups: a stand-in, and the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed

from aiockpt.errors import ProcessGroupError, TransferTimeoutError
from aiockpt.testing import assert_same
from tests.support.groups import Transport, in_a_thread, moved, store_at
from tests.support.transports import weights
from tests.support.wrapped import Wrapped

pytestmark = pytest.mark.asyncio


async def configure(groups: list[Wrapped]) -> None:
    """Make them the ranks of a new group."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    size = len(groups)
    each = [group.configure(store, rank, size) for rank, group in enumerate(groups)]
    await asyncio.gather(*each)


@asynccontextmanager
async def over(*groups: Any, timeout: float = 20) -> AsyncIterator[list[Transport]]:
    """Make transports over groups in torchft's way: a group need not be ready yet."""
    async with AsyncExitStack() as stack:
        host = torch.device("cpu")
        made = [Transport(each, timedelta(seconds=timeout), host) for each in groups]
        yield [await stack.enter_async_context(each) for each in made]


async def exchange(sender: Transport, *receivers: Transport) -> None:
    """Send from rank 0 to all others, at once and in place; and back from the last."""
    state, into = weights(1.0), weights(0.0)
    ranks = [*range(1, len(receivers) + 1)]
    got = await asyncio.gather(
        sender.send_checkpoint(ranks, 1, state),
        *(each.recv_checkpoint(0, each.metadata(), 1) for each in receivers),
    )
    for each in got[1:]:
        assert_same(each, state)
    await asyncio.gather(
        receivers[-1].send_checkpoint([0], 2, state),
        sender.recv_checkpoint(ranks[-1], sender.metadata(), 2, into=into),
    )
    assert_same(into, state)


class TestStandIn:
    """Groups that do not know their rank, whose work is not the backend's."""

    async def test_all_ranks_are_reached(self) -> None:
        """Each group says that it is rank 0; the transport does not ask."""
        groups = [Wrapped() for _ in range(3)]
        async with over(*groups) as transports:
            await configure(groups)
            assert {group.rank() for group in groups} == {0}
            await exchange(*transports)

    async def test_no_group_is_an_error_of_its_kind(self) -> None:
        """Before it is configured, and after an abort; and it can be shown."""
        groups = [Wrapped() for _ in range(2)]
        async with over(*groups) as (ours, theirs):
            for _ in range(2):
                assert repr(ours) == "<PGTransport without a group>"
                with pytest.raises(ProcessGroupError, match="not initialized"):
                    await ours.send_checkpoint([1], 1, {})
                with pytest.raises(ProcessGroupError, match="not initialized"):
                    await ours.recv_checkpoint(1, "", 1)
                await configure(groups)
                await moved(ours, theirs, weights())
                for group in groups:
                    group.abort()

    @pytest.mark.allow_leaks("threads", "fds")  # the waiting ones
    async def test_a_new_quorum_is_a_new_transport(self) -> None:
        """The group is the same object; what was broken stays so."""
        groups = [Wrapped() for _ in range(2)]
        await configure(groups)
        async with over(*groups, timeout=0.3) as (broken, _):
            with pytest.raises(TransferTimeoutError):
                await broken.send_checkpoint([1], 1, weights())
            await configure(groups)
            with pytest.raises(ProcessGroupError, match="make a new group"):
                await broken.send_checkpoint([1], 1, weights())
            async with over(*groups) as transports:
                await exchange(*transports)


@pytest.mark.allow_leaks("fds")  # torchft keeps a pipe from its first use on
async def test_torchft_s_own_groups() -> None:
    """A quorum of two replicas, by its reconfigurable gloo."""
    room = pytest.importorskip(
        "torchft.process_group", reason="torchft is not installed"
    )
    store = store_at()
    address = f"127.0.0.1:{store.port}/quorum"
    groups = [room.ProcessGroupGloo(timedelta(seconds=20)) for _ in range(2)]
    async with over(*groups) as transports:
        calls = [
            partial(group.configure, address, f"replica {rank}", rank, 2)
            for rank, group in enumerate(groups)
        ]
        await asyncio.gather(*map(in_a_thread, calls))
        await exchange(*transports)
        ours, theirs = transports
        await moved(ours, theirs, {"many": [torch.ones(3)] * 1000})
    for group in groups:
        group.shutdown()
