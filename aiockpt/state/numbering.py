"""The leaves of a state dict as nodes of a tree, its tensors as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch

from aiockpt.format.limits import Limits
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import encode_tree
from aiockpt.state.distributed import take_apart
from aiockpt.state.leaves import DTYPE_NAMES, extension
from aiockpt.state.nodes import opened

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Numbering"]

_DENSE_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_LAYOUT: Final = attrgetter("layout")
_DTYPE: Final = attrgetter("dtype")
_IS_NESTED: Final = attrgetter("is_nested")

_EMPTY: Final[Node] = ["list", []]

# Tensors that C functions look at in a row, with the interpreter lock held.
_SLICE: Final = 2000


class Numbering:
    """Numbers tensors as the tree codec meets them; one object, one number.

    With ``reading`` those that have no memory count as nothing.
    """

    def __init__(self, limits: Limits, *, allow_pickle: bool, reading: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: dict[str, None] = {}
        self.wholes: dict[int, torch.Tensor] = {}
        self._reading = reading
        self._numbers: dict[int, int] = {}
        self._limits = limits
        self._allow_pickle = allow_pickle

    def encode(self, value: object, path: Path = ()) -> Node:
        """Return the tree of a value that is at ``path``."""
        return encode_tree(
            value,
            registry=REGISTRY,
            leaf=partial(self._leaf_below, path) if path else self._leaf,
            limits=self._limits,
            row=None if path else self._row,
        )

    def _leaf_below(self, above: Path, value: object, path: Path) -> Node:
        return self._leaf(value, (*above, *path))

    def _leaf(self, value: object, path: Path) -> Node:
        """Say how a leaf travels; None where it cannot."""
        if _is_dense_tensor(value):
            if self._reading and value.is_meta:
                return _EMPTY
            return ["tensor", self._number(value, path)]
        if (parts := take_apart(value, path)) is not None:
            for tensor in parts.tensors:
                self._number(tensor, path)  # the entry has the name of the whole
                self.wholes[id(tensor)] = parts.whole
            self.wholes.setdefault(id(parts.whole), parts.whole)
            return ["ext", parts.tag, self.encode(parts.payload, path)]
        if (inside := opened(value)) is not None:
            return ["ext", inside.tag, self.encode(inside.payload, path)]
        if type(value) is bytes:
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return ["blob", self._number(blob, path)]
        odd = extension(value, path, allow_pickle=self._allow_pickle)
        return None if odd is None else ["ext", odd.tag, self.encode(odd.payload, path)]

    def _row(
        self, keys: Sequence[str], values: Sequence[object], path: Path
    ) -> list[int] | None:
        """Number dense tensors: most state dicts have long rows of them."""
        if not _are_dense_tensors(values):
            return None
        if self._reading and any(tensor.is_meta for tensor in values):
            return None
        numbers: list[int] = []
        above = f"{format_path(path)}." if path else ""
        for start in range(0, len(keys), _SLICE):
            some, tensors = keys[start : start + _SLICE], values[start : start + _SLICE]
            numbers += self._in_a_row(above, some, tensors) or [
                self._number(tensor, (*path, key))
                for key, tensor in zip(some, tensors, strict=True)
            ]
        return numbers

    def _in_a_row(
        self, above: str, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> Iterable[int] | None:
        """Number tensors that are new, if their names are plain and new, too."""
        if not (all(keys) and "".join(keys).isascii()):
            return None
        first = len(self.tensors)
        numbers = range(first, first + len(tensors))
        new = dict(zip(map(id, tensors), numbers, strict=True))
        names = dict.fromkeys([above + key for key in keys])
        if (
            not len(new) == len(names) == len(tensors)
            or "__metadata__" in names
            or not self._numbers.keys().isdisjoint(new)
            or not self.names.keys().isdisjoint(names)
        ):
            return None
        self._numbers.update(new)
        self.names.update(names)
        self.tensors += tensors
        return numbers

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        identity = id(tensor)
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self.tensors)
            self.tensors.append(tensor)
            name = format_path(path) or "tensor"
            if name in self.names or name == "__metadata__":
                name = self._another(name)
            self.names[name] = None
        return number

    def _another(self, name: str) -> str:
        again = 2
        while (unique := f"{name}#{again}") in self.names:
            again += 1
        return unique


def _is_dense_tensor(value: object) -> TypeIs[torch.Tensor]:
    return (
        type(value) in _DENSE_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and value.dtype in DTYPE_NAMES  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def _are_dense_tensors(values: Sequence[object]) -> TypeIs[Sequence[torch.Tensor]]:
    """Say whether all are, as `_is_dense_tensor` does of one."""
    if any(REGISTRY.by_type(each) is not None for each in _DENSE_TYPES):
        return False  # they travel as their user says
    for start in range(0, len(values), _SLICE):
        some = values[start : start + _SLICE]
        if (
            not set(map(type, some)) <= _DENSE_TYPES
            or set(map(_LAYOUT, some)) != {torch.strided}
            or not DTYPE_NAMES.keys() >= set(map(_DTYPE, some))
            or any(map(_IS_NESTED, some))
        ):
            return False
    return True
