"""Who may read: the secret that a transport asks for, and where it came from."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("aiockpt")

__all__ = ["Credentials", "find_credentials"]


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


def find_credentials(
    token: str | None, *, insecure: bool, env: Mapping[str, str]
) -> Credentials:
    """Return the credentials: given, from the environment, or a new capability.

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
        token = Path(path).read_text(encoding="utf-8").strip()
    if token is None:
        return Credentials(secrets.token_urlsafe(32), shared=False)
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must be printable ASCII without spaces, not empty")
    return Credentials(token, shared=True)
