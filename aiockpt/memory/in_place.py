"""The data segment where a state dict has it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from aiockpt.memory.arena import view_of_address

__all__ = ["InPlace"]


class _Plan(Protocol):
    """A `CopyPlan`, as far as it is asked here."""

    def views(
        self, window: memoryview, base: int, start: int, stop: int
    ) -> list[memoryview]: ...

    def split(
        self,
        window: memoryview,
        base: int,
        start: int,
        spare: memoryview,
        kept: Sequence[int],
    ) -> list[memoryview]: ...

    def versions(self) -> array[int]: ...

    def span(self) -> tuple[int, int]: ...


class InPlace:
    """The data segment in the state dict's own memory, where that is possible.

    One window over all of the state's host memory, of which only what belongs to it
    is ever sliced: a view of each tensor would weigh more than a small tensor.
    """

    def __init__(self, plan: _Plan) -> None:
        start, stop = plan.span()
        self._plan = plan
        self._base = start
        self._window = view_of_address(start, stop - start, plan)
        self._versions: array[int] | None = None

    def watch(self) -> None:
        """Remember the state, so that `changed` can tell."""
        self._versions = self._plan.versions()

    def changed(self) -> bool:
        """Say whether torch has written to one of the tensors since."""
        return self._versions is not None and self._versions != self._plan.versions()

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the writable views that hold ``[start, stop)``, in order."""
        return self._plan.views(self._window, self._base, start, stop)

    def split(
        self, start: int, spare: memoryview, kept: Sequence[int]
    ) -> list[memoryview]:
        """Return memory for the bytes from ``start`` on, as many as ``spare`` has.

        What is not the state's own goes to the arena, if its entry is ``kept``, or
        else to ``spare``.
        """
        return self._plan.split(self._window, self._base, start, spare, kept)
