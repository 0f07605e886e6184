"""The routes of the handlers, for our application and for somebody else's."""

from __future__ import annotations

from aiohttp import web

from aiockpt.http.handlers import CheckpointService
from aiockpt.wire.http import LATEST

__all__ = ["routes"]


def routes(service: CheckpointService, prefix: str) -> list[web.RouteDef]:
    """Return the routes below ``prefix`` ("" for a sub-application's root).

    They take every method: what is not ``GET`` or ``HEAD`` gets our own 405.
    """
    base = prefix.rstrip("/")
    return [
        web.route("*", f"{base}/{LATEST}", service.latest),
        web.route("*", f"{base}/{{step}}/{{what}}", service.resource),
    ]
