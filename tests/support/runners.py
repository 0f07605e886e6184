"""The end of an aiohttp runner, with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

_TURNS = 10  # of the loop, in which an accepted socket becomes a connection, and ends


@asynccontextmanager
async def ending(runner: web.AppRunner) -> AsyncIterator[None]:
    """Clean up behind the block, connections that come in that moment included.

    aiohttp and asyncio forget a socket that was accepted just before the listener was
    closed, which a client that retries brings about now and then.
    """
    server = runner.server
    assert server is not None
    try:
        yield
    finally:
        await runner.cleanup()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            for late in server.connections:
                late.force_close()
