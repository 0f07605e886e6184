"""Who may ask: a plain decision over a request's headers.

Every guard is ours and runs in the handler, so an embedded server is as safe as our
own whatever the host application does. Browsers are kept out twice: a page of
another site is refused by what its browser says about it, and, where no token is
asked for, a forged host name (DNS rebinding) is refused because the name is none that
the server was told of.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

from aiockpt.errors import AiockptError, AuthenticationError, LocalProtocolError
from aiockpt.http.problems import HostNotAllowed, Problem
from aiockpt.http.tokens import Grant, read_token

__all__ = ["RefusedError", "ServerConfig", "admit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server needs to know; the defaults live with the transport.

    Attributes:
        token: The bearer token that every request must carry; None only together
            with ``insecure``. A certificate that TLS asks for comes on top.
        insecure: Serve everybody who can connect and names the server by an IP
            address, ``localhost`` or one of ``hosts``.
        stall_timeout: Seconds without progress after which a reader is aborted.
        default_wait: Seconds to wait for a step when the request does not say.
        max_wait: The most that ``Prefer: wait=N`` may ask for.
        max_readers: Bodies sent at once; more are answered 503.
        hosts: Host names that an insecure server answers to.
        prefix: The path under which the checkpoints are.
        manifest_key: What manifests are authenticated with, if they are.
        keep_superseded: How many superseded snapshots stay while they are read.
        incarnation: The id of this start of the sender.
        own_sockets: Whether `listen.open_sockets` made those that listen.
    """

    token: str | None = field(repr=False)
    insecure: bool
    stall_timeout: float
    default_wait: float
    max_wait: float
    max_readers: int
    hosts: frozenset[str]
    prefix: str
    manifest_key: bytes | None = field(default=None, repr=False)
    keep_superseded: int = 1
    incarnation: str = "0"
    own_sockets: bool = False

    def __post_init__(self) -> None:
        if (self.token is None) != self.insecure:
            raise LocalProtocolError(
                "the server must know who may read: pass a token, or insecure=True"
            )


class RefusedError(AiockptError):
    """A request that HTTP has a status for and the error tree has no class for."""

    def __init__(
        self, status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})

    @property
    def problem(self) -> Problem:
        """The response that says so."""
        document = {
            "type": "about:blank",
            "title": self.status.phrase,
            "status": self.status.value,
            "detail": self.detail,
        }
        headers = {
            "Content-Type": "application/problem+json",
            "Cache-Control": "no-store",
            **self.headers,
        }
        return Problem(self.status.value, headers, json.dumps(document).encode())


def admit(headers: Mapping[str, str], config: ServerConfig) -> Grant | None:
    """Return if a request with these headers may be answered.

    Returns what a receiver's own token grants, and still has to be checked; None for
    who has the token of all.

    Args:
        headers: The request's headers, by name in any case.
        config: Whom to admit.

    Raises:
        RefusedError: 403, another site's page asks.
        HostNotAllowed: the host is not ours.
        AuthenticationError: the token is wrong or missing.
    """
    site = headers.get("Sec-Fetch-Site", "none")
    if "Origin" in headers or site not in ("none", "same-origin"):
        raise RefusedError(
            HTTPStatus.FORBIDDEN, "requests of web pages are not answered"
        )
    if config.token is not None:
        return _check_token(headers.get("Authorization", ""), config.token)
    _check_host(headers.get("Host", ""), config.hosts)
    return None


def _check_token(authorization: str, token: str) -> Grant | None:
    scheme, _, given = authorization.partition(" ")
    grant = read_token(given.strip(), token)
    # As bytes: compare_digest takes only ASCII text, and a header may hold anything.
    offered = given.strip().encode("utf-8", "surrogateescape")
    matches = hmac.compare_digest(offered, token.encode("utf-8", "surrogateescape"))
    if not authorization:
        detail = "no token was sent: send the header 'Authorization: Bearer TOKEN'"
        raise AuthenticationError("the server", detail)
    if scheme.lower() != "bearer" or not (matches or grant):
        raise AuthenticationError("the server", "the token is none of this server's")
    return grant


def _check_host(host: str, allowed: frozenset[str]) -> None:
    name = _host_name(host)
    if name == "localhost" or name in allowed:
        return
    with suppress(ValueError):
        ipaddress.ip_address(name.partition("%")[0])
        return
    raise HostNotAllowed(
        f"host {host[:80]!r} is not this server's; name it by its IP address, or start "
        "it with this name as the advertised one"
    )


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
