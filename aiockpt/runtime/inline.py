"""The bridge's stand-in for who wants no threads: calls are made where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

__all__ = ["Inline"]

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Inline:
    """Does what a `Bridge` does, on the calling thread: an event loop stands still."""

    def __repr__(self) -> str:
        return "<Inline>"

    async def run(self, fn: Callable[[*Args], T], *args: *Args) -> T:
        """Return ``fn(*args)``; never suspends."""
        return fn(*args)

    def post(self, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call ``fn(*args)``."""
        fn(*args)
