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
        say: Sends it, from any thread whose records are taken.
        hosted: The process has other things to do: records are taken of this thread
            and of those that it names, and the others are logged as ever.
    """

    def __init__(self, say: Say, *, hosted: bool) -> None:
        super().__init__()
        self._say = say
        self._threads = {threading.get_ident()} if hosted else None
        self._format = logging.Formatter().format
        self._levels: dict[str, int] = {}
        self._remove: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Forwarding of threads {self._threads or 'any'}>"

    def start(self, levels: Mapping[str, int]) -> None:
        """Begin to, at the levels of the trainer's loggers.

        A process that only serves has them from now on; another one's own hold for
        whatever is not taken.
        """
        self._levels = dict(levels)
        for name, level in levels.items():
            told = logging.getLogger(name)
            told.addFilter(self)
            if self._threads is None:
                told.setLevel(level)
            else:
                _lower(told, level)
        self._remove = add_hook(self._happen)

    def take(self, thread: int) -> None:
        """Take what another thread tells, too."""
        if self._threads is not None:
            self._threads.add(thread)

    def stop(self) -> None:
        """Leave everything to this process again. Idempotent."""
        self._remove()
        levels, self._levels = self._levels, {}
        for name, level in levels.items():
            told = logging.getLogger(name)
            told.removeFilter(self)
            if self._threads is not None:
                _undo(told, level)

    def filter(self, record: logging.LogRecord) -> bool:
        """Send a record that is ours; one of an event travels as that."""
        if not self._is_ours(record.thread):
            return True
        args = record.args if isinstance(record.args, tuple) else ()
        first = args[0] if args else None
        wanted = record.levelno >= self._levels.get(record.name, 0)
        if wanted and not isinstance(first, TransferEvent):
            access = first if isinstance(first, Access) else None
            text = self._format(record)
            self._say(Logged(record.name, record.levelno, text, access))
        return False

    def _happen(self, event: TransferEvent) -> None:
        if self._is_ours(threading.get_ident()):
            self._say(Happened(event))

    def _is_ours(self, thread: int | None) -> bool:
        return self._threads is None or thread in self._threads


class _Lowered(logging.Filter):
    """The level of a logger, lower than it was, for those who take its records.

    It is the last filter: what it sees nobody has taken.
    """

    def __init__(self, told: logging.Logger) -> None:
        super().__init__()
        self.wanted: list[int] = []
        self._told = told
        self._own, self._usual = told.level, told.getEffectiveLevel()

    def __repr__(self) -> str:
        return f"<_Lowered {self._told.name} to {self._told.level}>"

    def filter(self, record: logging.LogRecord) -> bool:
        """Let pass what the logger would have told without us."""
        return record.levelno >= self._usual

    def settle(self) -> None:
        """Do what is wanted now."""
        lowest = min(self.wanted, default=self._usual)
        self._told.setLevel(lowest if lowest < self._usual else self._own)
        self._told.removeFilter(self)
        if self.wanted:
            self._told.addFilter(self)


_lowered: dict[str, _Lowered] = {}
_lock = threading.Lock()


def _lower(told: logging.Logger, level: int) -> None:
    with _lock:
        lowered = _lowered.get(told.name) or _Lowered(told)
        _lowered[told.name] = lowered
        lowered.wanted.append(level)
        lowered.settle()


def _undo(told: logging.Logger, level: int) -> None:
    with _lock:
        lowered = _lowered[told.name]
        lowered.wanted.remove(level)
        lowered.settle()
        if not lowered.wanted:
            del _lowered[told.name]
