"""The options of a transport, as frozen records; checks of what a caller passes."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from aiockpt.format.limits import Limits
from aiockpt.http.security import check_peers
from aiockpt.runtime.secrets import Token

__all__ = ["Auth", "Receive", "Server", "require", "require_type"]

_CONNECTIONS = min(4, os.cpu_count() or 4)
_NICEST = 19
_SHORTEST_KEY = 16


def require(*, at_least: float = 0, **options: float) -> None:
    """Raise ``ValueError`` that names the first option below ``at_least``.

    A number that is not one (nan) is below everything.
    """
    for name, value in options.items():
        if not value >= at_least:
            raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")


def require_type(kind: type[object], **options: object) -> None:
    """Raise ``TypeError`` that names the first option that is no ``kind``."""
    for name, value in options.items():
        if not isinstance(value, kind):
            got = type(value).__name__  # not the value, which may be a token
            raise TypeError(f"{name} must be of type {kind.__name__}, got {got}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where and how a transport serves what it sends.

    Attributes:
        host: The address to listen on. None is every interface.
        port: The port to listen on. 0 is any free port.
        interface: The network interface whose address the metadata names. Without it,
            and without ``advertise``, the variables ``AIOCKPT_IFNAME``,
            ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are asked, then the
            routing table.
        process: Serve from a process of its own, which a busy trainer cannot slow
            down, nor the process the trainer. It is started with the transport,
            replaced if it dies, and serves from the memory that was staged into. It
            works without ``ssl_context`` and ``zero_copy`` only.
        readers: How many bodies are served at once. Further receivers are told to come
            back later.
        grace: Seconds that readers get when a checkpoint is retracted.
        keep_superseded: How many snapshots stay, after a newer one was published, for
            the receivers that have begun to read them. Each takes as much memory as a
            checkpoint, only while it is read. If more are being read, those that have
            been read longest stay, and the other receivers must begin anew.
        keep_last: Seconds for which the process outlives a trainer that dies, after
            its last request, so that a successor can fetch what was offered last from
            the same URL. An orderly end ends the process at once.
        nice: What is added to the niceness of the process: 19 for what the trainer
            leaves of the cores, 0 for as much as any other process has.
    """

    host: str | None = None
    port: int = 0
    interface: str | None = None
    process: bool = False
    readers: int = 256
    grace: float = 5.0
    keep_superseded: int = 1
    keep_last: float = 0.0
    nice: int = _NICEST

    def __post_init__(self) -> None:
        require_type(int, nice=self.nice)
        require(at_least=1, readers=self.readers)
        require(
            grace=self.grace,
            keep_superseded=self.keep_superseded,
            keep_last=self.keep_last,
            nice=self.nice,
        )
        if self.nice > _NICEST:
            raise ValueError(f"nice must be at most {_NICEST}, got {self.nice!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """Who may read, and which senders a receive trusts.

    Attributes:
        token: A token that both ends know, instead of a random one in the metadata.
            ``AIOCKPT_TOKEN`` and ``AIOCKPT_TOKEN_PATH`` stand in for it.
        insecure: Let everybody read who reaches the port.
        ssl_context: Serve TLS with it.
        client_ssl_context: Verify senders with it. None takes the authorities of the
            system.
        manifest_key: A key of both ends, 16 bytes or more. The sender proves with
            it that a manifest is its own, and the receiver accepts no other one:
            ``ForgedManifestError`` comes before any of the data. It tells one job
            from another that answers at the same address. Against somebody who can
            change what travels it needs TLS beside it.
        peers: The only hosts that a receive connects to: networks such as
            ``"10.0.0.0/8"``, addresses, and names, in which ``*`` stands for anything.
            None: whatever the metadata names, except addresses of cloud metadata
            services, multicast, and link-local ones that the metadata does not
            spell out.
    """

    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    ssl_context: ssl.SSLContext | None = None
    client_ssl_context: ssl.SSLContext | None = None
    manifest_key: str | bytes | None = field(default=None, repr=False)
    peers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.token is not None:  # whoever prints this record does not print it
            require_type(str, token=self.token)
            object.__setattr__(self, "token", Token(self.token))
        if self.key is not None and len(self.key) < _SHORTEST_KEY:
            raise ValueError(f"manifest_key needs {_SHORTEST_KEY} bytes or more")
        check_peers(self.peers)

    @property
    def key(self) -> bytes | None:
        """The manifest key as bytes."""
        given = self.manifest_key
        return given.encode() if isinstance(given, str) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """What a receive accepts, and how it fetches.

    Attributes:
        limits: The largest sizes that a receive accepts.
        connections: How many ranges are fetched at once from a single source, 4 at
            most by default.
        reconnect_timeout: Seconds for which a receive tries to reach a sender that no
            longer answers. 0 raises at once.
        keep_arena: Keep the memory of one receive for the next one, once none of its
            tensors lives. Memory that was touched before is faster to receive into.
        session: A ``ClientSession`` of the caller, which is used and never closed.
    """

    limits: Limits = Limits()  # noqa: RUF009 - frozen
    connections: int = _CONNECTIONS
    reconnect_timeout: float = 10.0
    keep_arena: bool = False
    session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        require_type(Limits, limits=self.limits)
        require(at_least=1, connections=self.connections)
        require(reconnect_timeout=self.reconnect_timeout)
