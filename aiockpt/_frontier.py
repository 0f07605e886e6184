"""How far the staging of a snapshot has come, for whoever reads close behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from aiockpt.errors import StagingError

__all__ = ["Frontier"]


class Frontier:
    """The first byte of a data segment that is not staged yet. For threads.

    All bytes being there is not enough: staging may still be called off until it says
    itself that it is done.

    Attributes:
        nbytes: So many bytes are there, from the segment's first one on.
        done: Whether staging has ended well: from then on nothing changes.
        failure: Why it ended otherwise; empty while it did not.
    """

    def __init__(self, *, done: bool = False) -> None:
        self.nbytes = 0
        self.done = done
        self.failure = ""
        self._changed = threading.Condition()
        self._apart: dict[int, int] = {}
        self._tell: Callable[[], object] = _nobody

    def __repr__(self) -> str:
        state = self.failure or ("done" if self.done else self.nbytes)
        return f"<Frontier {state}>"

    def watch(self, tell: Callable[[], object]) -> None:
        """Have ``tell`` called after each change, by the thread that makes it."""
        self._tell = tell

    def add(self, start: int, stop: int) -> None:
        """Note that ``[start, stop)`` is there; ranges may come in any order."""
        self._apart[start] = stop
        reached = self.nbytes
        while reached in self._apart:
            reached = self._apart.pop(reached)
        self.advance(reached)

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes are there, from the first one on."""
        if nbytes > self.nbytes:
            self._change(nbytes=nbytes)

    def finish(self) -> None:
        """Note that staging has ended well."""
        self._change(done=True)

    def fail(self, reason: str) -> None:
        """Note that staging has ended otherwise, if it had not ended."""
        if not self.ended:
            self._change(failure=reason or "for no reason that was told")

    @property
    def ended(self) -> bool:
        """Whether nothing is staged any more, well or not."""
        return self.done or bool(self.failure)

    def wait(self, nbytes: int) -> None:
        """Block until so many bytes are there.

        Raises:
            StagingError: they will not be.
        """
        self._wait(lambda: self.nbytes >= nbytes)

    def wait_until_done(self) -> None:
        """Block until everything is there for certain.

        Raises:
            StagingError: it will not be.
        """
        self._wait(lambda: False)

    def _wait(self, enough: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ended or enough())
        if self.failure:
            raise StagingError(f"staging did not end: {self.failure}")

    def _change(self, **values: object) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()
        self._tell()


def _nobody() -> None:
    pass
