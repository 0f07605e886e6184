"""Long headers are handled in pieces, and come out as if they were handled whole."""

from __future__ import annotations

import msgspec
import pytest

from aiockpt.wire.document import Entry
from aiockpt.wire.pieces import decode_entries, encode_entries

MANY = 9_000  # several pieces, both ways


def many(name: str = "layer.{}.weight") -> dict[str, Entry]:
    """Return many entries whose names follow a pattern."""
    return {
        name.format(n): Entry("F32", (4, n), (16 * n, 16 * n + 16)) for n in range(MANY)
    }


def whole(entries: dict[str, Entry]) -> bytes:
    """Return what a decoder sees that takes all at once."""
    return msgspec.json.encode(entries)


@pytest.mark.parametrize(
    "name",
    ["layer.{}.weight", "{}]}},", '{}]}},"', "{}\\]}},", '"{}"]}},"x', "é\n{}"],
    ids=["plain", "entry's end", "with a quote", "backslash", "quotes", "escapes"],
)
def test_entries_survive_both_ways_whatever_their_names(name: str) -> None:
    """No name can be mistaken for the border between two entries."""
    entries = many(name)
    file = bytearray(b"{")
    encode_entries(entries, file)
    assert bytes(file[:1] + file[2:]) == whole(entries)
    assert decode_entries(whole(entries)) == entries


def test_no_entries_are_an_empty_object() -> None:
    """A state dict without tensors has a header too."""
    file = bytearray(b"{")
    encode_entries({}, file)
    assert file == b"{}"
    assert decode_entries(b"{}") == {}


@pytest.mark.parametrize("damage", [-1, 300_000, 500_001])
def test_malformed_text_is_refused_in_any_piece(damage: int) -> None:
    """Text that no decoder would take whole is not taken in pieces either."""
    text = bytearray(whole(many()))
    text[damage] = 0
    with pytest.raises(msgspec.MsgspecError):
        decode_entries(bytes(text))
