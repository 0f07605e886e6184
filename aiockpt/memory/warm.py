"""One arena that is kept for the next receive, once nobody uses it any more.

Pages that were touched before are several times faster to receive into. Tensors over
an arena have its buffer, and it is theirs for as long as one of them lives; so the
buffer's end says when the arena may be taken again. That may be in any thread, and in
the middle of anything, since it may be the collector that finds out.
"""

from __future__ import annotations

import weakref
from collections import deque

from aiockpt.format.limits import enforce
from aiockpt.memory.arena import Arena
from aiockpt.runtime.available import spare_memory
from aiockpt.runtime.host_limits import allocating

__all__ = ["Loan", "WarmArena", "lend"]


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
        if kept is not None and not _fits(kept, nbytes):
            kept.close()
            kept = None
        return Loan(kept or Arena(nbytes), self._returned)

    def kept_for(self, nbytes: int) -> int:
        """Return how much memory `lend` would not have to take from the system."""
        kept = [*self._returned]
        return kept[0].touched if kept and _fits(kept[0], nbytes) else 0

    def close(self) -> None:
        """Keep nothing from now on; what is lent lives as long as it is used."""
        returned, self._returned = self._returned, deque(maxlen=0)
        while returned:
            returned.pop().close()


def lend(nbytes: int, *, used: int, most: int | None, warm: WarmArena | None) -> Loan:
    """Return an arena for a checkpoint, of which ``used`` bytes are going to be used.

    Raises:
        LimitExceededError: they are more than ``most`` (None: what the host can spare).
        StagingError: the system refuses the memory.
    """
    if most is None:
        most = spare_memory(kept=warm.kept_for(nbytes) if warm else 0)
    enforce("the checkpoint's size", used, most)
    with allocating("a checkpoint", nbytes):
        loan = warm.lend(nbytes) if warm else Loan(Arena(nbytes))
    loan.arena.touched = max(loan.arena.touched, used)
    return loan


def _fits(kept: Arena, nbytes: int) -> bool:
    return nbytes <= kept.nbytes <= 2 * nbytes


def _come_back(arena: Arena, finished: list[bool], returned: deque[Arena]) -> None:
    if finished:
        returned.append(arena)  # one that is pushed out goes with its last view
