"""``Range`` and ``Content-Range``, case by case from RFC 9110 section 14."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError, RemoteProtocolError
from aiockpt.http.protocol import (
    RangeNotSatisfiable,
    format_content_range,
    format_range,
    parse_content_range,
    parse_range,
)

pytestmark = pytest.mark.torch_free

SIZE = 10_000
HUGE = "9" * 19


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # 14.1.2: first and last are inclusive
        ("bytes=0-499", (0, 500)),
        ("bytes=500-999", (500, 1000)),
        ("bytes=0-0", (0, 1)),
        ("bytes=9999-9999", (9999, SIZE)),
        # 14.1.2: a last position behind the end means the end
        ("bytes=9500-", (9500, SIZE)),
        ("bytes=0-", (0, SIZE)),
        ("bytes=9500-10000", (9500, SIZE)),
        (f"bytes=0-{HUGE}", (0, SIZE)),
        # 14.1.2: a suffix; one that is too long means everything
        ("bytes=-500", (9500, SIZE)),
        ("bytes=-1", (9999, SIZE)),
        ("bytes=-10000", (0, SIZE)),
        (f"bytes=-{HUGE}", (0, SIZE)),
        # 14.1: unit names are case-insensitive
        ("Bytes=0-1", (0, 2)),
        ("BYTES=-1", (9999, SIZE)),
        # 5.6.1: blanks and empty elements of a list mean nothing
        ("bytes= 0-499", (0, 500)),
        ("bytes=0-499 ", (0, 500)),
        ("bytes=0-499,", (0, 500)),
        ("bytes=, ,0-499", (0, 500)),
        ("bytes=007-008", (7, 9)),
    ],
)
def test_a_range_is_what_the_rfc_says(value: str, expected: tuple[int, int]) -> None:
    """A well-formed single range gives exactly its bytes."""
    assert parse_range(value, SIZE) == expected


@pytest.mark.parametrize(
    "value",
    [
        None, "", "bytes", "bytes=", "bytes=-", "bytes=,", "bytes=a-b", "bytes=0",
        "bytes=--1", "bytes=-1-2", "bytes=0-1-2", "bytes=+0-1", "bytes=0x0-0x1",
        "bytes=0 - 499", "bytes=1_0-2_0", "bytes=\u0660-\u0669", "bytes=5-4",
        "bytes =0-1", "items=0-1", "none=0-1", "0-499", "bytes=0-9,20-29",
        "bytes=0-0,-1", f"bytes=0-{HUGE}9", f"bytes={'0' * 10_000}-",
    ],
)  # fmt: skip
def test_other_ranges_are_ignored(value: str | None) -> None:
    """Absent, malformed, of another unit, or several: the answer is everything."""
    assert parse_range(value, SIZE) is None


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("bytes=10000-", SIZE), ("bytes=10000-10001", SIZE), (f"bytes={HUGE}-", SIZE),
        ("bytes=-0", SIZE), ("bytes=0-", 0), ("bytes=0-0", 0), ("bytes=-0", 0),
    ],
)  # fmt: skip
def test_a_range_that_holds_no_byte_is_unsatisfiable(value: str, size: int) -> None:
    """The answer is a 416 that names the size."""
    with pytest.raises(RangeNotSatisfiable) as caught:
        parse_range(value, size)
    assert (caught.value.value, caught.value.size) == (value, size)


def test_the_end_of_nothing_is_everything() -> None:
    """A suffix of an empty file is satisfiable and has no Content-Range: a 200."""
    assert parse_range("bytes=-5", 0) is None


@given(st.integers(0, 2**62), st.integers(1, 2**62))
def test_a_formatted_range_parses_to_itself(start: int, length: int) -> None:
    """What the client asks for is what the server reads."""
    stop = start + length
    assert parse_range(format_range(start, stop), stop) == (start, stop)


@given(st.text(max_size=40) | st.from_regex(r"bytes=[0-9, -]{0,30}"))
def test_any_text_is_ignored_satisfied_or_refused(value: str) -> None:
    """A range is inside of the file and not empty, whatever the header says."""
    try:
        found = parse_range(value, SIZE)
    except RangeNotSatisfiable:
        return
    assert found is None or 0 <= found[0] < found[1] <= SIZE


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 4), (-1, 4)])
def test_an_empty_range_cannot_be_asked_for(start: int, stop: int) -> None:
    """HTTP cannot say it: its ranges are inclusive."""
    with pytest.raises(LocalProtocolError):
        format_range(start, stop)
    with pytest.raises(LocalProtocolError):
        format_content_range(start, stop, 10)


@pytest.mark.parametrize(
    "value",
    [
        None, "", "bytes */100", "bytes 0-9/*", "bytes 0-9", "bytes=0-9/10",
        "bytes 0-10/10", "bytes 5-4/10", "bytes -5/10", "bytes 0-9/10 ",
        " bytes 0-9/10", "Bytes 0-9/10", "items 0-9/10", "bytes 0-9/10\n",
        f"bytes 0-9/{HUGE}9",
    ],
)  # fmt: skip
def test_another_content_range_is_refused(value: str | None) -> None:
    """The client never guesses where bytes belong."""
    with pytest.raises(RemoteProtocolError):
        parse_content_range(value)
