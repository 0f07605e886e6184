"""Mount a transport in an existing aiohttp application."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeVar, overload

from aiohttp import hdrs, web

from aiockpt.errors import LocalProtocolError
from aiockpt.http import handlers
from aiockpt.http.handlers import CheckpointService
from aiockpt.http.listen import VARIABLE
from aiockpt.http.protocol import LATEST

_QUOTED = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/{}-]")


class Mountable(Protocol):
    """What an application can serve, such as an `HTTPTransport`.

    Its ``mount(prefix)`` returns the handlers. The application awaits its
    ``shutdown()`` at the end.
    """

    def mount(self, prefix: str) -> CheckpointService:
        """Return the handlers for an application that serves them below ``prefix``."""

    async def shutdown(self) -> None:
        """Serve nothing any more, once the application ends. Idempotent."""


M = TypeVar("M", bound=Mountable)

APP_KEY: web.AppKey[Any] = web.AppKey("aiockpt", object)
"""The key under which :func:`setup` keeps the transport by default.

Type checkers do not know what it holds. They do with a ``web.AppKey`` of your own.
"""


def setup(
    app: web.Application,
    transport: M,
    prefix: str = "/checkpoint",
    *,
    app_key: web.AppKey[M] = APP_KEY,
) -> None:
    """Serve ``transport`` below ``prefix`` of ``app`` while the app runs.

    Call this before the app starts. The app shuts the transport down when it ends. The
    routes check the token themselves and need no middleware of the app. Pass the public
    URL to the transport: ``advertise="https://host/checkpoint/"``. A second transport
    in the same app needs another prefix and another key. If the app has no page at the
    prefix itself, a page there shows the published step.

    Raises:
        LocalProtocolError: the app has a transport at this prefix or with this key, or
            the prefix has characters that a URL must quote.
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


def create_app(transport: Mountable) -> web.Application:
    """Return an application for ``add_subapp`` that starts and ends the transport."""
    app = web.Application()
    setup(app, transport, prefix="")
    return app


def routes(transport: Mountable, prefix: str = "/checkpoint") -> list[web.RouteDef]:
    """Return the routes only; you start the transport and shut it down.

    Raises:
        LocalProtocolError: ``prefix`` has characters that a URL must quote.
    """
    _check_prefix(prefix)
    return handlers.routes(transport.mount(prefix), prefix)


@overload
def get_transport(source: web.Application | web.Request) -> Any: ...


@overload
def get_transport(
    source: web.Application | web.Request, app_key: web.AppKey[M]
) -> M: ...


def get_transport(
    source: web.Application | web.Request, app_key: web.AppKey[Any] = APP_KEY
) -> Any:
    """Return the transport that :func:`setup` put into an app or a request's app."""
    if isinstance(source, web.Application):
        return source[app_key]
    return source.config_dict[app_key]


def serves(request: web.Request) -> bool:
    """Return whether a transport answers ``request``; a middleware should let it pass.

    A middleware that asks for a token must let it pass, because the transport asks for
    its own token in the same header. So must a middleware that renders errors, because
    receivers act on the transport's errors.
    """
    handler = request.match_info.handler
    return isinstance(getattr(handler, "__self__", None), CheckpointService)


def _check_prefix(prefix: str) -> None:
    # aiohttp finds no route with a variable part below a path that it had to quote.
    if _QUOTED.search(VARIABLE.sub("", prefix)):
        raise LocalProtocolError(
            f"prefix {prefix!r} has characters that a URL quotes: take ASCII letters, "
            "digits and punctuation, and give advertise= the public path"
        )


def _check_free(app: web.Application, prefix: str, app_key: web.AppKey[Any]) -> None:
    taken = {resource.canonical for resource in app.router.resources()}
    if app_key in app or f"{prefix.rstrip('/')}/{LATEST}" in taken:
        raise LocalProtocolError(
            f"the app has a transport at {prefix!r} or under {app_key!r} already: pass "
            "another prefix= and another app_key= for the second one"
        )


class _End:
    """Ends the transport when its application ends."""

    def __init__(self, transport: Mountable) -> None:
        self._transport = transport
        self._has_begun = False

    async def begin(self, _: web.Application) -> None:
        self._has_begun = True

    async def finish(self, _: web.Application) -> None:
        # Connections still live: readers get their grace, waiting requests an answer.
        await self._transport.shutdown()

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        yield  # an app that fails to start sends no shutdown signal
        await self._transport.shutdown()

    async def close_connection(
        self, _: web.Request, response: web.StreamResponse
    ) -> None:
        # aiohttp has closed the connections that were idle. It would wait the whole
        # timeout for a connection that becomes idle once this response is sent.
        if self._has_begun:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"
