"""Long JSON in pieces: no single call keeps the interpreter lock for long.

A header of 100,000 entries takes a tenth of a second to decode and to encode, and
both hold the lock all the while, so an event loop in the same process would stand
still. In pieces of a few hundred kilobytes it gets its turn in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.format.called_off import look
from aiockpt.format.entries import Bytes, Entries, Entry
from aiockpt.format.limits import enforce
from aiockpt.format.paths import Node

__all__ = [
    "decode_entries",
    "decode_items",
    "decode_node",
    "decode_text",
    "encode_entries",
]

T = TypeVar("T")

_PIECE_BYTES: Final = 256 << 10
_PIECE_ENTRIES: Final = 2_000
_BETWEEN: Final = b']},"'
"""Stands between two entries in canonical form; in a string its quote is escaped."""

_AFTER_NAME: Final = b':{"'
_ESCAPE_BYTES: Final = 6
_LEVELS: Final = 16

_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_DECODER: Final = msgspec.json.Decoder(dict[str, Entry])
_ENCODER: Final = msgspec.json.Encoder()


def decode_entries(header: Bytes, start: int) -> Entries:
    """Return the entries of a header whose metadata ends before byte ``start``.

    Raises:
        msgspec.MsgspecError: malformed, or no entries.
        RemoteProtocolError: two have one name, or this is not how we write them.
    """
    comma = header[start : start + 1] == b","
    start += comma
    entries = _decode(_pieces(header, start))
    if comma != bool(len(entries)):
        raise RemoteProtocolError("the header is not in canonical form")
    if len(set(entries.names)) != len(entries):
        raise RemoteProtocolError("the header has two entries of the same name")
    return entries


def _decode(pieces: Iterator[bytes]) -> Entries:
    entries = Entries()
    for piece in pieces:
        look()
        found = _DECODER.decode(piece)
        # One checkpoint has one header: no duplicate keys, no second spelling.
        if _ENCODER.encode(found) != piece:
            raise RemoteProtocolError("the header is not in canonical form")
        entries.extend(found)
    return entries


def _pieces(header: Bytes, start: int) -> Iterator[bytes]:
    stop = start + _PIECE_BYTES
    while (found := header.find(_BETWEEN, stop)) >= 0:
        stop = found + len(_BETWEEN)
        if header[stop : stop + len(_AFTER_NAME)] == _AFTER_NAME:
            continue  # a name that ends like an entry does
        stop = found + 2
        yield b"{%b}" % header[start:stop]
        start = stop + 1
        stop = start + _PIECE_BYTES
    yield b"{%b" % header[start:].rstrip(b" ")


def decode_text(header: Bytes, start: int, stop: int) -> bytes:
    """Return the text that a string of the header holds, its quotes left out.

    Raises:
        msgspec.MsgspecError: malformed.
        RemoteProtocolError: this is not how we write it.
    """
    found = bytearray()
    while start < stop:
        look()
        end = _end_of_piece(header, start, min(start + _PIECE_BYTES, stop))
        piece = b'"%b"' % header[start : min(end, stop)]
        text = msgspec.json.decode(piece, type=str)
        if _ENCODER.encode(text) != piece:
            raise RemoteProtocolError("the header is not in canonical form")
        found += text.encode()
        start = end
    return bytes(found)


def _end_of_piece(header: Bytes, start: int, stop: int) -> int:
    """Return ``stop``, or the end of the escape or character that is cut there."""
    while header[stop : stop + 1] and 0x80 <= header[stop] < 0xC0:
        stop += 1
    piece = header[start:stop]
    at = piece.rfind(b"\\", -_ESCAPE_BYTES)
    if at < 0 or (at + 1 - len(piece[: at + 1].rstrip(b"\\"))) % 2 == 0:
        return stop
    size = _ESCAPE_BYTES if header[start + at + 1 : start + at + 2] == b"u" else 2
    return max(stop, start + at + size)


def decode_items(text: bytes | memoryview, kind: type[T], *, most: int) -> list[T]:
    """Return the items of a JSON array.

    Raises:
        msgspec.MsgspecError: malformed, or an item of another type.
        LimitExceededError: more than ``most``.
    """
    items = _RAWS.decode(text)
    enforce("the number of tensors", len(items), most)
    decoder = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
    found: list[T] = []
    for first in range(0, len(items), _PIECE_ENTRIES):
        look()
        some = items[first : first + _PIECE_ENTRIES]
        found += decoder.decode(b"[%b]" % b",".join(some))
    return found


def decode_node(text: bytes | memoryview, *, depth: int = 0) -> Node:
    """Return the value of JSON: of long arrays item by item.

    Raises:
        msgspec.MsgspecError: malformed.
    """
    # Each level looks at all of the text again, so there are few.
    if len(text) < _PIECE_BYTES or depth == _LEVELS or text[:1] != b"[":
        return msgspec.json.decode(text)  # type: ignore[no-any-return]
    items = _RAWS.decode(text)
    found: list[Node] = []
    for first in range(0, len(items), _PIECE_ENTRIES):
        look()
        some = items[first : first + _PIECE_ENTRIES]
        if sum(map(len, some)) < _PIECE_BYTES:
            found += msgspec.json.decode(b"[%b]" % b",".join(some))
        else:
            found += (decode_node(memoryview(each), depth=depth + 1) for each in some)
    return found


def encode_entries(entries: Entries) -> Iterator[bytes]:
    """Yield the members of ``entries``, each behind a comma, in canonical form.

    Raises:
        UnicodeEncodeError: a name has a lone surrogate.
    """
    for first in range(0, len(entries), _PIECE_ENTRIES):
        last = first + _PIECE_ENTRIES
        some = entries.between(first, last)
        piece = _ENCODER.encode(dict(zip(entries.names[first:last], some, strict=True)))
        yield b",%b" % piece[1:-1]
