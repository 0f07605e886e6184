"""Memory that a device still copies from or to, when nobody else needs it any more."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiockpt.runtime.bridge import start_daemon
from aiockpt.runtime.exit import leave_behind

__all__ = ["keep_until"]

logger = logging.getLogger(__name__)


def keep_until(drain: Callable[[], object]) -> None:
    """Keep what ``drain`` refers to until it returns, which may take long.

    It blocks a thread of its own: those of a bridge are for others, and the exit of the
    interpreter waits for them. For this one nobody waits.
    """
    try:
        leave_behind(start_daemon("aiockpt-drain", _attempt, drain))
    except RuntimeError:  # no thread is to be had: better late than from freed memory
        _attempt(drain)


def _attempt(drain: Callable[[], object]) -> None:
    try:
        drain()
    except Exception:
        logger.exception("waiting for a device failed")
