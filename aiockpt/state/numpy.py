"""Numpy's scalars and arrays out of a peer's payload; numpy is optional."""

from __future__ import annotations

import math
import re
from typing import Any

from aiockpt.state.payload import exactly, sizes

__all__ = ["array_of", "scalar_of"]

# What `dtype.str` says of a dtype without fields. Numpy's own reader takes whole Python
# expressions, which it compiles, and makes of a short text a type of any size.
_CODE = re.compile(r"[<>|=]?[?A-Za-z][0-9]{0,9}(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?")


def scalar_of(payload: Any) -> object:
    """Return the scalar of a code and its bytes."""
    code, raw = payload
    return _elements(code, (), raw)[()]


def array_of(payload: Any) -> object:
    """Return the array of a code, a shape and its bytes."""
    code, shape, raw = payload
    # A copy, because an array over bytes is read-only.
    return _elements(code, sizes(shape), raw).copy()


def _elements(code: str, shape: tuple[int, ...], raw: bytes) -> Any:
    import numpy as np  # optional, and only where such a leaf arrives

    if _CODE.fullmatch(exactly(str, code)) is None:
        raise ValueError("no code of a dtype")
    dtype = np.dtype(code)
    if dtype.hasobject or len(exactly(bytes, raw)) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {list(shape)} elements of {code}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
