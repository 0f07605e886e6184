"""HTTP's range headers.

Inside the package a range is half-open, ``[start, stop)``. The inclusive form of
RFC 9110 section 14 exists in the parsers and formatters below and nowhere else.
"""

from __future__ import annotations

import re

from aiockpt.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "RangeNotSatisfiable",
    "format_content_range",
    "format_range",
    "format_unsatisfied_range",
    "parse_content_range",
    "parse_range",
]

# 19 digits hold every int64; longer ones only cost time.
_RANGE = re.compile(r"([0-9]{0,19})-([0-9]{0,19})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


class RangeNotSatisfiable(LocalProtocolError):  # noqa: N818 (HTTP's own name for 416)
    """A well-formed ``Range`` asks for nothing that exists (HTTP 416)."""

    def __init__(self, value: str, size: int) -> None:
        super().__init__(f"range {value!r} lies outside the {size} bytes that exist")
        self.value = value
        self.size = size


def parse_range(value: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes that a ``Range`` header asks for, clamped to ``size``.

    None means *ignore it and send everything* (RFC 9110 section 14.2): absent,
    malformed, another unit, or several ranges.

    Raises:
        RangeNotSatisfiable: the range is well formed and holds no byte.
    """
    match = _RANGE.fullmatch(_only_spec(value))
    if value is None or match is None or match[0] == "-":
        return None
    first, last = match.groups()
    if not first:
        return _suffix(value, int(last), size)
    start, stop = int(first), int(last) + 1 if last else size
    if last and stop <= start:
        return None
    if start >= size:
        raise RangeNotSatisfiable(value, size)
    return start, min(stop, size)


def _only_spec(value: str | None) -> str:
    unit, _, specs = (value or "").partition("=")
    # RFC 9110 5.6.1: a list may hold blanks and empty elements.
    given = [spec for each in specs.split(",") if (spec := each.strip(" \t"))]
    return given[0] if unit.lower() == "bytes" and len(given) == 1 else ""


def _suffix(value: str, length: int, size: int) -> tuple[int, int] | None:
    if length == 0:
        raise RangeNotSatisfiable(value, size)
    # The last n bytes of nothing are satisfiable, and have no Content-Range.
    return (max(size - length, 0), size) if size else None


def format_range(start: int, stop: int) -> str:
    """Return the ``Range`` value of a non-empty ``[start, stop)``."""
    _require_bytes(start, stop)
    return f"bytes={start}-{stop - 1}"


def format_content_range(start: int, stop: int, size: int) -> str:
    """Return the ``Content-Range`` value of a 206."""
    _require_bytes(start, stop)
    return f"bytes {start}-{stop - 1}/{size}"


def format_unsatisfied_range(size: int) -> str:
    """Return the ``Content-Range`` value of a 416."""
    return f"bytes */{size}"


def _require_bytes(start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise LocalProtocolError(f"[{start}, {stop}) is no range of bytes")


def parse_content_range(value: str | None) -> tuple[int, int, int]:
    """Return ``(start, stop, size)`` of a 206's ``Content-Range``.

    Raises:
        RemoteProtocolError: absent, malformed, contradictory, or of unknown size.
    """
    match = _CONTENT_RANGE.fullmatch(value or "")
    if match is not None:
        start, last, size = map(int, match.groups())
        if start <= last < size:
            return start, last + 1, size
    raise RemoteProtocolError(f"bad Content-Range {(value or '')[:100]!r}")
