"""An endpoint whose server is in another process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio

from aiockpt.errors import LocalProtocolError
from aiockpt.http.apart.messages import Setup
from aiockpt.http.apart.remote import RemoteStore
from aiockpt.http.endpoint import PREFIX, Address, Endpoint, EndpointConfig
from aiockpt.http.handlers import CheckpointService, ServerStatistics
from aiockpt.http.options import require, require_type
from aiockpt.runtime.bridge import Bridge

__all__ = ["ApartEndpoint", "ApartOptions", "Server", "endpoint_for"]

_NICEST = 19  # who has it gets what others leave
_LOGGERS = ("aiockpt", "aiockpt.runtime.bridge", "aiockpt.audit", "aiockpt.http")

Server: TypeAlias = Literal["loop", "process"]
"""Where a transport serves: on its loop, or in a process of its own."""


@dataclass(frozen=True, slots=True)
class ApartOptions:
    """What is asked of a process that serves.

    Attributes:
        keep_last: Seconds for which it outlives the trainer.
        nice: Added to its niceness.
        lends: Whether processes of this host may take the memory itself.
    """

    keep_last: float
    nice: int
    lends: bool


class ApartEndpoint:
    """Serves what is on its ``store`` from :meth:`start` on, in another process.

    Args:
        config: As for an endpoint in this process, but without TLS.
        bridge: Where the process is launched.
        options: What is asked of the process.

    Raises:
        LocalProtocolError: there is a ``ssl_context``, which cannot leave its process.
    """

    def __init__(
        self,
        config: EndpointConfig,
        bridge: Bridge,
        options: ApartOptions,
    ) -> None:
        if config.ssl_context is not None:
            raise LocalProtocolError(
                "an ssl_context cannot be handed to the process that serves: take "
                'server="loop", or have a proxy speak TLS'
            )
        self.store = RemoteStore(bridge, self._setup, lends=options.lends)
        self._bridge = bridge
        self._address = Address(config)
        self._options = options
        self._turn = anyio.Lock()

    def __repr__(self) -> str:
        return f"<ApartEndpoint {self.store}>"

    def url(self) -> str:
        """Return the base URL; see :meth:`Address.url`."""
        return self._address.url()

    async def start(self) -> None:
        """Start the process, and wait until it serves; idempotent.

        If cancelled, it starts nevertheless.

        Raises:
            ClosedError: after :meth:`stop`.
            OSError: the address cannot be bound.
            WorkerError: the process cannot be started; another call tries again.
        """
        async with self._turn:
            self._address.check()
            if self.store.process.may_begin_again:
                self._address.reopen()
            await self._address.look_up(self._bridge)
            self._address.check()
            await self.store.start(self._address.listen())

    def mount(self, prefix: str) -> CheckpointService:
        """Refuse: the handlers of an application run in its own process.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError(
            f"handlers for {prefix!r} run in the application's process: take a "
            'transport with server="loop"'
        )

    def statistics(self) -> ServerStatistics:
        """Return the counters of the process, a moment old."""
        return self.store.served()

    @property
    def lent(self) -> int:
        """How often a checkpoint was lent to a process of this host, a moment ago."""
        return self.store.lent

    async def stop(self) -> None:
        """End the process, close the sockets; idempotent."""
        self._address.refuse()
        try:
            await self.store.close()  # a server that hangs keeps its copies of them
        finally:
            self._address.close()

    def _setup(self) -> Setup:
        return Setup(
            trainer=os.getpid(),
            keep_last=self._options.keep_last,
            nice=self._options.nice,
            lends=self._options.lends,
            levels={n: logging.getLogger(n).getEffectiveLevel() for n in _LOGGERS},
            config=self._address.config.for_server(PREFIX),
        )


def endpoint_for(
    server: Server,
    config: EndpointConfig,
    bridge: Bridge,
    options: ApartOptions,
    *,
    zero_copy: bool,
) -> Endpoint | ApartEndpoint:
    """Return what serves: on this loop, or in a process of its own.

    Raises:
        ValueError: there is no such kind of server; or an option is out of its range.
        TypeError: a niceness that is no integer.
        LocalProtocolError: what was asked for does not go together.
    """
    _check(server, options, zero_copy=zero_copy)
    if server == "loop":
        return Endpoint(config, bridge, lends=options.lends)
    return ApartEndpoint(config, bridge, options)


def _check(server: object, options: ApartOptions, *, zero_copy: bool) -> None:
    require(keep_last=options.keep_last)
    require_type(int, server_nice=options.nice)
    if not 0 <= options.nice <= _NICEST:
        raise ValueError(
            f"server_nice must be between 0 and {_NICEST}, got {options.nice}"
        )
    if server not in ("loop", "process"):
        raise ValueError(f"server must be 'loop' or 'process', got {server!r}")
    if server == "loop" and options.keep_last:
        raise LocalProtocolError('keep_last= needs server="process"')
    if server != "loop" and zero_copy:
        raise LocalProtocolError(
            f"server={server!r} serves from memory of its own: leave out zero_copy=True"
        )
