"""Long JSON objects in pieces: no single call keeps the interpreter lock for long.

A header of 100,000 entries takes a tenth of a second to decode and to encode, and
both hold the lock all the while, so an event loop in the same process would stand
still. In pieces of a few hundred kilobytes it gets its turn in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import msgspec

from aiockpt.wire.document import Entry

__all__ = ["decode_entries", "encode_entries"]

_PIECE_BYTES: Final = 256 << 10
_PIECE_ENTRIES: Final = 2_000
_BETWEEN: Final = b']},"'
"""Stands between two entries in canonical form; in a string its quote is escaped."""

_DECODER: Final = msgspec.json.Decoder(dict[str, Entry])
_ENCODER: Final = msgspec.json.Encoder()


def decode_entries(text: bytes) -> dict[str, Entry]:
    """Return the entries of ``{...}``.

    Raises:
        msgspec.MsgspecError: malformed, or no entries.
    """
    entries: dict[str, Entry] = {}
    try:
        for piece in _pieces(text):
            entries.update(_DECODER.decode(piece))
    except msgspec.MsgspecError:
        # A name may end like an entry does, and malformed text is not ours to judge.
        return _DECODER.decode(text)
    return entries


def _pieces(text: bytes) -> Iterator[bytes]:
    start = 1
    while (found := text.find(_BETWEEN, start + _PIECE_BYTES)) >= 0:
        stop = found + 2
        yield b"{%b}" % text[start:stop]
        start = stop + 1
    yield b"{%b" % text[start:]


def encode_entries(entries: Mapping[str, Entry], file: bytearray) -> None:
    """Append the members of ``entries``, each behind a comma, in canonical form.

    Raises:
        UnicodeEncodeError: a name has a lone surrogate.
    """
    members = iter(entries.items())
    while piece := dict(islice(members, _PIECE_ENTRIES)):
        start = len(file)
        _ENCODER.encode_into(piece, file, start)
        file[start] = ord(",")
        del file[-1:]  # the closing brace
    file += b"}"
