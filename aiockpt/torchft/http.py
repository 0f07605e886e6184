"""A replacement of torchft's HTTP transport."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypedDict, TypeVar, Unpack

import aiockpt
from aiockpt.format.chunks import Algorithm
from aiockpt.http.options import Auth, Receive, Server, Swarm
from aiockpt.http_transport import ELSEWHERE, TransportStatistics
from aiockpt.torchft.adapter import Adapter
from aiockpt.transport import (
    Timeout,
    refuse_unknown,
    require,
    require_type,
    seconds,
)

T = TypeVar("T")

_STALL_TIMEOUT_S = 10.0
_MIN_STALL_TIMEOUT_S = 1.0


class HTTPOptions(TypedDict, total=False):
    """The options of :class:`aiockpt.HTTPTransport`, with its defaults."""

    advertise: str | None
    server: Server
    auth: Auth
    receive: Receive
    same_host: bool | None
    swarm: Swarm | bool | None
    stall_timeout: float
    chunk_bytes: int
    digest: Algorithm
    zero_copy: bool
    allow_pickle: bool


class HTTPTransport(Adapter[T]):
    """Serves checkpoints to healing replicas, and receives them, over HTTP.

    It replaces torchft's class of the same name and has the same arguments. It works
    across hosts by default: it listens on every interface, publishes the address that
    the routing table prefers, and answers only receivers that hold its metadata.

    Args:
        timeout: The default deadline of a send or a receive, in seconds or as a
            ``timedelta``. It is also the longest time that a request waits for a step
            that is not published yet.
        num_chunks: How many ranges a receive fetches in parallel; 0: the default. The
            two ends need not agree.
        **options: The options of :class:`aiockpt.HTTPTransport`, such as ``advertise``
            and ``server=Server(interface=...)`` for the address, ``auth`` for the token
            and TLS, and ``allow_pickle``. The default ``stall_timeout`` is a fifth of
            ``timeout``, at least 1 and at most 10 seconds. With ``swarm=True``,
            replicas that heal at the same time serve each other, and stop as soon as
            they are healed, since they train on.
    """

    def __init__(
        self, timeout: Timeout, num_chunks: int = 0, **options: Unpack[HTTPOptions]
    ) -> None:
        named = HTTPOptions.__annotations__
        unknown = {name: at for name, at in options.items() if name not in named}
        refuse_unknown(HTTPTransport, unknown, elsewhere=ELSEWHERE, also=named)
        lingers = not options.get("zero_copy", False)
        # A silent connection must be replaced well before the deadline.
        stall_timeout = max(seconds(timeout) / 5, _MIN_STALL_TIMEOUT_S)
        options.setdefault("stall_timeout", min(stall_timeout, _STALL_TIMEOUT_S))
        if options.get("swarm") is True:
            options["swarm"] = Swarm(linger=0.0)
        require_type(int, num_chunks=num_chunks)
        require(num_chunks=num_chunks)
        if num_chunks:
            given = options.get("receive", Receive())
            options["receive"] = replace(given, connections=num_chunks)
        transport: aiockpt.HTTPTransport[T] = aiockpt.HTTPTransport(timeout, **options)
        self._http = transport
        super().__init__(transport, timeout=timeout, lingers=lingers)

    def allow_checkpoint(self, step: int) -> None:
        """Publish the latest sent checkpoint as ``step``; a send does this itself.

        Raises:
            StepNotFoundError: nothing was sent yet, or :meth:`disallow_checkpoint` has
                retracted it; send again.
        """
        allow = partial(self._http.allow_checkpoint, step)
        self._facade.call(allow, timeout=self._timeout, phase="stage")

    def address(self) -> str:
        """Return the base URL without the token, for logs and people."""
        return self.metadata().partition("#")[0]

    def statistics(self) -> TransportStatistics:
        """Return the published step, the counters and the state of the threads."""

        async def ask() -> TransportStatistics:
            return self._http.statistics()

        return self._facade.call(ask, timeout=1.0, phase="statistics")
