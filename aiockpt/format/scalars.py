"""How single values become JSON, and back; each pair is exact for every value.

The encoders return a node. The parsers take the text in it, which may come from a
peer, and raise ValueError with a reason.
"""

from __future__ import annotations

import math
import re
import struct
from binascii import a2b_base64, b2a_base64
from typing import Final

from aiockpt.format.paths import Node, is_unicode

__all__ = [
    "encode_bytes",
    "encode_float",
    "encode_int",
    "encode_str",
    "parse_bytes",
    "parse_float",
    "parse_int",
    "parse_str",
]

_EXACT: Final = 2**53
_HEX: Final = re.compile(r"-?[0-9a-f]+")
_NAN: Final = re.compile(r"nan:([0-9a-f]{16})")


def encode_int(value: int) -> Node:
    """Encode an int of any size."""
    # Readers other than Python keep JSON numbers as doubles.
    return value if -_EXACT < value < _EXACT else ["int", f"{value:x}"]


def parse_int(text: str) -> int:
    """Parse hex digits; decimal ones would take quadratic time."""
    if _HEX.fullmatch(text) is None:
        raise ValueError("not a hexadecimal number")
    return int(text, 16)


def encode_float(value: float) -> Node:
    """Encode a float with all its bits, also those of a nan."""
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return ["float", str(value)]
    return ["float", f"nan:{struct.pack('>d', value).hex()}"]


def parse_float(text: str) -> float:
    """Parse a float that is not finite."""
    if text in ("inf", "-inf"):
        return float(text)
    match = _NAN.fullmatch(text)
    value: float = struct.unpack(">d", bytes.fromhex(match[1]))[0] if match else 0.0
    if not math.isnan(value):
        raise ValueError("neither inf nor nan")
    return value


def encode_str(value: str) -> Node:
    """Encode a str, which may hold lone surrogates."""
    if is_unicode(value):
        return value
    return ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def parse_str(text: str) -> str:
    """Parse a str that JSON cannot hold."""
    return parse_bytes(text).decode("utf-8", "surrogatepass")


def encode_bytes(value: bytes) -> Node:
    """Encode bytes."""
    return ["bytes", _base64(value)]


def parse_bytes(text: str) -> bytes:
    """Parse strict base64."""
    return a2b_base64(text, strict_mode=True)


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()
