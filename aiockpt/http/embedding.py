"""Mount a transport in an aiohttp application that is there already."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import hdrs, web

from aiockpt.errors import LocalProtocolError
from aiockpt.http import handlers
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.protocol import LATEST
from aiockpt.http.transport import HTTPTransport

__all__ = ["APP_KEY", "create_app", "get_transport", "routes", "serves", "setup"]

_VARIABLE = re.compile(r"\{[^{}]*\}")  # such as {run}, for aiohttp to fill in
_QUOTED = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/{}-]")

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
    check the token themselves and rely on none of the app's middlewares. Tell the
    transport its public URL by ``advertise="https://host/checkpoint/"``. For a second
    transport in the same app, give another prefix and another key. A page that the app
    has at the prefix itself stays; else it says what is served.

    Raises:
        LocalProtocolError: the app has a transport at this prefix or with this key, or
            the prefix has characters that a URL would quote.
        RuntimeError: the app has started already.
    """
    _check_prefix(prefix)
    _check_free(app, prefix, app_key)
    app[app_key] = transport
    own = {resource.canonical for resource in app.router.resources()}
    app.add_routes(each for each in routes(transport, prefix) if each.path not in own)
    end = _End(transport)
    app.on_response_prepare.append(end.close_connection)
    app.on_shutdown.insert(0, end.begin)
    app.on_shutdown.append(end.finish)
    app.cleanup_ctx.append(end.lifetime)


def create_app(transport: HTTPTransport[Any]) -> web.Application:
    """Return an application for ``add_subapp``, with the transport's lifetime."""
    app = web.Application()
    setup(app, transport, prefix="")
    return app


def routes(
    transport: HTTPTransport[Any], prefix: str = "/checkpoint"
) -> list[web.RouteDef]:
    """Return the plain routes; starting and ending the transport is up to you.

    Raises:
        LocalProtocolError: ``prefix`` has characters that a URL would quote.
    """
    _check_prefix(prefix)
    return handlers.routes(transport.mount(prefix), prefix)


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

    One that demands a token must: the transport demands its own, in the same
    header. So must one that renders errors, for peers act upon the transport's.
    """
    handler = request.match_info.handler
    return isinstance(getattr(handler, "__self__", None), CheckpointService)


def _check_prefix(prefix: str) -> None:
    # aiohttp finds no route with a variable part below a path that it had to quote.
    if _QUOTED.search(_VARIABLE.sub("", prefix)):
        raise LocalProtocolError(
            f"prefix {prefix!r} has characters that a URL quotes: take ASCII letters, "
            "digits and punctuation, and give advertise= the public path"
        )


def _check_free(
    app: web.Application, prefix: str, app_key: web.AppKey[HTTPTransport[Any]]
) -> None:
    taken = {resource.canonical for resource in app.router.resources()}
    if app_key in app or f"{prefix.rstrip('/')}/{LATEST}" in taken:
        raise LocalProtocolError(
            f"the app has a transport at {prefix!r} or under {app_key!r} already: give "
            "a second one another prefix= and an app_key= of its own"
        )


class _End:
    """The end of an application, and of the transport with it."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self._transport = transport
        self._has_begun = False

    async def begin(self, _: web.Application) -> None:
        self._has_begun = True

    async def finish(self, _: web.Application) -> None:
        # While connections still live: readers get their grace, waiters an answer.
        await self._transport.shutdown()

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        yield  # a start that fails skips the signal of the shutdown
        await self._transport.shutdown()

    async def close_connection(
        self, _: web.Request, response: web.StreamResponse
    ) -> None:
        # aiohttp told the idle connections of its end before; for one that came to be
        # since, and is idle once this is sent, it would wait the whole timeout.
        if self._has_begun:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"
