"""Leaves beyond the builtin ones: torch's value types and tensors that are not strided.

Each becomes ``["ext", tag, payload]``, a payload that the tree codec can carry, so a
sparse tensor's indices and values lie in the data segment like any tensor.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - only behind allow_pickle, which both ends must ask for
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from aiockpt._numpy import array_of, scalar_of
from aiockpt._payload import Allowance, exactly, sizes
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


def _spelled_out(part: torch.Tensor) -> torch.Tensor:
    """Return a part as a receiver accepts it: no element of it repeats another's."""
    sizes = zip(part.shape, part.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    return part.contiguous() if part.numel() > span else part


def _taken_apart(tensor: torch.Tensor) -> Extension | None:
    if tensor.is_quantized:
        return _quantized(tensor)
    if tensor.layout is torch.sparse_coo:
        indices = _spelled_out(tensor._indices())  # noqa: SLF001 - the public ones
        values = _spelled_out(tensor._values())  # noqa: SLF001 - refuse uncoalesced
        parts = (indices, values, tensor.size(), tensor.is_coalesced())
        return Extension("torch.sparse_coo", parts)
    if tensor.layout in _COMPRESSED:
        tag, major = _COMPRESSED[tensor.layout]
        if major == "row":
            index = (tensor.crow_indices(), tensor.col_indices())
        else:
            index = (tensor.ccol_indices(), tensor.row_indices())
        outer, inner, values = map(_spelled_out, (*index, tensor.values()))
        return Extension(tag, (outer, inner, values, tensor.size()))
    return None


def _quantized(tensor: torch.Tensor) -> Extension | None:
    if tensor.dtype not in _QUANTIZED:
        return None
    if tensor.qscheme() == torch.per_tensor_affine:
        one = (tensor.int_repr(), tensor.dtype, tensor.q_scale(), tensor.q_zero_point())
        return Extension("torch.quantized", one)
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
    array = (value.dtype.str, tuple(value.shape), value.tobytes())
    return Extension("numpy.ndarray", array)


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
    # Without dimensions of its own, a count of elements costs its sender nothing.
    if indices.shape[1] > max(1, indices.numel(), values.numel()):
        raise ValueError(f"{indices.shape[1]} elements of no bytes")
    return torch.sparse_coo_tensor(
        indices,
        values,
        exactly(torch.Size, size),
        check_invariants=True,
        is_coalesced=bool(coalesced),
    )


def _compressed(layout: torch.layout, payload: Any) -> torch.Tensor:
    outer, inner, values, size = payload
    return torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        exactly(torch.Size, size),
        layout=layout,
        check_invariants=True,
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
    if tensor.dtype != exactly(torch.dtype, dtype):
        raise ValueError(f"quantized {tensor.dtype} was announced as {dtype}")
    return tensor


def _dtype(name: Any) -> torch.dtype:
    return DTYPES[exactly(str, name)]


def _no_pickle(_: Any) -> object:
    raise RemoteProtocolError(
        "the peer sends a pickle, which runs code when it is received; "
        "where it is trusted, both ends say allow_pickle=True"
    )


REGISTRY.register("torch.dtype", torch.dtype, lambda value: DTYPE_NAMES[value], _dtype)
REGISTRY.register("torch.device", torch.device, str, torch.device)
REGISTRY.register(
    "torch.Size", torch.Size, tuple, lambda value: torch.Size(sizes(value))
)

_DECODERS: dict[str, Callable[[Any], object]] = {
    "torch.leaf": _leaf,
    "torch.sparse_coo": _coo,
    **{tag: partial(_compressed, layout) for layout, (tag, _) in _COMPRESSED.items()},
    "torch.quantized": _dequantized,
    "torch.quantized_per_channel": _dequantized_per_channel,
    "numpy.scalar": scalar_of,
    "numpy.ndarray": array_of,
    "pickle": _no_pickle,
}

_COPIED = {
    "torch.quantized": 0,
    "torch.quantized_per_channel": 0,
    "numpy.scalar": 1,
    "numpy.ndarray": 2,
    "bytearray": 0,
}
"""Which item of a payload its decoder copies."""

_COUNTED = {*_DECODERS, *_COPIED} - {"torch.leaf", "pickle"}


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
        own = self._decoders.get(tag)
        codec = known if own is None else Codec(tag, object, _itself, own)
        if codec is None or tag not in _COUNTED:
            return codec
        return replace(codec, decode=partial(self._counted, tag, codec.decode))

    def _counted(
        self, tag: str, decode: Callable[[Any], object], payload: Any
    ) -> object:
        items = payload if type(payload) is tuple else (payload,)
        self._allowance.spend(items, copied=_COPIED.get(tag))
        return decode(payload)


def registry(
    more: Mapping[str, Callable[[Any], object]], *, allow_pickle: bool, travelled: int
) -> Registry:
    """Return the registry to decode one tree with, its own ``more`` decoders included.

    Pickles are in it only if asked for; all allocate no more than ``travelled`` bytes.
    """
    pickles = {"pickle": pickle.loads} if allow_pickle else {}
    return _Overlay({**_DECODERS, **more, **pickles}, Allowance(travelled))
