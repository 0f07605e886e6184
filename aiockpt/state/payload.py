"""What a peer's payload may make a decoder allocate.

A tree can name the same bytes a million times. Decoders of arrays copy them, so what
they are given is counted first: each byte that travelled pays for one that is copied.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Allowance", "TooMuchError", "exactly", "sizes"]

_T = TypeVar("_T")


class TooMuchError(ValueError):
    """The payloads of a tree stand for more bytes than travelled."""


class Allowance:
    """What all decoders of one tree may copy together.

    Args:
        travelled: Bytes that the peer sent. Copies must not exceed them.
    """

    def __init__(self, travelled: int) -> None:
        self._left = travelled

    def __repr__(self) -> str:
        return f"<Allowance bytes={self._left}>"

    def spend(self, copied: object) -> None:
        """Count an item of a payload that is going to be copied.

        Raises:
            TooMuchError: the decoders would copy more bytes than travelled.
        """
        self._left -= len(copied) if isinstance(copied, bytes) else 0
        if self._left < 0:
            raise TooMuchError("the same bytes are used again and again")


def exactly(expected: type[_T], value: object) -> _T:
    """Return a value of exactly this type: others read alike and never end."""
    if type(value) is not expected:
        raise TypeError(f"a {type(value).__name__} instead of a {expected.__name__}")
    return value


def sizes(value: object) -> tuple[int, ...]:
    """Return a tuple of sizes."""
    found = exactly(tuple, value)
    if any(exactly(int, size) < 0 for size in found):
        raise ValueError("a negative size")
    return found
