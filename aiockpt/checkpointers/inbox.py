"""What the checkpoint process's main thread is to do, as the other one hears it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from aiockpt.checkpointers.jobs import Job
from aiockpt.checkpointers.messages import Forsake, Setup

__all__ = ["Inbox", "Preparation"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """What comes before the first write: the init functions, in a parcel."""

    setup: Setup
    parcel: int


Work: TypeAlias = Preparation | Job | Forsake


class Inbox:
    """What the main thread is to do, in order. For threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: deque[Work] = deque()
        self._closed = False
        self._at_work = False

    def __repr__(self) -> str:
        return f"<Inbox waiting={len(self._work)}>"

    @property
    def busy(self) -> bool:
        """Whether there is anything to do, or something is being done."""
        return self._at_work or bool(self._work)

    def put(self, work: Work) -> None:
        """Add what is to be done."""
        with self._changed:
            self._work.append(work)
            self._changed.notify()

    def take(self) -> Work | None:
        """Wait for the next thing to do; None: there will be nothing more."""
        with self._changed:
            self._at_work = False
            self._changed.wait_for(lambda: self._work or self._closed)
            self._at_work = bool(self._work)
            return self._work.popleft() if self._work else None

    def drop(self, number: int) -> Job | None:
        """Return a write that nobody has taken, which is then forgotten."""
        with self._changed:
            for work in self._work:
                if isinstance(work, Job) and work.request.number == number:
                    self._work.remove(work)
                    return work
        return None

    def close(self) -> None:
        """Say that nothing more comes. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
