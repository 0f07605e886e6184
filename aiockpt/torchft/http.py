"""torchft's HTTP transport, replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypedDict, TypeVar, Unpack

import aiockpt
from aiockpt.http.options import Auth, Receive, Server
from aiockpt.http.transport import TransportStatistics
from aiockpt.torchft.adapter import Adapter
from aiockpt.transport import Timeout, seconds

__all__ = ["HTTPOptions", "HTTPTransport"]

T = TypeVar("T")

_STALL_TIMEOUT = 10.0
_SHORTEST_STALL = 1.0


class HTTPOptions(TypedDict, total=False):
    """The options of :class:`aiockpt.HTTPTransport`, which has their defaults."""

    advertise: str | None
    server: Server
    auth: Auth
    receive: Receive
    same_host: bool | None
    stall_timeout: float
    chunk_bytes: int
    zero_copy: bool
    allow_pickle: bool


class HTTPTransport(Adapter[T]):
    """Serves checkpoints to healing replicas, and receives them, over HTTP.

    It takes the place of torchft's class of this name, with the same arguments, and
    works across hosts as it is: it listens on every interface, tells the address that
    the routing table prefers, and answers only those who hold its metadata.

    Args:
        timeout: The longest time that an early request waits for its step, and the
            deadline of a send or a receive that is called without one.
        num_chunks: If not 0, how many ranges travel at once; the ends need not agree.
        **options: What :class:`aiockpt.HTTPTransport` takes; chiefly ``advertise`` and
            ``server=Server(interface=...)`` for the address, ``auth`` for the token and
            TLS, and ``allow_pickle``. By default ``stall_timeout`` is a fifth of
            ``timeout``, and between 1 and 10 seconds.
    """

    def __init__(
        self, timeout: Timeout, num_chunks: int = 0, **options: Unpack[HTTPOptions]
    ) -> None:
        lingers = not options.get("zero_copy", False)
        # So that a silent connection is replaced well before a deadline.
        patience = min(_STALL_TIMEOUT, max(seconds(timeout) / 5, _SHORTEST_STALL))
        options.setdefault("stall_timeout", patience)
        if num_chunks:
            given = options.get("receive", Receive())
            options["receive"] = replace(given, connections=num_chunks)
        transport: aiockpt.HTTPTransport[T] = aiockpt.HTTPTransport(timeout, **options)
        self._http = transport
        super().__init__(transport, timeout=timeout, lingers=lingers)

    def allow_checkpoint(self, step: int) -> None:
        """Offer what was sent last as ``step``; a send does this by itself.

        Raises:
            StepNotFoundError: nothing is offered, because nothing was sent, or because
                :meth:`disallow_checkpoint` has released it; send again.
        """
        allow = partial(self._http.allow_checkpoint, step)
        self._facade.call(allow, timeout=self._timeout, stop="stage")

    def address(self) -> str:
        """Return the base URL without the token, for logs and people."""
        return self.metadata().partition("#")[0]

    def statistics(self) -> TransportStatistics:
        """Return what is offered, what was served and what works, as one record."""

        async def ask() -> TransportStatistics:
            return self._http.statistics()

        return self._facade.call(ask, timeout=1.0, stop="statistics")
