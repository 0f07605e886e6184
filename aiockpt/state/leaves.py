"""Leaves beyond the builtin ones: the value types of torch and numpy, and pickles.

Each becomes ``["ext", tag, payload]``, with a payload that the tree codec can carry.
A peer's tree can name the same bytes a million times, and some decoders copy them. So
all decoders of one tree together may copy no more bytes than the peer sent. Numpy is
optional.
"""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - only behind allow_pickle, which both ends must ask for
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format import dtypes
from aiockpt.format.paths import PICKLE, Path, format_path
from aiockpt.format.registry import REGISTRY, Codec, Registry, exactly
from aiockpt.state.nodes import decoder_of

_VALUES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
}
"""All torch dtypes by name; a state dict may hold any of them as a value."""

DTYPES = {name: dtype for name, dtype in _VALUES.items() if name in dtypes.DTYPES}
"""The dtypes of tensors that can travel, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_REMEDY = (
    "only dense tensors travel; put what it is made of in its place, for example "
    "its indices, values and size, or a class of yours that holds these and that "
    "aiockpt.register_leaf knows on both ends"
)


class Extension(NamedTuple):
    """The form in which a leaf without a registered exact type travels."""

    tag: str
    payload: object


def extension(value: object, path: Path, *, allow_pickle: bool) -> Extension | None:
    """Return the encodable form of a leaf without a registered type, or None.

    Raises:
        UnsupportedLeafError: the leaf is a tensor that cannot travel, or its pickling
            failed.
    """
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        kind = kind_of(value)  # type: ignore[arg-type]
        raise UnsupportedLeafError(format_path(path), kind, _REMEDY)
    if isinstance(value, torch.Tensor):
        return None  # a subclass carries state that only its author knows
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return _numpy_leaf(value)
    return _pickled(value, path) if allow_pickle else None


def kind_of(tensor: torch.Tensor) -> str:
    """Return what a tensor is that has no encoding, for an error."""
    if tensor.is_nested:
        return "nested tensor"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    return "meta tensor" if tensor.is_meta else f"{_name_of(tensor.dtype)} tensor"


def _numpy_leaf(value: Any) -> Extension | None:
    if value.dtype.hasobject or value.dtype.names:
        return None
    if isinstance(value, sys.modules["numpy"].generic):
        return Extension("numpy.scalar", (value.dtype.str, value.tobytes()))
    if type(value) is not sys.modules["numpy"].ndarray:
        return None  # a masked array would lose its mask
    array = (value.dtype.str, tuple(value.shape), value.tobytes())
    return Extension("numpy.ndarray", array)


def _pickled(value: object, path: Path) -> Extension:
    try:
        return Extension(PICKLE, pickle.dumps(value))
    except Exception as error:
        name = type(value).__qualname__
        raise UnsupportedLeafError(format_path(path), name, str(error)) from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    return _VALUES[exactly(str, name)]


def _sizes(value: object) -> tuple[int, ...]:
    """Return a tuple of sizes that a peer sent, if it is one."""
    found = exactly(tuple, value)
    if any(exactly(int, size) < 0 for size in found):
        raise ValueError("a negative size")
    return found


REGISTRY.register("torch.dtype", torch.dtype, _name_of, _dtype)
REGISTRY.register("torch.device", torch.device, str, torch.device)
REGISTRY.register(
    "torch.Size", torch.Size, tuple, lambda value: torch.Size(_sizes(value))
)

# The form of `dtype.str` for a dtype without fields. Numpy's own parser is not used
# here: it compiles Python expressions, and a short text can give a type of any size.
_CODE: Final = re.compile(r"[<>|=]?[?A-Za-z][0-9]{0,9}(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?")


def _numpy_scalar(payload: Any) -> object:
    """Return the scalar of a code and its bytes."""
    code, raw = payload
    return _elements(code, (), raw)[()]


def _numpy_array(payload: Any) -> object:
    """Return the array of a code, a shape and its bytes."""
    code, shape, raw = payload
    # A copy, because an array over bytes is read-only.
    return _elements(code, _sizes(shape), raw).copy()


def _elements(code: str, shape: tuple[int, ...], raw: bytes) -> Any:
    import numpy as np  # optional, and only where such a leaf arrives

    if _CODE.fullmatch(exactly(str, code)) is None:
        raise ValueError("no code of a dtype")
    dtype = np.dtype(code)
    if dtype.hasobject or len(exactly(bytes, raw)) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {list(shape)} elements of {code}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


_DECODERS: dict[str, Callable[[Any], object]] = {
    "numpy.scalar": _numpy_scalar,
    "numpy.ndarray": _numpy_array,
}

_COPIED = {"numpy.scalar": 1, "numpy.ndarray": 2, "bytearray": 0}
"""The index of the payload item that each decoder copies."""


class TreeRegistry(Registry):
    """The shared registry, and the decoders of one tree's leaves without an exact type.

    Args:
        more: Decoders of this tree, by tag, in addition.
        allow_pickle: Whether to decode pickles; else they are refused.
        travelled: The bytes that the peer sent. All decoders together copy at most as
            many.
        by_name: Returns the decoder of a tag that is not known otherwise, if any.
    """

    def __init__(
        self,
        more: Mapping[str, Callable[[Any], object]],
        *,
        allow_pickle: bool,
        travelled: int,
        by_name: Callable[[str], Callable[[Any], object] | None] = lambda _: None,
    ) -> None:
        super().__init__()
        pickles = {PICKLE: pickle.loads} if allow_pickle else {}
        self._decoders = {**_DECODERS, **more, **pickles}
        self._left = travelled
        self._by_name = by_name

    def by_type(self, leaf_type: type) -> Codec | None:
        """Return the codec of a type, as the shared registry knows it."""
        return REGISTRY.by_type(leaf_type)

    def by_tag(self, tag: str) -> Codec | None:
        """Return the codec of a tag in this tree; None if nobody knows one."""
        known = REGISTRY.by_tag(tag)
        own = self._decoders.get(tag) or decoder_of(tag)
        if own is None and known is None:
            own = self._by_name(tag)
        codec = known if own is None else Codec(tag, object, lambda it: it, own)
        if codec is None or tag not in _COPIED:
            return codec
        return replace(codec, decode=partial(self._counted, tag, codec.decode))

    def _counted(
        self, tag: str, decode: Callable[[Any], object], payload: Any
    ) -> object:
        items = payload if type(payload) is tuple else (payload,)
        copied = items[_COPIED[tag]]
        self._left -= len(copied) if isinstance(copied, bytes) else 0
        if self._left < 0:
            raise ValueError("the same bytes are used again and again")
        return decode(payload)
