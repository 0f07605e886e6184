"""Who may read: tokens on both ends, and the check of a request's headers.

All checks run in the request handler, so an embedded server is as safe as our own.
Browsers are kept out twice. The server refuses a page of another site, because the
browser sends the name of that site. A server without a token also refuses unknown host
names, which prevents DNS rebinding.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from aiockpt.errors import AuthenticationError, LocalProtocolError
from aiockpt.http.problems import HostNotAllowed, RefusedError
from aiockpt.http.security import address_of
from aiockpt.http.tokens import Grant, make_token, read_token
from aiockpt.runtime.secrets import Token, discreet
from aiockpt.storage.directory import expanded
from aiockpt.storage.files import named, regular_file

logger = logging.getLogger("aiockpt")

_MAX_FILE_BYTES: Final = 4096
_MIN_CHARACTERS: Final = 16  # of a token that nobody guesses


@dataclass(frozen=True, slots=True)
class Credentials:
    """The bearer token of a transport.

    Attributes:
        token: The token that a receiver must send. None: everybody may read.
        shared: Whether both ends were given the token, so the metadata has none.
    """

    token: str | None = field(repr=False)
    shared: bool

    @property
    def to_send(self) -> str | None:
        """The token to send to a sender whose metadata carries none."""
        return self.token if self.shared else None

    @property
    def in_metadata(self) -> str | None:
        """The token that the metadata carries."""
        return None if self.shared else self.token

    def warn_if_short(self) -> None:
        """Log a warning for a token that can be guessed; it is not repeated."""
        if self.token is not None and len(self.token) < _MIN_CHARACTERS:
            logger.warning(
                "the token has %d characters, and a short one can be guessed: use at "
                "least %d random ones, as of python -c 'import secrets; "
                "print(secrets.token_urlsafe())'",
                len(self.token),
                _MIN_CHARACTERS,
            )

    def granted(self, receiver: str, *, step: int | None, expires: float) -> str:
        """Return a token for one receiver; see `make_token`.

        Raises:
            LocalProtocolError: everybody may read.
        """
        if self.token is None:
            raise LocalProtocolError(
                "an insecure transport asks for no token, so it can grant none: "
                "leave out insecure=True"
            )
        return make_token(self.token, receiver, step=step, expires=expires)


@discreet
def find_credentials(
    token: str | None, *, insecure: bool, env: Mapping[str, str]
) -> Credentials:
    """Return the given token, the one in the environment, or a new random one.

    ``AIOCKPT_TOKEN`` is a token; ``AIOCKPT_TOKEN_PATH`` names a file that holds one.

    Raises:
        ValueError: a token together with ``insecure``, or an invalid token.
        OSError: the token file cannot be read.
    """
    if insecure and token is not None:
        raise ValueError("insecure=True and token= exclude each other: choose one")
    if insecure:
        logger.warning("insecure=True: everybody who reaches the port may read")
        return Credentials(None, shared=True)
    path, named_by = env.get("AIOCKPT_TOKEN_PATH"), "the token"
    if token is None and "AIOCKPT_TOKEN" in env:
        token, named_by = env["AIOCKPT_TOKEN"], "the token in AIOCKPT_TOKEN"
    if token is None and path is not None:
        token, named_by = _read_token_file(path), f"the token in the file {path}"
    if token is None:
        return Credentials(Token(secrets.token_urlsafe(32)), shared=False)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{named_by} must be printable ASCII, without spaces, not empty"
        )
    return Credentials(Token(token), shared=True)


def _read_token_file(path: str) -> str:
    place = Path(expanded(path))
    with named(place), regular_file(place) as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        most = _MAX_FILE_BYTES
        raise ValueError(f"the token file {path} is too long: at most {most} bytes")
    # No decoding that could fail: such an error would carry the content.
    return content.decode("ascii", "replace").strip()


def admit(
    headers: Mapping[str, str],
    *,
    token: str | None,
    hosts: frozenset[str],
    public: bool = False,
) -> Grant | None:
    """Check whether a request with these headers may be answered.

    Returns:
        The grant of a receiver's own token, which the caller still has to check; None
        for the token of the whole server, or if the server asks for none.

    Args:
        headers: The request's headers, with case-insensitive names.
        token: The token of this server. None: the server asks for none, and the request
            must name it by an IP address, ``localhost`` or one of ``hosts``.
        hosts: The host names of this server.
        public: The answer has no data, so a request without any token may have it.

    Raises:
        RefusedError: 403; a web page sent the request.
        HostNotAllowed: the request names another host.
        AuthenticationError: the token is wrong or missing.
    """
    site = headers.get("Sec-Fetch-Site", "none")
    if "Origin" in headers or site not in ("none", "same-origin"):
        raise RefusedError(
            HTTPStatus.FORBIDDEN, "this server does not answer requests of web pages"
        )
    if token is not None:
        if public and "Authorization" not in headers:
            return None
        return _check_token(headers.get("Authorization", ""), token)
    _check_host(headers.get("Host", ""), hosts)
    return None


def bearer(headers: Mapping[str, str]) -> str:
    """Return the token that a request sends; empty without one."""
    return headers.get("Authorization", "").partition(" ")[2].strip()


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
        raise AuthenticationError("the server", "the token is not this server's")
    return grant


def _check_host(host: str, allowed: frozenset[str]) -> None:
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0].rstrip(".").lower()
    if name == "localhost" or name in allowed or address_of(name) is not None:
        return
    raise HostNotAllowed(
        f"host {host[:80]!r} is not a name of this server: use its IP address, or "
        "start the server with this name as advertise="
    )
