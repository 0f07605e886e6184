"""Bytes that contradict the wire format, and whose they are."""

from __future__ import annotations

from aiockpt.errors.root import AiockptError

__all__ = [
    "IntegrityError",
    "LimitExceededError",
    "LocalProtocolError",
    "ProtocolError",
    "RemoteProtocolError",
]


class ProtocolError(AiockptError):
    """Bytes that contradict the wire format."""


class LocalProtocolError(ProtocolError):
    """This side broke the format: a bug, or an argument that cannot travel."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the format, is no aiockpt server, or speaks another version."""


class LimitExceededError(ProtocolError):
    """The peer offers more than the receiver's limits allow."""

    def __init__(self, what: str, *, limit: int, actual: int) -> None:
        super().__init__()
        self.what = what
        self.limit = limit
        self.actual = actual

    def __str__(self) -> str:
        return (
            f"{self.what} is {self.actual}, more than the limit of {self.limit}; "
            "raise it in Limits if the peer is trusted"
        )


class IntegrityError(ProtocolError):
    """A whole chunk (or the header, ``chunk=None``) arrived with the wrong digest."""

    def __init__(
        self, *, expected: str, actual: str, chunk: int | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.expected = expected
        self.actual = actual
        self.url = url

    def __str__(self) -> str:
        what = "the header" if self.chunk is None else f"chunk {self.chunk}"
        where = f" from {self.url}" if self.url else ""
        return f"{what}{where} has digest {self.actual}, expected {self.expected}"
