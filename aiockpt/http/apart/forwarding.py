"""Has events and log records of the process that serves happen in its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from aiockpt.events import TransferEvent, add_hook
from aiockpt.http.apart.messages import Happened, Logged
from aiockpt.http.audit import Access

__all__ = ["Forwarding"]

Say: TypeAlias = Callable[[Happened | Logged], None]


class Forwarding(logging.Filter):
    """Takes records from loggers, and sends them.

    Args:
        say: Sends one, from any thread.
    """

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say
        self._format = logging.Formatter().format

    def __repr__(self) -> str:
        return "<Forwarding>"

    def start(self, levels: Mapping[str, int]) -> None:
        """Begin to, at the levels of the trainer's loggers."""
        for name, level in levels.items():
            logger = logging.getLogger(name)
            logger.addFilter(self)
            logger.setLevel(level)
        add_hook(self._happen)

    def filter(self, record: logging.LogRecord) -> bool:
        """Send a record, and keep it from being logged here.

        The record of an event is left out: the event itself is sent.
        """
        args = record.args if isinstance(record.args, tuple) else ()
        first = args[0] if args else None
        if not isinstance(first, TransferEvent):
            access = first if isinstance(first, Access) else None
            text = self._format(record)
            self._say(Logged(record.name, record.levelno, text, access))
        return False

    def _happen(self, event: TransferEvent) -> None:
        self._say(Happened(event))
