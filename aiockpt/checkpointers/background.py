"""BackgroundCheckpointer: saves in the background, for programs without an event loop.

An `AsyncCheckpointer` does the work, on an event loop in a separate thread.
"""

from __future__ import annotations

from aiockpt.checkpointers.async_checkpointer import AsyncCheckpointer
from aiockpt.checkpointers.base import Checkpointer
from aiockpt.memory.device import marked
from aiockpt.runtime.background import Background, blocking, direct

__all__ = ["BackgroundCheckpointer"]


class _Verbs(Background[AsyncCheckpointer]):
    # Apart from the class below: a type checker would otherwise take the types of the
    # results from `Checkpointer`, where they are `Any`.

    save = blocking(AsyncCheckpointer.save)
    load = blocking(AsyncCheckpointer.load, strict=True)
    statistics = direct(AsyncCheckpointer.statistics)


class BackgroundCheckpointer(_Verbs, Checkpointer):
    """Saves in the background without an event loop; any thread may use it.

    ``save`` blocks only while the state dict is copied. Then call
    :meth:`.SaveHandle.result` to wait until the checkpoint is committed. The verbs are
    those of :class:`.AsyncCheckpointer`, and so are writes, commits, errors and
    policies. What their descriptions say of a cancelled call is true of a call that
    Ctrl-C interrupts. ``progress`` is called in the checkpointer's thread. ``load`` is
    strict by default, as :func:`.load` is. If a program ends without :meth:`close`, the
    staged saves are written nevertheless.

    Args:
        checkpointer: The checkpointer that does the work. Nothing else may use it.
    """

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        super().__init__(
            checkpointer,
            "the checkpointer",
            # A background writer outlasts this thread by itself.
            at_exit=_nothing,
            entered=lambda: marked(checkpointer.ports),
        )

    def close(self) -> tuple[BaseException, ...]:
        """Finish the staged saves, and close everything. Idempotent.

        This takes at most ``subprocess_shutdown_timeout_secs``; see
        :meth:`.AsyncCheckpointer.close`. If interrupted, the closing continues, and a
        later call waits for it.

        Returns:
            The errors of failed saves that no handle has raised.
        """
        return self._end(self._source.close) or ()


async def _nothing() -> None:
    return
