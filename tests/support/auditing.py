"""A guard over what Python executes: it fails what a receiver must never do."""

from __future__ import annotations

import os
import sys
from typing import Any, Self

HARMLESS = frozenset(
    {
        "array.__new__",
        "builtins.id",
        "ctypes.string_at",  # of a tensor, whose bounds were checked
        "gc.get_objects",
        "object.__delattr__",
        "object.__getattr__",
        "object.__setattr__",
        "sys._getframe",
        "time.sleep",
    }
)
"""Events that neither run code, nor start anything, nor leave the process."""


class Guard:
    """While it is entered, an event of Python's audit that is not allowed raises.

    It stays on record, too, in case that somebody swallows what was raised. A hook can
    never be removed, so this one sleeps before and after.
    """

    def __init__(
        self, *, events: frozenset[str] = frozenset(), directories: tuple[str, ...] = ()
    ) -> None:
        self.events: list[str] = []
        self._allowed = HARMLESS | events
        self._directories = tuple(os.path.realpath(each) for each in directories)
        self._armed = False
        sys.addaudithook(self._hook)

    def __enter__(self) -> Self:
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed or event in self._allowed or self._inside(event, args):
            return
        self._armed = False  # what follows here is ours
        line = f"{event} {args!r}"[:300]
        self.events.append(line)
        self._armed = True
        raise RuntimeError(f"a receiver must not do this: {line}")

    def _inside(self, event: str, args: tuple[Any, ...]) -> bool:
        if event not in ("open", "os.rename", "os.remove", "os.listdir", "os.mkdir"):
            return False
        paths = [each for each in args[: 1 + (event == "os.rename")]]
        return all(
            isinstance(each, str | bytes)
            and os.path.realpath(os.fsdecode(each)).startswith(self._directories)
            for each in paths
        ) and bool(self._directories)
