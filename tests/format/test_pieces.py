"""Long headers are handled in pieces, and come out as if they were handled whole."""

from __future__ import annotations

import msgspec
import pytest

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.entries import Entries, Entry, decode_entries, encode_entries

MANY = 9_000  # several pieces, both ways


def many(name: str = "layer.{}.weight") -> dict[str, Entry]:
    """Return many entries whose names follow a pattern."""
    return {
        name.format(n): Entry("F32", (4, n), (16 * n, 16 * n + 16)) for n in range(MANY)
    }


def whole(entries: dict[str, Entry]) -> bytes:
    """Return a header's members as an encoder writes them that takes all at once."""
    return b"," + msgspec.json.encode(entries)[1:]


@pytest.mark.parametrize(
    "name",
    ["layer.{}.weight", "{}]}},", '{}]}},"', "{}\\]}},", '"{}"]}},"x', "é\n{}"],
    ids=["plain", "entry's end", "with a quote", "backslash", "quotes", "escapes"],
)
def test_entries_survive_both_ways_whatever_their_names(name: str) -> None:
    """No name can be mistaken for the border between two entries."""
    entries = many(name)
    columns = Entries.of(entries)
    assert b"".join(encode_entries(columns)) + b"}" == whole(entries)
    assert decode_entries(whole(entries) + b"  ", 0) == columns
    assert dict(zip(columns.names, columns, strict=True)) == entries


def test_no_entries_are_an_empty_object() -> None:
    """A state dict without tensors has a header too."""
    assert list(encode_entries(Entries())) == []
    assert decode_entries(b"}   ", 0) == Entries()


@pytest.mark.parametrize("apart", [1, MANY - 1], ids=["one piece", "two pieces"])
def test_two_entries_of_one_name_are_refused(apart: int) -> None:
    """A decoder would keep one of them without a word."""
    entries = whole(many()).replace(b"layer.%d." % apart, b"layer.0.")
    with pytest.raises(RemoteProtocolError):
        decode_entries(entries, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"[16,32]", b"[16, 32]"), (b"layer.8999", b"la\\u0079er.8999")],
    ids=["space", "escape"],
)
def test_another_spelling_is_refused(old: bytes, new: bytes) -> None:
    """One checkpoint has one header, in all of its pieces."""
    text = whole(many())
    assert old in text
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode_entries(text.replace(old, new), 0)


@pytest.mark.parametrize(
    "text", [b",}", whole(many())[1:]], ids=["too many", "missing"]
)
def test_the_comma_after_the_metadata_belongs_to_an_entry(text: bytes) -> None:
    """The pieces alone would not tell."""
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode_entries(text, 0)


@pytest.mark.parametrize("damage", [-1, 300_000, 500_001])
def test_malformed_text_is_refused_in_any_piece(damage: int) -> None:
    """Text that no decoder would take whole is not taken in pieces either."""
    text = bytearray(whole(many()))
    text[damage] = 0
    with pytest.raises(msgspec.MsgspecError):
        decode_entries(bytes(text), 0)
