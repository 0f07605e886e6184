"""Has events and log records of a serving thread happen in its trainer instead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from aiockpt.http.apart.messages import Happened, Logged
from aiockpt.http.audit import Access
from aiockpt.observe import TransferEvent, add_hook

__all__ = ["Forwarding"]

Say: TypeAlias = Callable[[Happened | Logged], None]


class Forwarding(logging.Filter):
    """Takes from loggers what is the trainer's, and sends it.

    Args:
        say: Sends it.
        hosted: The process has other things to do, whose records are not taken: only
            those of this thread are.
    """

    def __init__(self, say: Say, *, hosted: bool) -> None:
        super().__init__()
        self._say = say
        self._thread = threading.get_ident() if hosted else None
        self._format = logging.Formatter().format
        self._loggers: list[logging.Logger] = []
        self._remove: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Forwarding of thread {self._thread or 'any'}>"

    def start(self, levels: Mapping[str, int]) -> None:
        """Begin to, at the levels of the trainer's loggers."""
        self._loggers = [logging.getLogger(name) for name in levels]
        for told, level in zip(self._loggers, levels.values(), strict=True):
            told.setLevel(level)
            told.addFilter(self)
        self._remove = add_hook(self._happen)

    def stop(self) -> None:
        """Leave everything to this process again. Idempotent."""
        self._remove()
        for told in self._loggers:
            told.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Send a record that is ours; one of an event travels as that."""
        if not self._is_ours(record.thread):
            return True
        args = record.args if isinstance(record.args, tuple) else ()
        first = args[0] if args else None
        if not isinstance(first, TransferEvent):
            access = first if isinstance(first, Access) else None
            text = self._format(record)
            self._say(Logged(record.name, record.levelno, text, access))
        return False

    def _happen(self, event: TransferEvent) -> None:
        if self._is_ours(threading.get_ident()):
            self._say(Happened(event))

    def _is_ours(self, thread: int | None) -> bool:
        return self._thread in (None, thread)
