"""Leaves beyond the builtin ones: torch's value types and tensors that are not strided.

Each becomes ``["ext", tag, payload]``, a payload that the tree codec can carry, so a
sparse tensor's indices and values lie in the data segment like any tensor.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - only behind allow_pickle, which both ends must ask for
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from aiockpt.errors import RemoteProtocolError, UnsupportedLeafError
from aiockpt.wire.paths import Path, format_path
from aiockpt.wire.registry import REGISTRY, Codec, Registry

__all__ = ["DTYPES", "DTYPE_NAMES", "Extension", "extension", "registry"]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_COMPRESSED = {
    torch.sparse_csr: ("torch.sparse_csr", "row"),
    torch.sparse_bsr: ("torch.sparse_bsr", "row"),
    torch.sparse_csc: ("torch.sparse_csc", "column"),
    torch.sparse_bsc: ("torch.sparse_bsc", "column"),
}


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})


class Extension(NamedTuple):
    """What a leaf without an exact type in the registry travels as."""

    tag: str
    payload: object


def extension(value: object, path: Path, *, allow_pickle: bool) -> Extension | None:
    """Return the encodable form of a leaf that has no exact type in the registry."""
    if type(value) in {torch.Tensor, torch.nn.Parameter}:
        return _odd_tensor(value)  # type: ignore[arg-type]
    if isinstance(value, torch.Tensor):
        return None  # a subclass carries state that only its author knows
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return _numpy_leaf(value)
    return _pickled(value, path) if allow_pickle else None


def _odd_tensor(tensor: torch.Tensor) -> Extension | None:
    is_parameter = type(tensor) is torch.nn.Parameter
    plain = tensor.detach()
    parts = _taken_apart(plain)
    if parts is not None and (is_parameter or tensor.requires_grad):
        return Extension("torch.leaf", (plain, is_parameter, tensor.requires_grad))
    return parts


def _taken_apart(tensor: torch.Tensor) -> Extension | None:
    if tensor.is_quantized:
        return _quantized(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values(), tensor.size())  # noqa: SLF001
        return Extension("torch.sparse_coo", (*parts, tensor.is_coalesced()))
    if tensor.layout in _COMPRESSED:
        tag, major = _COMPRESSED[tensor.layout]
        if major == "row":
            index = (tensor.crow_indices(), tensor.col_indices())
        else:
            index = (tensor.ccol_indices(), tensor.row_indices())
        return Extension(tag, (*index, tensor.values(), tensor.size()))
    return None


def _quantized(tensor: torch.Tensor) -> Extension | None:
    if tensor.dtype not in _QUANTIZED:
        return None
    if tensor.qscheme() == torch.per_tensor_affine:
        scale, zero = tensor.q_scale(), tensor.q_zero_point()
        return Extension(
            "torch.quantized", (tensor.int_repr(), tensor.dtype, scale, zero)
        )
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    parts = (tensor.int_repr(), tensor.dtype, scales, zeros, axis)
    return Extension("torch.quantized_per_channel", parts)


def _numpy_leaf(value: Any) -> Extension | None:
    if value.dtype.hasobject or value.dtype.names:
        return None
    if isinstance(value, sys.modules["numpy"].generic):
        return Extension("numpy.scalar", (value.dtype.str, value.tobytes()))
    if type(value) is not sys.modules["numpy"].ndarray:
        return None  # a masked array would lose its mask
    return Extension(
        "numpy.ndarray", (value.dtype.str, tuple(value.shape), value.tobytes())
    )


def _pickled(value: object, path: Path) -> Extension:
    try:
        return Extension("pickle", pickle.dumps(value))
    except Exception as error:
        name = type(value).__qualname__
        raise UnsupportedLeafError(format_path(path), name, str(error)) from error


def _leaf(payload: Any) -> torch.Tensor:
    tensor, is_parameter, requires_grad = payload
    if is_parameter:
        return torch.nn.Parameter(tensor, bool(requires_grad))
    return torch.Tensor.detach(tensor).requires_grad_(bool(requires_grad))


def _coo(payload: Any) -> torch.Tensor:
    indices, values, size, coalesced = payload
    return torch.sparse_coo_tensor(
        indices, values, size, check_invariants=True, is_coalesced=bool(coalesced)
    )


def _compressed(layout: torch.layout, payload: Any) -> torch.Tensor:
    outer, inner, values, size = payload
    return torch.sparse_compressed_tensor(
        outer, inner, values, size, layout=layout, check_invariants=True
    )


def _dequantized(payload: Any) -> torch.Tensor:
    numbers, dtype, scale, zero = payload
    tensor = torch._make_per_tensor_quantized_tensor(  # noqa: SLF001 - torch has no public way
        numbers, float(scale), int(zero)
    )
    return _of_dtype(tensor, dtype)


def _dequantized_per_channel(payload: Any) -> torch.Tensor:
    numbers, dtype, scales, zeros, axis = payload
    tensor = torch._make_per_channel_quantized_tensor(  # noqa: SLF001 - torch has no public way
        numbers, scales, zeros, int(axis)
    )
    return _of_dtype(tensor, dtype)


def _of_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype:
        raise ValueError(f"quantized {tensor.dtype} was announced as {dtype}")
    return tensor


def _scalar(payload: Any) -> object:
    code, raw = payload
    return _numpy_dtype(code, raw, 1).reshape(())[()]


def _array(payload: Any) -> object:
    code, shape, raw = payload
    count = 1
    for size in shape:
        count *= size
    # A copy, because an array over bytes is read-only.
    return _numpy_dtype(code, raw, count).reshape(shape).copy()


def _numpy_dtype(code: str, raw: bytes, count: int) -> Any:
    import numpy as np  # optional, and only where such a leaf arrives

    dtype = np.dtype(str(code))
    if dtype.hasobject or len(raw) != count * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {count} elements of {code}")
    return np.frombuffer(raw, dtype=dtype, count=count)


def _dtype(name: Any) -> torch.dtype:
    return DTYPES[name]


def _no_pickle(_: Any) -> object:
    raise RemoteProtocolError(
        "the peer sends a pickle, which runs code when it is received; "
        "where it is trusted, both ends say allow_pickle=True"
    )


REGISTRY.register("torch.dtype", torch.dtype, lambda value: DTYPE_NAMES[value], _dtype)
REGISTRY.register("torch.device", torch.device, str, torch.device)
REGISTRY.register("torch.Size", torch.Size, tuple, torch.Size)

_DECODERS: dict[str, Callable[[Any], object]] = {
    "torch.leaf": _leaf,
    "torch.sparse_coo": _coo,
    **{tag: partial(_compressed, layout) for layout, (tag, _) in _COMPRESSED.items()},
    "torch.quantized": _dequantized,
    "torch.quantized_per_channel": _dequantized_per_channel,
    "numpy.scalar": _scalar,
    "numpy.ndarray": _array,
    "pickle": _no_pickle,
}


class _Overlay(Registry):
    """The shared registry, and the tags of leaves that have no exact type."""

    def __init__(self, decoders: Mapping[str, Callable[[Any], object]]) -> None:
        super().__init__()
        self._decoders = decoders

    def by_type(self, leaf_type: type) -> Codec | None:
        return REGISTRY.by_type(leaf_type)

    def by_tag(self, tag: str) -> Codec | None:
        decode = self._decoders.get(tag)
        if decode is None:
            return REGISTRY.by_tag(tag)
        return Codec(tag, object, lambda value: value, decode)


_SAFE = _Overlay(_DECODERS)


def registry(*, allow_pickle: bool) -> Registry:
    """Return the registry to decode with; with pickle only where it was asked for."""
    if not allow_pickle:
        return _SAFE
    return _Overlay({**_DECODERS, "pickle": pickle.loads})
