"""What a receiver accepts, checked before anything is allocated.

Decoding runs in threads, which cannot be interrupted. So long loops over what a peer
sent also ask here whether their caller still waits, or a receive that has reached its
deadline would end only when a peer's header is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from mmap import mmap
from typing import Final

from aiockpt.errors import LimitExceededError

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of a received checkpoint.

    A peer that offers more is refused with `LimitExceededError`, which names the limit,
    before memory is allocated for it. Saves and loads of files have larger limits,
    because no peer keeps them waiting.

    Attributes:
        max_header_bytes: The size of the header, which holds the manifest.
        max_text_bytes: The size of a single string, as it is written in the header.
        max_depth: How deeply containers may be nested.
        max_nodes: How many containers and plain values the state dict may hold.
        max_tensors: How many tensors it may hold.
        max_bytes: The size of the data segment. None: nine tenths of the free memory.
    """

    max_header_bytes: int = 32 * MIB
    max_text_bytes: int = 8 * MIB
    max_depth: int = 64
    max_nodes: int = 500_000
    max_tensors: int = 100_000
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name == "max_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                kind = type(value).__name__
                raise TypeError(f"{each.name} must be of type int, got {kind}")
            if value < 0:
                raise ValueError(f"{each.name} must be at least 0, got {value}")


FILE_LIMITS: Final = Limits(
    max_header_bytes=256 * MIB,
    max_text_bytes=256 * MIB,
    max_nodes=5_000_000,
    max_tensors=1_000_000,
)
"""The default of saves and loads, where no peer keeps others waiting."""

OF_A_SAVE: Final = (
    "no save may hold more: nest the state dict less deeply, and put long lists of "
    "numbers into tensors or arrays"
)
OF_A_FILE: Final = (
    "if you trust who made it, read it with aiockpt.checkpointers.CheckpointReader("
    "limits=aiockpt.Limits({option}=...))"
)
OF_A_COMMAND: Final = (
    "no option of this command raises that: if you trust its source, receive it in a "
    "program, with aiockpt.Receive(limits=aiockpt.Limits({option}=...))"
)
"""What to do about a limit, where the caller passes no `Limits`; see `advising`."""


def enforce(
    what: str, actual: int, limit: int | None, option: str = "", remedy: str = ""
) -> None:
    """Raise `LimitExceededError` if ``actual`` is above ``limit`` (None: no limit).

    Args:
        what: What has a limit.
        actual: Its value.
        limit: The limit.
        option: The field of `Limits` that sets the limit.
        remedy: What to do, if that is not to raise the limit.
    """
    if limit is not None and actual > limit:
        raise LimitExceededError(
            what, limit=limit, actual=actual, option=option, detail=remedy
        )


@contextmanager
def advising(remedy: str) -> Iterator[None]:
    """Say what to do where the caller passes no `Limits`.

    Args:
        remedy: What to do; ``{option}`` stands for the field of `Limits`.
    """
    try:
        yield
    except LimitExceededError as error:
        if error.option and not error.detail:
            error.detail = remedy.format(option=error.option)
        raise


def enforce_values(
    what: str, text: bytes | memoryview | mmap, limit: int, option: str = ""
) -> None:
    """Refuse JSON that may hold more than ``limit`` values, without decoding it.

    It counts the characters that separate or open values, also inside of strings. So
    the count is an upper bound.
    """
    if len(text) // 2 < limit:  # a value takes two bytes: itself and a separator
        return
    enforce(what, count_values(text), limit, option)


def count_values(text: bytes | memoryview | mmap) -> int:
    """Return an upper bound of the number of values in JSON, without decoding it."""
    count = 1
    for start in range(0, len(text), MIB):  # each call holds the interpreter lock
        piece = bytes(text[start : start + MIB])
        count += len(piece) - len(piece.translate(None, b",[{"))
    return count


IS_CANCELLED: Final[ContextVar[Callable[[], bool] | None]] = ContextVar(
    "IS_CANCELLED", default=None
)
"""Tells whether the caller of this thread's work was cancelled; None: it cannot be."""


class WorkCancelledError(Exception):
    """Ends work that nobody waits for; it becomes the cause of the cancellation."""


def raise_if_cancelled() -> None:
    """Raise if the caller of this thread's work was cancelled.

    Only work that may end anywhere, such as decoding, may call this.

    Raises:
        WorkCancelledError: the caller was cancelled.
    """
    is_cancelled = IS_CANCELLED.get()
    if is_cancelled is not None and is_cancelled():
        raise WorkCancelledError("the caller was cancelled")
