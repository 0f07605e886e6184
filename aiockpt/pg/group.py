"""The process group as far as it is used, and whether it still can be."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from aiockpt.errors import ProcessGroupError

__all__ = ["Group", "Health", "Pending", "keep_with", "rank_in"]

_kept: weakref.WeakKeyDictionary[Any, list[object]] = weakref.WeakKeyDictionary()


class Pending(Protocol):
    """An operation under way: ``torch.distributed.Work``, or torchft's."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until it has ended; raise when it failed."""


class Group(Protocol):
    """A process group as far as it is used: torch's own, a backend, or torchft's."""

    def size(self) -> int:
        """Return how many ranks there are."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begin to send a tensor; return the operation."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begin to receive into a tensor; return the operation."""


class Health:
    """Says whether a group may still be used; once broken, it stays so.

    ``remains`` keeps what is under way and waited for by nobody.
    """

    def __init__(self) -> None:
        self.remains: list[object] = []
        self._why = ""
        self._rank: int | None = None

    def __repr__(self) -> str:
        return f"<Health {self._why or 'well'}>"

    @property
    def broken(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return bool(self._why)

    def check(self) -> None:
        """Raise ``ProcessGroupError`` if it is broken."""
        if self._why:
            raise ProcessGroupError(self._why, rank=self._rank)

    def break_off(self, rank: int, error: BaseException) -> None:
        """Remember what was under way with ``rank`` when it broke."""
        if not self._why:
            cut = isinstance(error, asyncio.CancelledError)
            why = "it was cut short by a cancel or a deadline" if cut else str(error)
            if isinstance(error, ProcessGroupError):
                why = error.detail
            self._rank, self._why = rank, f"an earlier one was the last: {why}"


def keep_with(group: Group, messages: object) -> None:
    """Keep messages that nobody waits for as long as the group lives.

    Gloo forgets a message whose ``Work`` has gone, also one that it has announced.
    """
    with suppress(TypeError):  # a group that no weak reference can be made to
        _kept.setdefault(_innermost(group), []).append(messages)


def rank_in(group: Group) -> int | None:
    """Return this process's rank; None where the group does not know it.

    A group of torchft inherits ``rank`` from torch, which has not been told: 0.
    """
    inner = _innermost(group)
    definer = next((each for each in type(inner).__mro__ if "size" in vars(each)), None)
    if definer is None or "rank" not in vars(definer):
        return None
    rank: int = inner.rank()
    return rank


def _innermost(group: Any) -> Any:
    """Return the group that a wrapper of torchft has been configured with."""
    while (parent := getattr(group, "parent", None)) is not None:
        group = parent
    return group
