"""Who may read: tokens on both ends, and the decision over a request's headers.

All guards run in the handler. So an embedded server is as safe as our own, whatever
the application around it does. Browsers are kept out twice. A page of another site is
refused because its browser names the site. And a server without a token refuses a
forged host name (DNS rebinding) because it was told of no such name.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from aiockpt.errors import AuthenticationError, LocalProtocolError
from aiockpt.http.problems import HostNotAllowed, RefusedError
from aiockpt.http.tokens import Grant, make_token, read_token
from aiockpt.runtime.secrets import Token, discreet

__all__ = ["Credentials", "admit", "find_credentials"]

logger = logging.getLogger("aiockpt")

_LONGEST: Final = 4096  # bytes of a token file


@dataclass(frozen=True, slots=True)
class Credentials:
    """The bearer token of a transport.

    Attributes:
        token: What a receiver must show; None: everybody may read.
        shared: Whether both ends were given it, so that the metadata need not carry it.
    """

    token: str | None = field(repr=False)
    shared: bool

    @property
    def to_send(self) -> str | None:
        """The token to show to a sender whose metadata carries none."""
        return self.token if self.shared else None

    @property
    def in_metadata(self) -> str | None:
        """The token that the metadata carries."""
        return None if self.shared else self.token

    def granted(self, receiver: str, *, step: int | None, expires: float) -> str:
        """Return a token for one receiver; see `make_token`.

        Raises:
            LocalProtocolError: everybody may read.
        """
        if self.token is None:
            raise LocalProtocolError(
                "an insecure transport asks for no token, so it can grant none"
            )
        return make_token(self.token, receiver, step=step, expires=expires)


@discreet
def find_credentials(
    token: str | None, *, insecure: bool, env: Mapping[str, str]
) -> Credentials:
    """Return the token: the given one, the environment's, or a new one.

    ``AIOCKPT_TOKEN`` holds a token, ``AIOCKPT_TOKEN_PATH`` names a file that does.

    Raises:
        ValueError: a token together with ``insecure``, or one that is empty.
        OSError: the token file cannot be read; no other token is tried.
    """
    if insecure and token is not None:
        raise ValueError("insecure=True and token= contradict each other: choose one")
    if insecure:
        logger.warning("insecure=True: everybody who reaches the port may read")
        return Credentials(None, shared=True)
    path = env.get("AIOCKPT_TOKEN_PATH")
    if token is None:
        token = env.get("AIOCKPT_TOKEN")
    if token is None and path is not None:
        token = _read_token_file(path)
    if token is None:
        return Credentials(Token(secrets.token_urlsafe(32)), shared=False)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must be printable ASCII without spaces, not empty")
    return Credentials(Token(token), shared=True)


def _read_token_file(path: str) -> str:
    with Path(path).open("rb") as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise ValueError(f"the token file {path} is no token: it is too long")
    # No decoding that could fail: such an error would carry the content.
    return content.decode("ascii", "replace").strip()


def admit(
    headers: Mapping[str, str], *, token: str | None, hosts: frozenset[str]
) -> Grant | None:
    """Return if a request with these headers may be answered.

    For a token of one receiver this returns what it grants, which still has to be
    checked. It returns None for the token that everybody shares.

    Args:
        headers: The request's headers, by name in any case.
        token: The token of this server; None: everybody may read who names the server
            by an IP address, ``localhost`` or one of ``hosts``.
        hosts: The host names of this server.

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
    if token is not None:
        return _check_token(headers.get("Authorization", ""), token)
    _check_host(headers.get("Host", ""), hosts)
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
