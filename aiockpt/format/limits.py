"""What a receiver is willing to accept, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap

from aiockpt.errors import LimitExceededError

__all__ = ["FILE_LIMITS", "Limits", "enforce", "enforce_values"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of a received checkpoint.

    A peer that offers more is refused with `LimitExceededError` before memory is
    allocated for it. ``max_bytes`` bounds the data segment; None leaves that to the
    receiver, which knows its memory.
    """

    max_header_bytes: int = 64 * MIB
    max_depth: int = 64
    max_nodes: int = 500_000
    max_tensors: int = 100_000
    max_bytes: int | None = None


FILE_LIMITS = Limits(
    max_header_bytes=256 * MIB, max_nodes=5_000_000, max_tensors=1_000_000
)
"""For what is saved and loaded by default: there nobody keeps others waiting."""


def enforce(what: str, actual: int, limit: int | None) -> None:
    """Raise `LimitExceededError` if ``actual`` is above ``limit`` (None: no limit)."""
    if limit is not None and actual > limit:
        raise LimitExceededError(what, limit=limit, actual=actual)


def enforce_values(what: str, text: bytes | memoryview | mmap, limit: int) -> None:
    """Refuse JSON that may hold more than ``limit`` values, without decoding it.

    Counts what separates or opens values, also inside of strings: an upper bound.
    """
    if len(text) // 2 < limit:  # a value takes two bytes: itself and a separator
        return
    count = 1
    for start in range(0, len(text), MIB):  # each call keeps the interpreter lock
        piece = bytes(text[start : start + MIB])
        count += len(piece) - len(piece.translate(None, b",[{"))
    enforce(what, count, limit)
