"""Applications of aiohttp on loopback, of which nothing is left behind."""

from __future__ import annotations

import asyncio
import socket
import ssl
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


@asynccontextmanager
async def running(
    app: web.Application,
    *,
    ssl_context: ssl.SSLContext | None = None,
    send_buffer: int = 0,
) -> AsyncIterator[int]:
    """Run an application on a port of its own, which is given.

    With a small ``send_buffer`` the kernel takes little of what it sends.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    async with ending(runner):
        listening = socket.create_server(("127.0.0.1", 0))
        if send_buffer:  # those who are accepted inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        await web.SockSite(runner, listening, ssl_context=ssl_context).start()
        yield listening.getsockname()[1]
