"""Shows how far a transfer is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import math
import os
import time
from typing import TextIO

from aiockpt.cli.text import format_bytes, format_seconds
from aiockpt.events import Progress

__all__ = ["ProgressBar", "render"]

_WORDS = {
    "fetch_manifest": "waiting",
    "allocate": "preparing",
    "plan": "checking what is there",
    "fetch_chunk": "fetching",
    "rebuild": "rebuilding",
    "load": "copying",
    "write": "writing",
}
_MAX_BAR = 40
_FRAME = 0.1
_LINE_EVERY = 5.0
_CLEAR = "\r\x1b[2K"


def render(progress: Progress, width: int) -> str:
    """Return one line of at most ``width`` columns."""
    done, total = progress.bytes_done, progress.bytes_total
    word = _WORDS.get(progress.stop, progress.stop)
    if not total:
        return word[:width]
    share = min(done / total, 1.0)
    facts = f"{share:4.0%}  {format_bytes(done)} of {format_bytes(total)}"
    if progress.rate:
        left = (total - done) / progress.rate
        facts += f"  {format_bytes(progress.rate)}/s  ETA {format_seconds(left)}"
    room = min(width - len(word) - len(facts) - 6, _MAX_BAR)
    if room < 5:
        return f"{word} {facts}"[:width]
    filled = math.floor(share * room)
    return f"{word}  [{'#' * filled}{'-' * (room - filled)}] {facts}"


class ProgressBar:
    """A ``progress`` callable that draws itself on a stream.

    Args:
        stream: Where to draw; a terminal gets a bar, anything else plain lines.
        quiet: Draw nothing.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._bar = not quiet and stream.isatty()
        self._pause = _FRAME if self._bar else _LINE_EVERY
        self._last: Progress | None = None
        self._next = time.monotonic() + (0 if self._bar else self._pause)

    def __call__(self, progress: Progress) -> None:
        """Show ``progress``, unless the last one was shown a moment ago."""
        self._last = progress
        now = time.monotonic()
        if not self._quiet and now >= self._next:
            self._next = now + self._pause
            self._draw(progress)

    @property
    def chunks_done(self) -> int:
        """How many chunks have been verified, as far as it was told."""
        return self._last.chunks_done if self._last is not None else 0

    def note(self, text: str) -> None:
        """Write a line of text, above the bar."""
        if not self._quiet:
            self._write(f"{_CLEAR if self._bar else ''}{text}\n")

    def close(self) -> None:
        """Leave the bar as it was in the end, and the cursor on a line of its own."""
        if self._bar and self._last is not None:
            self._draw(self._last)
            self._write("\n")
        self._last = None

    def _draw(self, progress: Progress) -> None:
        if self._bar:
            self._write(_CLEAR + render(progress, self._width() - 1))
        else:
            self._write(f"{render(progress, 200)}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # nobody sees it any more, which is no reason to stop
            self._quiet, self._bar = True, False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80
