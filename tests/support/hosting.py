"""The application of ``examples/embedding.py``, running, with TLS or without."""

from __future__ import annotations

import importlib.util
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

import aiockpt.http
from tests.support.runners import ending
from tests.support.transports import Transport

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedding.py"


@cache
def example() -> Any:
    """Import the example as a module."""
    spec = importlib.util.spec_from_file_location("embedding_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Host:
    """A running application and the two transports in it."""

    app: web.Application
    runner: web.AppRunner
    url: str

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def model(self) -> Transport:
        """The first transport, at ``/model``."""
        return aiockpt.http.get_transport(self.app)

    @property
    def average(self) -> Transport:
        """The second one, at ``/average``."""
        return aiockpt.http.get_transport(self.app, example().AVERAGE)


@asynccontextmanager
async def running(
    app: web.Application,
    listening: socket.socket | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    shutdown_timeout: float = 5,
) -> AsyncIterator[Host]:
    """Run an application on loopback."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    listening = listening or socket.create_server(("127.0.0.1", 0))
    site = web.SockSite(runner, listening, ssl_context=ssl_context)
    await site.start()
    scheme = "https" if ssl_context else "http"
    async with ending(runner):
        yield Host(app, runner, f"{scheme}://127.0.0.1:{listening.getsockname()[1]}")


@asynccontextmanager
async def running_example(
    *, public: str = "", ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[Host]:
    """Run the example's application, which is reached at ``public``, or directly."""
    listening = socket.create_server(("127.0.0.1", 0))
    scheme = "https" if ssl_context else "http"
    direct = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
    app = example().make_app(public.rstrip("/") or direct)
    async with running(app, listening, ssl_context=ssl_context) as host:
        yield host


@cache
def certified() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a context for servers on 127.0.0.1, and one for clients that trust it."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client
