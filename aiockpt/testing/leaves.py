"""Examples of every kind of leaf that a state dict may hold."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch

from aiockpt.state.equality import elements
from aiockpt.state.flatten import register_leaf
from aiockpt.state.leaves import DTYPES

_floats: Final = torch.randn

OVERSIZED_BYTES: Final = 5000
"""Bytes of a ``bytes`` leaf that is too long for the manifest."""


class Colour(enum.Enum):
    """An enum that both ends know."""

    RED = 1
    BLUE = (2, "b")


class Point(NamedTuple):
    """A named tuple that both ends know."""

    x: float
    weight: torch.Tensor


@dataclass
class Settings:
    """A dataclass that both ends know."""

    name: str
    weight: torch.Tensor
    nested: dict[str, Any]


for _type in (Colour, Point, Settings):
    register_leaf(_type, tag=f"aiockpt.testing.{_type.__name__}")


def every_dtype(shape: tuple[int, ...] = (4, 6)) -> dict[str, torch.Tensor]:
    """Return a tensor of random bits for every supported dtype."""
    return {
        f"torch.{name}": _noise(torch.empty(shape, dtype=dtype))
        for name, dtype in sorted(DTYPES.items())
    }


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    raw = elements(tensor)
    # A byte of a bool is 0 or 1; anything else is no bool.
    raw.random_(0, 2 if tensor.dtype is torch.bool else 256)
    return tensor


def _complex() -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.complex64)


def _tied() -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(_floats(8, 4))
    return {"embedding": weight, "head": weight, "data": weight.data, "t": weight.t()}


def _overlapping() -> list[torch.Tensor]:
    base = _floats(64)
    return [base[:40], base[20:60], base[8:16].view(torch.int32), base[63:]]


def _module_state() -> OrderedDict[str, Any]:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return network.state_dict()  # type: ignore[return-value]


def _numpy_scalars() -> list[object]:
    import numpy as np

    return [np.float64(0.1), np.float16(2), np.int64(-3), np.bool_(True), np.str_("å")]  # noqa: FBT003


def _numpy_arrays() -> list[object]:
    import numpy as np

    shapes = [np.arange(6.0).reshape(2, 3), np.array(3), np.empty((0, 2))]
    big = np.arange(5000, dtype=">i4")
    odd = [np.array(["a", "bc"]), np.array([1, 2], dtype="M8[ns]"), np.eye(2)[:, 1]]
    return [*shapes, big, *odd]


def _odd_keys() -> dict[object, object]:
    long = bytes(range(256)) * 20
    return {
        "z": _floats(3),
        "": 1,
        "a.b": _floats(2),
        "a": {"b": _floats(1)},
        3: "int",
        -1.5: "float",
        None: "none",
        True: "bool",
        ("t", 1): _floats(2),
        frozenset({1, 2}): "set",
        b"bytes": 0,
        long: "bytes that are too long for the manifest",
        "\ud800": _floats(2),
        "__metadata__": _floats(4),
        2**70: "huge",
        float("inf"): "inf",
        torch.Size([2]): "size",
        torch.float16: "dtype",
    }


def _nan() -> float:
    return float(torch.tensor([0x7FF0DEADBEEF0001]).view(torch.float64).item())


def _nested(depth: int = 30) -> object:
    value: object = _floats(2)
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


_NUMPY: Final[dict[str, Callable[[], object]]] = {
    "numpy scalars": _numpy_scalars,
    "numpy arrays": _numpy_arrays,
}

LEAVES: Final[dict[str, Callable[[], object]]] = {
    "every dtype": every_dtype,
    "every dtype, transposed": lambda: {k: v.t() for k, v in every_dtype().items()},
    "every dtype, sparse view": lambda: {
        key: value[:, ::5] for key, value in every_dtype((3, 40)).items()
    },
    "every dtype, 0-d": lambda: every_dtype(()),
    "every dtype, 0 bytes": lambda: every_dtype((3, 0, 2)),
    "mixed sizes": lambda: [
        torch.arange(n, dtype=torch.int8) for n in (1, 3, 0, 7, 65)
    ],
    "stride 2": lambda: _floats(10, 6)[::2, ::2],
    "half of the memory": lambda: _floats(10)[::2],
    "permuted": lambda: _floats(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: _floats(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: _floats(3, 1).expand(3, 50),
    "expanded scalar": lambda: torch.tensor(1.5).expand(2, 2),
    "windows": lambda: _floats(12).unfold(0, 4, 1),
    "slice of a large storage": lambda: _floats(1000)[500:510],
    "same sparse view twice": lambda: [view := _floats(99)[::9], view, view.detach()],
    "conjugated": lambda: [_complex().conj(), _complex().t().conj()],
    "negated": lambda: [_complex().conj().imag, torch._neg_view(_floats(3))],  # noqa: SLF001
    "conjugated and negated": lambda: torch._neg_view(_complex().conj()),  # noqa: SLF001
    "conjugated sparse view": lambda: [_complex()[::2, ::3].conj()],
    "parameter": lambda: torch.nn.Parameter(_floats(3)),
    "frozen parameter": lambda: torch.nn.Parameter(_floats(3), requires_grad=False),
    "integer parameter": lambda: torch.nn.Parameter(torch.arange(3), False),  # noqa: FBT003
    "requires_grad": lambda: _floats(3).requires_grad_(),
    "tied": _tied,
    "overlapping views": _overlapping,
    "same object": lambda: [(weight := _floats(3)), {"again": weight}],
    "views of other dtypes": lambda: [
        (raw := torch.arange(24, dtype=torch.uint8)),
        raw[2:8].view(torch.int16),
    ],
    "singletons": lambda: [None, True, False],
    "ints": lambda: [0, -1, 2**53 - 1, 2**53, -(2**63), 2**200, -(2**200)],
    "floats": lambda: [0.0, -0.0, 0.1, 5e-324, float("inf"), float("-inf")],
    "nan with a payload": _nan,
    "complex": lambda: [1.5 - 2j, complex(float("inf"), -0.0), complex(0, _nan())],
    "str": lambda: ["", "å\n\x00", "\ud800 alone", "🙂"],
    "bytes": lambda: [b"", b"\x00\xff", bytes(OVERSIZED_BYTES), bytearray(b"abc")],
    "sequences": lambda: [(), (1, (2, [3, []])), deque([1, 2], 5), deque([3])],
    "sets": lambda: [set(), {1, "a", (2, None)}, frozenset({frozenset({1})})],
    "keys": _odd_keys,
    "order of keys": lambda: {str(n * 7 % 10): n for n in range(10)},
    "OrderedDict": lambda: OrderedDict(b=1, a=_floats(2)),
    "module state": _module_state,
    "defaultdict": lambda: [
        defaultdict(list, a=[1]),
        defaultdict(None, b=2),
        defaultdict(dict),
    ],
    "standard library": lambda: [Counter("aab"), range(3, 9, 2)],
    "torch values": lambda: [torch.Size([1]), torch.half, torch.device("cuda:1")],
    "enum": lambda: [Colour.RED, Colour.BLUE],
    "named tuple": lambda: Point(1.0, _floats(2)),
    "dataclass": lambda: Settings("n", _floats(2), {"weights": [_floats(1)]}),
    "deep nesting": _nested,
    **(_NUMPY if find_spec("numpy") else {}),
}
"""Maps a kind of leaf to a function that makes a value with such leaves.

The kinds of numpy are included if it is installed.
"""
