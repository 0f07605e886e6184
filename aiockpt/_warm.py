"""One arena that is kept for the next receive, once nobody uses it any more.

Pages that were touched before are several times faster to receive into. Tensors over
an arena have its buffer, and it is theirs for as long as one of them lives; so the
buffer's end says when the arena may be taken again. That may be in any thread, and in
the middle of anything, since it may be the collector that finds out.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from aiockpt._available import available_memory
from aiockpt.errors import LimitExceededError
from aiockpt.memory import Arena
from aiockpt.wire.limits import enforce

__all__ = ["Loan", "WarmArena", "lend"]

# A receiver with less to spare would take the host down with it.
_SHARE_OF_MEMORY: Final = 0.9


class Loan:
    """An arena for one receive; ``buffer`` is for whoever keeps its bytes.

    It comes back only if it was ``finished``: after a receive that has failed somebody
    might still write to it.
    """

    __slots__ = ("__weakref__", "_finished", "arena", "buffer")

    def __init__(self, arena: Arena, returned: deque[Arena] | None = None) -> None:
        self.arena = arena
        self.buffer = arena.buffer
        self._finished: list[bool] = []
        if returned is not None:
            end = weakref.finalize(
                self.buffer, _come_back, arena, self._finished, returned
            )
            end.atexit = False

    def __repr__(self) -> str:
        return f"<Loan {self.arena}>"

    def finish(self) -> None:
        """Say that nobody writes to it any more."""
        self._finished.append(True)

    @property
    def finished(self) -> bool:
        """Whether it comes back, where it is kept."""
        return bool(self._finished)


class WarmArena:
    """Lends arenas, and keeps the last one that came back."""

    def __init__(self) -> None:
        self._returned: deque[Arena] = deque(maxlen=1)

    def __repr__(self) -> str:
        return f"<WarmArena {[*self._returned]}>"

    def lend(self, nbytes: int) -> Loan:
        """Return an arena of at least ``nbytes``: the one that is kept, if it fits.

        It does if it is not more than twice as large.
        """
        try:
            kept = self._returned.pop()
        except IndexError:
            kept = None
        if kept is not None and not nbytes <= kept.nbytes <= 2 * nbytes:
            kept.close()
            kept = None
        return Loan(kept or Arena(nbytes), self._returned)

    def close(self) -> None:
        """Keep nothing from now on; what is lent lives as long as it is used."""
        returned, self._returned = self._returned, deque(maxlen=0)
        while returned:
            returned.pop().close()


def lend(nbytes: int, *, used: int, most: int | None, warm: WarmArena | None) -> Loan:
    """Return an arena for a checkpoint, of which ``used`` bytes are going to be used.

    Raises:
        LimitExceededError: they are more than ``most`` (None: what the host can spare),
            or there is no memory for it.
    """
    available = available_memory()
    enforce(
        "the checkpoint's size",
        used,
        int(available * _SHARE_OF_MEMORY) if most is None else most,
    )
    try:
        return warm.lend(nbytes) if warm else Loan(Arena(nbytes))
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        what = "the checkpoint's size, for which there is no memory,"
        raise LimitExceededError(what, limit=available, actual=nbytes) from error


def _come_back(arena: Arena, finished: list[bool], returned: deque[Arena]) -> None:
    if finished:
        returned.append(arena)  # one that is pushed out goes with its last view
