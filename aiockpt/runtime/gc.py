"""A pause for the garbage collector where many small objects are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

# Fewer are scanned in less time than it takes to ask whether anything is frozen.
_MANY = 20_000


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the cyclic collector off for a block that makes no cycles.

    It would scan every new object again and again, with the interpreter lock held:
    half of the time of describing 100,000 tensors. Reference counting goes on.

    What was made then counts as old: a scan of it as young would come at once, and
    hold the interpreter lock for some 20 ms, or for 100 if it became a full one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # What somebody froze stays frozen; to ask walks through all of it.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
