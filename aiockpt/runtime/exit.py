"""Lets the interpreter exit beside threads that were left behind in a wait.

Before Python 3.14, a thread that comes back from C++ while the interpreter ends is
ended by ``pthread_exit``. That unwinds the C++ frames of pybind11, which must not be
unwound, so ``std::terminate`` aborts the process: a job that was about to exit well
dies of SIGABRT because a peer happened to close its connection just then. So where
such threads exist at the exit, a thread that terminates sleeps instead, until the
process has gone; it holds no lock by then.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from contextlib import suppress
from typing import Final
from weakref import WeakSet

__all__ = ["leave_behind"]

_PATIENT: Final = sys.version_info >= (3, 14)  # it lets such a thread sleep itself

_left: WeakSet[threading.Thread] = WeakSet()


def leave_behind(thread: threading.Thread) -> None:
    """Say that nobody waits for a daemon thread any more."""
    if not _left:
        atexit.unregister(_spare_the_process)
        atexit.register(_spare_the_process)
    _left.add(thread)


def _spare_the_process() -> None:
    if _PATIENT or not any(thread.is_alive() for thread in _left):
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libstdc++.so.6")
        # ``pause`` is a function of the C library, called with no interpreter around.
        library["_ZSt13set_terminatePFvvE"](ctypes.CDLL(None).pause)
