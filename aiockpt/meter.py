"""What a receive tells its caller's ``progress``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from aiockpt.events import Progress, call_guarded
from aiockpt.format.manifest import Outline

__all__ = ["Meter"]


class Meter:
    """Counts bytes and chunks for the caller's ``progress``."""

    def __init__(self, report: Callable[[Progress], None] | None) -> None:
        self._report = report
        self._state = Progress(stop="fetch_manifest")
        self._started = 0.0

    def expect(self, outline: Outline) -> None:
        """Set the totals to those of the whole."""
        self._state = replace(
            self._state,
            bytes_total=outline.grid.segment_bytes,
            chunks_total=len(outline.grid),
        )

    def expect_more(self, nbytes: int, chunks: int) -> None:
        """Raise the totals: this part is wanted, too."""
        self._state = replace(
            self._state,
            bytes_total=self._state.bytes_total + nbytes,
            chunks_total=self._state.chunks_total + chunks,
        )

    def at(self, stop: str) -> None:
        """Tell that the receive is at another stop."""
        if stop == "fetch_chunk":
            self._started = time.monotonic()
        self._tell(replace(self._state, stop=stop))

    def add(self, nbytes: int, chunks: int) -> None:
        """Tell that more has arrived."""
        done = self._state.bytes_done + nbytes
        elapsed = max(time.monotonic() - self._started, 1e-6)
        self._tell(
            replace(
                self._state,
                bytes_done=done,
                chunks_done=self._state.chunks_done + chunks,
                rate=(done - self._state.bytes_reused) / elapsed,
            )
        )

    def reuse(self, nbytes: int, chunks: int) -> None:
        """Tell that these need not arrive."""
        self._tell(
            replace(
                self._state,
                bytes_done=self._state.bytes_done + nbytes,
                bytes_reused=self._state.bytes_reused + nbytes,
                chunks_done=self._state.chunks_done + chunks,
            )
        )

    def _tell(self, state: Progress) -> None:
        self._state = state
        if self._report is not None:
            call_guarded(self._report, state)
