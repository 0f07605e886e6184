"""Mount a transport in an aiohttp application that is there already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from aiockpt.errors import LocalProtocolError
from aiockpt.http import embed
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.transport import HTTPTransport
from aiockpt.wire.http import LATEST

__all__ = ["APP_KEY", "create_app", "get_transport", "routes", "serves", "setup"]

APP_KEY: web.AppKey[HTTPTransport[Any]] = web.AppKey("aiockpt", HTTPTransport)
"""Where :func:`setup` keeps the transport, unless it is told another key."""


def setup(
    app: web.Application,
    transport: HTTPTransport[Any],
    prefix: str = "/checkpoint",
    *,
    app_key: web.AppKey[HTTPTransport[Any]] = APP_KEY,
) -> None:
    """Serve ``transport`` below ``prefix`` of ``app``, for as long as the app runs.

    Call it before the app starts. The app's end shuts the transport down. The routes
    check credentials themselves and rely on none of the app's middlewares. Tell the
    transport its public URL by ``advertise="https://host/checkpoint/"``. For a second
    transport in the same app, give another prefix and another key.

    Raises:
        LocalProtocolError: the app has a transport at this prefix or with this key.
        RuntimeError: the app has started already.
    """
    _check_free(app, prefix, app_key)
    app[app_key] = transport
    app.add_routes(routes(transport, prefix))
    app.on_shutdown.append(_end(transport))
    app.cleanup_ctx.append(_lifetime(transport))


def create_app(transport: HTTPTransport[Any]) -> web.Application:
    """Return an application for ``add_subapp``, with the transport's lifetime."""
    app = web.Application()
    setup(app, transport, prefix="")
    return app


def routes(
    transport: HTTPTransport[Any], prefix: str = "/checkpoint"
) -> list[web.RouteDef]:
    """Return the plain routes; starting and ending the transport is up to you."""
    return embed.routes(transport.mount(prefix), prefix)


def get_transport(
    source: web.Application | web.Request,
    app_key: web.AppKey[HTTPTransport[Any]] = APP_KEY,
) -> HTTPTransport[Any]:
    """Return the transport that :func:`setup` put into an app or a request's app."""
    if isinstance(source, web.Application):
        return source[app_key]
    return source.config_dict[app_key]


def serves(request: web.Request) -> bool:
    """Tell whether a transport answers ``request``, for middlewares to step aside.

    One that demands credentials must: the transport demands its own, in the same
    header. So must one that renders errors, for peers act upon the transport's.
    """
    handler = request.match_info.handler
    return isinstance(getattr(handler, "__self__", None), CheckpointService)


def _check_free(
    app: web.Application, prefix: str, app_key: web.AppKey[HTTPTransport[Any]]
) -> None:
    taken = {resource.canonical for resource in app.router.resources()}
    if app_key in app or f"{prefix.rstrip('/')}/{LATEST}" in taken:
        raise LocalProtocolError(
            f"the app has a transport at {prefix!r} or under {app_key!r} already: give "
            "a second one another prefix= and an app_key= of its own"
        )


def _end(transport: HTTPTransport[Any]) -> Callable[[web.Application], Any]:
    async def end(_: web.Application) -> None:
        # While connections still live: readers get their grace, waiters an answer.
        await transport.shutdown()

    return end


def _lifetime(
    transport: HTTPTransport[Any],
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(_: web.Application) -> AsyncIterator[None]:
        yield  # a start that fails skips the signal of the shutdown
        await transport.shutdown()

    return context
