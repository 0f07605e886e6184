"""Accept connections, and bound how many there are.

Every connection takes a descriptor of a process that also trains, and anybody who
reaches the port can connect. So connections that have not shown a token are few, and
the oldest of them makes way for a new one. When few descriptors are left, each new
connection costs another one: an idle one without a token, or an idle one, or one of the
host that has the most. If the new one's host has as many, the new one is closed. If
there is no descriptor left to accept with, the kernel's backlog holds the newcomers.
The log says so once a minute.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from aiockpt.events import LogLimit
from aiockpt.http.security import network_of
from aiockpt.runtime.children import close_in_forks
from aiockpt.runtime.system import descriptor_limit, is_hosts

logger = logging.getLogger("aiockpt")

_MAX_STRANGERS: Final = 1024  # connections that have not shown a token
_MAX_SPARED: Final = 256  # descriptors that are left to the application
_LIMIT_PART: Final = 4  # both are at most a fourth of the process's descriptors
_MIN_CONNECTIONS: Final = 32  # are kept however few descriptors are left
_FIRST_REQUEST_S: Final = 0.5  # in which a new connection may send a request
_RETRY_S: Final = 0.25  # until the next try to accept
_CLOSED_PER_SHORTAGE: Final = 16  # idle connections, if no descriptor is left
_ACCEPTED_PER_ROUND: Final = 64  # connections in one round of the loop
_CLOSED_BY_UVLOOP: Final = "the handler is closed"  # a write after the connection ended


class Caller(web.RequestHandler):
    """One accepted connection.

    Attributes:
        host: The host at its other end, as `network_of` names it.
        since: When it was accepted, or when its last answer ended, in loop time.
        is_known: Whether it has sent a request that may be answered.
    """

    __slots__ = ("_acceptor", "_requests", "host", "is_known", "since")

    def __init__(
        self, acceptor: Acceptor, server: web.Server, host: str, **options: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        self._acceptor, self._requests, self.host = acceptor, 0, host
        self.since, self.is_known = loop.time(), False

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Keep the connection open during the block, which handles a request of it."""
        self._requests += 1
        self._acceptor.busy(self)
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._acceptor.idle(self)

    def know(self) -> None:
        """Note that it has sent a request that may be answered."""
        self._acceptor.know(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is no HTTP.

        The answer and the log repeat nothing of the request, which may have a token.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        answer = web.Response(status=status, text="the request is not valid HTTP\n")
        answer.force_close()
        return answer

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """Log an error of a handler, if none of its type was logged for a minute."""
        error = options.get("exc_info")
        if type(error) is RuntimeError and _CLOSED_BY_UVLOOP in str(error):
            return
        if self._acceptor.log_limit.passes(type(error)):
            super().log_exception(*arguments, **options)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._acceptor.lost(self)


class Acceptor:
    """Accepts connections on sockets, which it owns, for a server of aiohttp.

    Args:
        sockets: They listen.
        server: Handles the requests.
        ssl_context: Speak TLS with it.
        options: Options of each connection, as `web.AppRunner` takes them.

    Attributes:
        log_limit: Bounds what connections can have logged.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        server: web.Server,
        *,
        ssl_context: ssl.SSLContext | None,
        options: dict[str, Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._server, self._options = server, options
        self._ssl_context = ssl_context
        self._limit = descriptor_limit()
        # By host. The one that has begun no request for the longest time comes first.
        self._callers: dict[str, OrderedDict[Caller, None]] = {}
        self._strangers = 0
        # Those that can be closed, in this order.
        self._idle_strangers = OrderedDict[Caller, None]()
        self._idle = OrderedDict[Caller, None]()
        self._opening: dict[Caller, asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.log_limit = LogLimit(self._loop.time)
        close_in_forks(self._sockets)
        for each in self._sockets:
            each.settimeout(0)
        self._resume()

    async def aclose(self) -> None:
        """Stop listening, and end the connections that are not open yet."""
        self._stop_reading()
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()
        opening = tuple(self._opening.values())
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)

    # -------------------------------------------------------------- connections

    def busy(self, caller: Caller) -> None:
        """Note that a connection handles a request, so that it is not idle."""
        if self._has(caller):
            self._callers[caller.host].move_to_end(caller)
            self._idle_strangers.pop(caller, None)
            self._idle.pop(caller, None)

    def idle(self, caller: Caller) -> None:
        """Note that a connection handles no request, so that it may be closed."""
        if not self._has(caller):
            return
        if caller.is_known:
            caller.since = self._loop.time()
            self._idle[caller] = None
        else:  # it has had its chance
            caller.since = -_FIRST_REQUEST_S
            self._idle_strangers[caller] = None
            self._idle_strangers.move_to_end(caller, last=False)

    def know(self, caller: Caller) -> None:
        """Note that a connection has sent a request that may be answered."""
        if not caller.is_known and self._has(caller):
            caller.is_known = True
            self._strangers -= 1
            self._resume_soon()

    def lost(self, caller: Caller) -> None:
        """Forget a connection."""
        if self._has(caller):
            self.busy(caller)
            del self._callers[caller.host][caller]
            if not self._callers[caller.host]:
                del self._callers[caller.host]
            self._strangers -= not caller.is_known
            self._resume_soon()

    def _has(self, caller: Caller) -> bool:
        return caller in self._callers.get(caller.host, ())

    def _count(self) -> int:
        return sum(map(len, self._callers.values()))

    # ---------------------------------------------------------------- accepting

    def _accept(self, listening: socket.socket) -> None:
        most = min(self._limit // _LIMIT_PART, _MAX_STRANGERS)
        for _ in range(_ACCEPTED_PER_ROUND):
            if self._strangers >= most and not self._close_first(self._idle_strangers):
                self._pause()
                return
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if is_hosts(error):
                    self._warn_of_shortage(str(error))
                    for _ in range(_CLOSED_PER_SHORTAGE):
                        self._close_idle()
                else:  # such as a firewall's
                    self._warn(str(error))
                self._pause()
                return
            self._admit(accepted, network_of(address[0]))

    def _admit(self, accepted: socket.socket, host: str) -> None:
        accepted.settimeout(0)
        close_in_forks([accepted])
        # The kernel gives the lowest number that is free, so all lower ones are taken.
        spared = min(self._limit // _LIMIT_PART, _MAX_SPARED)
        is_scarce = accepted.fileno() >= self._limit - spared
        if is_scarce and not self._make_way(host):
            self._warn_of_shortage("connections that are in use have taken all")
            accepted.close()
            return
        caller = Caller(self, self._server, host, **self._options)
        self._callers.setdefault(host, OrderedDict())[caller] = None
        self._strangers += 1
        self._idle_strangers[caller] = None
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: caller, accepted, ssl=self._ssl_context
            )
        )
        self._opening[caller] = opening

        def opened(task: asyncio.Task[Any]) -> None:
            del self._opening[caller]
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                accepted.close()
                self.lost(caller)
            if error is None or isinstance(error, OSError):
                return
            if self.log_limit.passes(type(error)):
                logger.error("a connection could not be opened", exc_info=error)

        opening.add_done_callback(opened)

    def _make_way(self, host: str) -> bool:
        """Close a connection for a new one of a host; return whether it may come."""
        if self._count() < _MIN_CONNECTIONS or self._close_idle():
            return True
        most = max(self._callers.values(), key=len)
        if len(most) <= len(self._callers.get(host, ())) + 1:
            return False
        self._close(next(iter(most)))
        return True

    def _close_idle(self) -> bool:
        return self._close_first(self._idle_strangers) or self._close_first(self._idle)

    def _close_first(self, among: OrderedDict[Caller, None]) -> bool:
        caller = next(iter(among), None)
        if caller is None or self._loop.time() - caller.since < _FIRST_REQUEST_S:
            return False
        self._close(caller)
        return True

    def _close(self, caller: Caller) -> None:
        opening = self._opening.get(caller)
        if opening is not None:
            opening.cancel()
        transport = caller.transport
        self.lost(caller)
        if transport is not None:
            transport.abort()

    # ------------------------------------------------------------------ pausing

    def _pause(self) -> None:
        """Leave newcomers to the kernel until something has ended, or for a moment."""
        self._stop_reading()
        self._timer = self._loop.call_later(_RETRY_S, self._resume)

    def _resume_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(0, self._resume)

    def _resume(self) -> None:
        self._timer = None
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _stop_reading(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for each in self._sockets:
            with suppress(OSError, ValueError):
                self._loop.remove_reader(each)

    def _warn_of_shortage(self, why: str) -> None:
        self._warn(
            f"few descriptors are left: {why}; this process may open {self._limit} "
            f"files, with {self._count()} connections among them: raise the limit "
            "with `ulimit -n`"
        )

    def _warn(self, why: str) -> None:
        if self.log_limit.passes():
            logger.warning("new receivers have to wait: %s", why)
