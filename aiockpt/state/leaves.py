"""Leaves beyond the builtin ones: torch's and numpy's value types.

Each becomes ``["ext", tag, payload]``, a payload that the tree codec can carry.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - only behind allow_pickle, which both ends must ask for
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from aiockpt.errors import RemoteProtocolError, UnsupportedLeafError
from aiockpt.format import dtypes
from aiockpt.format.paths import Path, format_path
from aiockpt.format.registry import REGISTRY, Codec, Registry
from aiockpt.state.nodes import decoder_of
from aiockpt.state.numpy import array_of, scalar_of
from aiockpt.state.payload import Allowance, exactly, sizes

__all__ = ["DTYPES", "DTYPE_NAMES", "Extension", "extension", "registry"]

_VALUES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
}
"""Torch's dtypes by name, as values of a state dict."""

DTYPES = {name: dtype for name, dtype in _VALUES.items() if name in dtypes.DTYPES}
"""The dtypes that a tensor may travel with, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_REMEDY = (
    "only dense tensors travel; put what it is made of in its place, for example "
    "its indices, values and size, or a class of yours that holds these and that "
    "aiockpt.register_leaf knows on both ends"
)


class Extension(NamedTuple):
    """What a leaf without an exact type in the registry travels as."""

    tag: str
    payload: object


def extension(value: object, path: Path, *, allow_pickle: bool) -> Extension | None:
    """Return the encodable form of a leaf that has no exact type in the registry."""
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        raise _refused(value, path)  # type: ignore[arg-type]
    if isinstance(value, torch.Tensor):
        return None  # a subclass carries state that only its author knows
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return _numpy_leaf(value)
    return _pickled(value, path) if allow_pickle else None


def _refused(tensor: torch.Tensor, path: Path) -> UnsupportedLeafError:
    if tensor.is_nested:
        kind = "nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"{str(tensor.layout).removeprefix('torch.')} tensor"
    else:
        kind = f"{_name_of(tensor.dtype)} tensor"
    return UnsupportedLeafError(format_path(path), kind, _REMEDY)


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
        return Extension("pickle", pickle.dumps(value))
    except Exception as error:
        name = type(value).__qualname__
        raise UnsupportedLeafError(format_path(path), name, str(error)) from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    return _VALUES[exactly(str, name)]


def _no_pickle(_: Any) -> object:
    raise RemoteProtocolError(
        "the peer sends a pickle, which runs code when it is received; "
        "where it is trusted, both ends say allow_pickle=True"
    )


REGISTRY.register("torch.dtype", torch.dtype, _name_of, _dtype)
REGISTRY.register("torch.device", torch.device, str, torch.device)
REGISTRY.register(
    "torch.Size", torch.Size, tuple, lambda value: torch.Size(sizes(value))
)

_DECODERS: dict[str, Callable[[Any], object]] = {
    "numpy.scalar": scalar_of,
    "numpy.ndarray": array_of,
    "pickle": _no_pickle,
}

_COPIED = {"numpy.scalar": 1, "numpy.ndarray": 2, "bytearray": 0}
"""Which item of a payload its decoder copies."""


def _itself(value: object) -> object:
    return value


class _Overlay(Registry):
    """The shared registry, and the tags of leaves that have no exact type."""

    def __init__(
        self, decoders: Mapping[str, Callable[[Any], object]], allowance: Allowance
    ) -> None:
        super().__init__()
        self._decoders = decoders
        self._allowance = allowance

    def by_type(self, leaf_type: type) -> Codec | None:
        return REGISTRY.by_type(leaf_type)

    def by_tag(self, tag: str) -> Codec | None:
        known = REGISTRY.by_tag(tag)
        own = self._decoders.get(tag) or decoder_of(tag)
        codec = known if own is None else Codec(tag, object, _itself, own)
        if codec is None or tag not in _COPIED:
            return codec
        return replace(codec, decode=partial(self._counted, tag, codec.decode))

    def _counted(
        self, tag: str, decode: Callable[[Any], object], payload: Any
    ) -> object:
        items = payload if type(payload) is tuple else (payload,)
        self._allowance.spend(items[_COPIED[tag]])
        return decode(payload)


def registry(
    more: Mapping[str, Callable[[Any], object]], *, allow_pickle: bool, travelled: int
) -> Registry:
    """Return the registry to decode one tree with, its own ``more`` decoders included.

    Pickles are in it only if asked for; all allocate no more than ``travelled`` bytes.
    """
    pickles = {"pickle": pickle.loads} if allow_pickle else {}
    return _Overlay({**_DECODERS, **more, **pickles}, Allowance(travelled))
