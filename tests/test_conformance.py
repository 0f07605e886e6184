"""HTTPTransport passes the public suite, on every event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

from aiockpt import HTTPTransport
from aiockpt.testing import TransportConformance


@pytest.mark.asyncio
class TestHTTPTransport(TransportConformance[HTTPTransport[Any]]):
    """Over loopback, in chunks that are small enough for many requests."""

    @asynccontextmanager
    async def transports(
        self, count: int
    ) -> AsyncIterator[Sequence[HTTPTransport[Any]]]:
        """Make transports with nothing but the defaults that matter."""
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    HTTPTransport(host="127.0.0.1", chunk_bytes=64 << 10)
                )
                for _ in range(count)
            ]
