"""A sender inside an aiohttp application that has other things to do."""

from __future__ import annotations

import socket

from aiohttp import web

from aiockpt.bench.sender import Sender
from aiockpt.http.embedding import setup
from aiockpt.http.transport import HTTPTransport
from aiockpt.runtime.bridge import Bridge

__all__ = ["SMALL", "AppSender"]

SMALL = "small"
"""The path of what the application answers besides."""

_TIMEOUT = 600.0


class AppSender(Sender):
    """Serves the state dict from an application, on the application's port."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._runner: web.AppRunner | None = None

    async def offer(self, host: str = "127.0.0.1") -> str:
        """Start the application, publish the state dict; return the metadata."""
        await self.retract()
        listening = socket.create_server((host, 0))
        base = f"http://{host}:{listening.getsockname()[1]}/"
        transport: HTTPTransport[object] = HTTPTransport(_TIMEOUT, advertise=base)
        app = web.Application()
        app.router.add_get(f"/{SMALL}", _answer)
        setup(app, transport, prefix="/")
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        await transport.send_checkpoint([1], 1, self._state, _TIMEOUT)
        return transport.metadata()

    async def retract(self) -> None:
        """End the application, and the transport with it."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await super().retract()


async def _answer(_: web.Request) -> web.Response:
    return web.json_response({"answer": 42})
