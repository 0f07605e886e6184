"""The routes of the handlers, for our application and for somebody else's."""

from __future__ import annotations

from aiohttp import web

from aiockpt.http.handlers import CheckpointService
from aiockpt.http.protocol import LATEST

__all__ = ["routes"]


def routes(service: CheckpointService, prefix: str) -> list[web.RouteDef]:
    """Return the routes below ``prefix`` ("" for a sub-application's root).

    They take every method: what is not ``GET`` or ``HEAD`` gets our own 405.
    """
    base = prefix.rstrip("/")
    landings = [f"{base}/", base] if base else ["/"]
    return [
        *(web.get(path, service.landing) for path in landings),
        web.route(
            "*", f"{base}/{LATEST}", service.latest, expect_handler=_no_body_is_wanted
        ),
        web.route(
            "*",
            f"{base}/{{step}}/{{what}}",
            service.resource,
            expect_handler=_no_body_is_wanted,
        ),
    ]


async def _no_body_is_wanted(_: web.Request) -> None:
    """Answer ``Expect: 100-continue`` by the response alone (RFC 9110, 10.1.1).

    aiohttp writes its ``100 Continue`` before any handler, to clients that may have
    left, and logs that as an error.
    """
