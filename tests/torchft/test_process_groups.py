"""PGTransport over torchft's own process groups."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial

import pytest
import torch
from torchft.process_group import ProcessGroupGloo

from tests.support.groups import Transport, in_a_thread, moved, store_at
from tests.support.transports import weights


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking", "only_waits_left")
@pytest.mark.allow_leaks("fds")  # torchft keeps a pipe from its first use on
async def test_a_quorum_of_two_replicas() -> None:
    """The transports are made in torchft's way, before their groups are ready."""
    store = store_at()  # it serves as long as it is kept
    address = f"127.0.0.1:{store.port}/quorum"
    timeout, host = timedelta(seconds=20), torch.device("cpu")
    groups = [ProcessGroupGloo(timeout) for _ in range(2)]
    async with AsyncExitStack() as stack:
        made = [Transport(group, timeout, host) for group in groups]
        ours, theirs = [await stack.enter_async_context(each) for each in made]
        calls = [
            partial(group.configure, address, f"replica {rank}", rank, 2)
            for rank, group in enumerate(groups)
        ]
        await asyncio.gather(*map(in_a_thread, calls))
        into = weights(0.0)
        assert await moved(ours, theirs, weights(1.0), into=into) is into
        await moved(ours, theirs, {"many": [torch.ones(3)] * 1000})
    for group in groups:
        group.shutdown()
