"""Who may read: the token that a transport asks for, and where it came from."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiockpt.errors import LocalProtocolError
from aiockpt.http.tokens import make_token
from aiockpt.runtime.secrets import Token, discreet

logger = logging.getLogger("aiockpt")

__all__ = ["Credentials", "find_credentials"]

_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Credentials:
    """The bearer token of a transport.

    Attributes:
        token: What a reader must show; None where anybody may read.
        shared: Both ends were given it, so the metadata need not carry it.
    """

    token: str | None = field(repr=False)
    shared: bool

    @property
    def to_send(self) -> str | None:
        """What is shown to peers whose metadata carries nothing."""
        return self.token if self.shared else None

    @property
    def in_metadata(self) -> str | None:
        """What the metadata hands on."""
        return None if self.shared else self.token

    def granted(self, receiver: str, *, step: int | None, expires: float) -> str:
        """Return a token for one receiver; see `make_token`.

        Raises:
            LocalProtocolError: anybody may read.
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
    """Return the token: given, from the environment, or a new one.

    ``AIOCKPT_TOKEN`` holds a token, ``AIOCKPT_TOKEN_PATH`` names a file that does.

    Raises:
        ValueError: a token together with ``insecure``, or one that is empty.
        OSError: the token file cannot be read; there is no falling back.
    """
    if insecure and token is not None:
        raise ValueError("insecure=True and token= contradict each other: choose one")
    if insecure:
        logger.warning("insecure=True: whoever reaches the port may read")
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
