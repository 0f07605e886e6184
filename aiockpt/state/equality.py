"""Exact equality of state dicts: types, bits, strides, and what shares memory."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any, NoReturn

import torch

from aiockpt.format.paths import Path, format_path
from aiockpt.state.distributed import take_apart
from aiockpt.state.sharding import encode_layout


def assert_same(actual: object, expected: object) -> None:
    """Fail at the first difference, and name its path.

    Types are exact; so are the order of keys, the bits of floats and tensors (nan
    payloads, ``-0.0``), flags such as ``requires_grad``, which leaves are the same
    object, and which tensors overlap in memory and how. A stride matters where a
    dimension has more than one element. A view that uses less than half of the memory
    that it spans may have become dense, and have parted from other views. Devices may
    differ.

    Raises:
        AssertionError: they differ.
    """
    comparison = _Comparison()
    comparison.value(actual, expected, ())
    comparison.memory()


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor's elements as they lie in memory.

    A view of shape ``[*shape, itemsize]`` and dtype ``uint8``, whatever the dtype is;
    of a conjugated or negated tensor it is what the memory holds.
    """
    size = tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
    )


class _Comparison:
    def __init__(self) -> None:
        self._actual: list[torch.Tensor] = []
        self._expected: list[torch.Tensor] = []
        self._paths: list[Path] = []

    def value(self, actual: Any, expected: Any, path: Path) -> None:
        """Compare two values of any type."""
        self.equal("type", type(actual), type(expected), path)
        match expected:
            case torch.Tensor():
                self._tensor(actual, expected, path)
            case dict():
                self._mapping(actual, expected, path)
            case list() | tuple() | deque():
                self._sequence(actual, expected, path)
            case Decimal() | date():  # equal ones may differ, and a NaN is not equal
                self.equal("value", repr(actual), repr(expected), path)
            case float() | complex():
                self.equal("value", _bits(actual), _bits(expected), path)
            case _ if dataclasses.is_dataclass(expected):
                self._mapping(_fields(actual), _fields(expected), path)
            case _ if hasattr(expected, "tobytes"):
                self._array(actual, expected, path)
            case _:
                self.equal("value", actual, expected, path)

    def equal(self, what: str, actual: object, expected: object, path: Path) -> None:
        """Compare one property."""
        if actual != expected:
            _fail(what, actual, expected, path)

    def memory(self) -> None:
        """Compare which tensors share memory, after all tensors have been visited."""
        pairs = zip(self._actual, self._expected, strict=True)
        kept = [_same_strides(mine, theirs) for mine, theirs in pairs]
        actual, expected = _shared(self._actual, kept), _shared(self._expected, kept)
        for path, is_, was in zip(self._paths, actual, expected, strict=True):
            self.equal("memory shared with tensor", is_, was, path)

    def _mapping(
        self, actual: Mapping[Any, Any], expected: Mapping[Any, Any], path: Path
    ) -> None:
        self._sequence(list(actual), list(expected), (*path, "keys()"))
        for (key, value), mine in zip(expected.items(), actual.values(), strict=True):
            self.value(mine, value, (*path, key))
        if isinstance(expected, OrderedDict):
            self.value(vars(actual), vars(expected), (*path, "__dict__"))
        if isinstance(expected, defaultdict):
            mine, theirs = actual.default_factory, expected.default_factory  # type: ignore[attr-defined]
            self.equal("default_factory", mine, theirs, path)

    def _sequence(self, actual: Any, expected: Any, path: Path) -> None:
        self.equal("length", len(actual), len(expected), path)
        if isinstance(expected, deque):
            self.equal("maxlen", actual.maxlen, expected.maxlen, path)
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            self.value(mine, theirs, (*path, index))

    def _array(self, actual: Any, expected: Any, path: Path) -> None:
        self.equal("dtype", actual.dtype, expected.dtype, path)
        self.equal("shape", actual.shape, expected.shape, path)
        self.equal("bytes", actual.tobytes(), expected.tobytes(), path)

    def _tensor(self, actual: torch.Tensor, expected: torch.Tensor, path: Path) -> None:
        if (parts := take_apart(expected, path)) is not None:
            mine = take_apart(actual, path)
            assert mine is not None  # the types are equal
            some, others = (
                (*each.tensors, *encode_layout(each.layout)) for each in (mine, parts)
            )
            self.value(some, others, path)
            return
        for fact in ("layout", "dtype", "shape", "requires_grad"):
            self.equal(fact, getattr(actual, fact), getattr(expected, fact), path)
        for flag in (torch.is_conj, torch.Tensor.is_neg):
            self.equal(flag.__name__, flag(actual), flag(expected), path)
        if not _strides_agree(actual, expected):
            self.equal("stride", actual.stride(), expected.stride(), path)
        if not torch.equal(elements(actual).cpu(), elements(expected).cpu()):
            _fail("bytes", actual, expected, path)
        self._actual.append(actual)
        self._expected.append(expected)
        self._paths.append(path)


def _fail(what: str, actual: object, expected: object, path: Path) -> NoReturn:
    where = format_path(path) or "the state dict"
    raise AssertionError(f"{where}: {what} is {actual!r}, expected {expected!r}")


def _bits(value: complex) -> bytes:
    return struct.pack(">dd", value.real, value.imag)


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _strides_agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return _same_strides(actual, expected) or (
        actual.is_contiguous() and _is_sparse(expected)
    )


def _same_strides(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    pairs = zip(expected.shape, actual.stride(), expected.stride(), strict=True)
    return not expected.numel() or all(
        mine == theirs for size, mine, theirs in pairs if size > 1
    )


def _is_sparse(tensor: torch.Tensor) -> bool:
    return 2 * tensor.nbytes < _span(tensor)


def _span(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in sizes)
    return (last + 1) * tensor.element_size()


def _shared(
    tensors: Sequence[torch.Tensor], kept: Iterable[bool]
) -> list[tuple[int, int, int]]:
    """Return for each tensor which earlier one it shares memory or identity with.

    That is the first member of a run of overlapping tensors, the distance to it in
    bytes, and the first tensor that is the same object. Tensors that did not keep
    their memory layout (``kept``) are compared with each other only, as wholes.
    """
    spans, identities, views = [], dict[int, int](), dict[object, int]()
    found: dict[int, tuple[int, int, int]] = {}
    for number, (tensor, as_it_was) in enumerate(zip(tensors, kept, strict=True)):
        same = identities.setdefault(id(tensor), number)
        found[number] = (number, 0, same)
        start = tensor.data_ptr()
        if tensor.numel() and as_it_was:
            spans.append((start, start + _span(tensor), number, same))
        elif tensor.numel():
            lazy = tensor.is_conj(), tensor.is_neg()
            view = (start, tensor.dtype, tensor.shape, tensor.stride(), lazy)
            found[number] = (views.setdefault(view, number), 0, same)
    for run in _runs(sorted(spans)):
        first, origin = min((number, start) for start, _, number, _ in run)
        for start, _, number, same in run:
            found[number] = (first, start - origin, same)
    return [found[number] for number in range(len(found))]


def _runs(
    spans: list[tuple[int, int, int, int]],
) -> Iterable[list[tuple[int, int, int, int]]]:
    run: list[tuple[int, int, int, int]] = []
    stop = 0
    for span in spans:
        if run and span[0] >= stop:
            yield run
            run = []
        run.append(span)
        stop = max(stop, span[1]) if len(run) > 1 else span[1]
    if run:
        yield run
