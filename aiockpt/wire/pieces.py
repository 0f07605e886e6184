"""Long JSON objects in pieces: no single call keeps the interpreter lock for long.

A header of 100,000 entries takes a tenth of a second to decode and to encode, and
both hold the lock all the while, so an event loop in the same process would stand
still. In pieces of a few hundred kilobytes it gets its turn in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from aiockpt.errors import RemoteProtocolError
from aiockpt.wire.entries import Bytes, Entries, Entry

__all__ = ["decode_entries", "encode_entries"]

_PIECE_BYTES: Final = 256 << 10
_PIECE_ENTRIES: Final = 2_000
_BETWEEN: Final = b']},"'
"""Stands between two entries in canonical form; in a string its quote is escaped."""

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
    try:
        entries = _decode(_pieces(header, start, _PIECE_BYTES))
    except msgspec.MsgspecError:
        # A name may end like an entry does, and malformed text is not ours to judge.
        entries = _decode(_pieces(header, start, len(header)))
    if comma != bool(len(entries)):
        raise RemoteProtocolError("the header is not in canonical form")
    if len(set(entries.names)) != len(entries):
        raise RemoteProtocolError("the header has two entries of the same name")
    return entries


def _decode(pieces: Iterator[bytes]) -> Entries:
    entries = Entries()
    for piece in pieces:
        found = _DECODER.decode(piece)
        # One checkpoint has one header: no duplicate keys, no second spelling.
        if _ENCODER.encode(found) != piece:
            raise RemoteProtocolError("the header is not in canonical form")
        entries.extend(found)
    return entries


def _pieces(header: Bytes, start: int, nbytes: int) -> Iterator[bytes]:
    while (found := header.find(_BETWEEN, start + nbytes)) >= 0:
        stop = found + 2
        yield b"{%b}" % header[start:stop]
        start = stop + 1
    yield b"{%b" % header[start:].rstrip(b" ")


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
