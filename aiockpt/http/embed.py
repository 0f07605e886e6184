"""Puts the handlers into an aiohttp application, ours or somebody else's."""

from __future__ import annotations

from aiohttp import web

from aiockpt.http.handlers import CheckpointService
from aiockpt.wire.http import LATEST

__all__ = ["attach", "create_app", "routes"]


def routes(service: CheckpointService, prefix: str) -> list[web.RouteDef]:
    """Return the routes below ``prefix`` ("" for a sub-application's root).

    They take every method: what is not ``GET`` or ``HEAD`` gets our own 405.
    """
    base = prefix.rstrip("/")
    return [
        web.route("*", f"{base}/{LATEST}", service.latest),
        web.route("*", f"{base}/{{step}}/{{what}}", service.resource),
    ]


def attach(app: web.Application, service: CheckpointService, prefix: str) -> None:
    """Add the routes to ``app``, and end the transfers when it shuts down.

    Must be called before the application starts.
    """
    app.add_routes(routes(service, prefix))

    async def close(_: web.Application) -> None:
        service.close()

    app.on_shutdown.append(close)


def create_app(service: CheckpointService, prefix: str = "") -> web.Application:
    """Return an application of its own, for a runner or for ``add_subapp``."""
    app = web.Application()
    attach(app, service, prefix)
    return app
