"""How soon threads get the interpreter lock back from a thread that computes in Python.

A thread that releases the lock for a copy, a read or a digest needs it again right
afterwards. Beside a thread that computes in pure Python it then waits for the *switch
interval*: 5 ms, by default. For a tensor of 1 MiB that is 25 times as long as the copy.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CACHE_BLOCK_BYTES: Final = 2 << 20
"""How much a thread works on between two releases of the interpreter lock.

A block fits into the cache that cores share. Smaller blocks would release the lock more
often, and beside a thread that computes in Python each release may take 5 ms.
"""

_SHORT_INTERVAL_S: Final = 0.0005  # in which memcpy moves 4 MB
_NAP_S: Final = 0.0001  # in which a thread wakes up and takes the lock
_ROUNDING_S: Final = 5e-7  # the interpreter rounds down to whole microseconds


class _Interval:
    """The switch interval of the process, and how many calls want a short one."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._users = 0
        self._ours = self._own = 0.0  # seconds; the program's interval is its own

    def shorten(self) -> None:
        with self._changing:
            self._users += 1
            if self._users == 1:
                self._ours = self._own = sys.getswitchinterval()
                if self._own > _SHORT_INTERVAL_S:
                    sys.setswitchinterval(_SHORT_INTERVAL_S)
                    self._ours = sys.getswitchinterval()  # it is rounded

    def restore(self) -> None:
        with self._changing:
            self._users = max(self._users - 1, 0)  # 0 in a child that was forked inside
            if self._users or self._ours == self._own:
                return
            if sys.getswitchinterval() == self._ours:  # else the program has set it
                sys.setswitchinterval(self._own + _ROUNDING_S)

    def forked(self) -> None:
        """Restore it in a forked child, where no other thread goes on."""
        self._changing, self._users = threading.Lock(), min(self._users, 1)
        if self._users:
            self.restore()


_interval = _Interval()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_interval.forked)


@contextmanager
def switching_often() -> Iterator[None]:
    """Shorten the switch interval of the process until the block ends.

    The last of overlapping blocks restores the program's interval, unless the program
    has set another one meanwhile. A program's own shorter interval stays.
    """
    _interval.shorten()
    try:
        yield
    finally:
        _interval.restore()


def python_is_busy() -> bool:
    """Say whether another thread computes in pure Python now; for a thread.

    If none does, only the threads of a transfer want the lock, and they release it
    soon. A short interval would then only make them switch more often. The answer
    takes 0.2 ms, or 0.7 ms if it is yes.
    """
    with switching_often():
        start = time.perf_counter()
        time.sleep(_NAP_S)  # without the lock; a thread that waits for it takes it
        late = time.perf_counter() - start - _NAP_S
    return late > _SHORT_INTERVAL_S / 2
