"""Says what the nodes of two trees are, and how a value of a template does not fit."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import torch

from aiockpt.errors import StateDictError, TemplateMismatchError, UnsupportedLeafError
from aiockpt.format.paths import NAMED_TUPLE, PICKLE, PYTREE
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.dispositions import NOT_FILLED, words_of
from aiockpt.state.distributed import take_apart
from aiockpt.state.flatten import ODD, Wanted
from aiockpt.state.leaves import kind_of
from aiockpt.state.trees import is_distributed, items_of, number_of, tag_of

_NUMBERS: Final = frozenset({bool, int, float, complex})
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
TYPES: Final[dict[str, type]] = {
    **{kind.__name__: kind for kind in (*_CONTAINERS, int, float, complex, str, bytes)},
    "tensors": dict,
    "odict": OrderedDict,
    "defaultdict": defaultdict,
    "blob": bytes,
}
_KINDS: Final[dict[str, type]] = {
    "b": bool,
    "i": int,
    "u": int,
    "f": float,
    "c": complex,
    "U": str,
    "S": bytes,
}
"""What a scalar of numpy is, by the letter of its dtype."""

_PARAMETER: Final = re.compile(r"param_groups\[[0-9]+\]\.params\[[0-9]+\]$")
_NAMED: Final = (
    "optimizer.state_dict() numbers the parameters, and get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict names them: make the template by the one "
    "that made the saved state"
)


class NodeTypes:
    """The types of the values that a template and the sources have.

    Args:
        wanted: The template.
        catalogue: What the sources hold.
    """

    def __init__(self, wanted: Wanted, catalogue: Catalogue) -> None:
        self._wanted, self._catalogue = wanted, catalogue

    def is_alike(self, mine: Any, theirs: Any) -> bool:
        """Say whether a value of the sources may replace one of the template."""
        one, other = self._type_of(mine, own=True), self._type_of(theirs)
        odd = [*self._odd(mine, own=True), *self._odd(theirs)]
        if any(isinstance(each, torch.Tensor) for each in odd):
            return False
        if tag_of(theirs) == "ext" and theirs[1] == PICKLE:
            return True  # its type is known once it is unpickled
        if tag_of(mine) == tag_of(theirs) == "ext" and mine[1] == theirs[1] != ODD:
            return mine[1] != "numpy.scalar" or {one, other} <= _NUMBERS or one is other
        if one in _NUMBERS and other in _NUMBERS:
            return True
        return one is not None and other is not None and issubclass(one, other)

    def _type_of(self, node: Any, *, own: bool = False) -> type | None:
        """Return the type of a value; None if this process does not know it."""
        if not isinstance(node, list):
            return type(node)
        match node:
            case ["ext", "numpy.scalar", ["tuple", [str(code), *_]]]:
                return _KINDS.get(code.lstrip("<>|=")[:1])
        for value in self._odd(node, own=own):
            return type(value)
        tag = tag_of(node)
        if tag == "ext":
            codec = REGISTRY.by_tag(node[1])
            return None if codec is None else codec.leaf_type
        return TYPES.get(tag or "")

    def _odd(self, node: Any, *, own: bool = False) -> Sequence[object]:
        """Return the value of a node without an encoding, if it is one, in a list."""
        match node:
            case ["ext", tag, int(number)] if tag == ODD:
                odd = self._wanted.odd if own else self._catalogue.odd
                return odd[number : number + 1]
        return ()

    def unfit(
        self, mine: Any, theirs: Any, path: str, *, lengths: bool = False
    ) -> StateDictError:
        """Return the error that a value of the template does not fit."""
        odd = self._odd(mine, own=True), self._odd(theirs)
        for value in odd[0]:
            if remedy := remedy_for(value):
                return unsupported(value, path, remedy)
        tensors = [each for each in chain(*odd) if isinstance(each, torch.Tensor)]
        plain = [tag_of(mine), tag_of(theirs)].count("tensor")
        if tensors and len(tensors) + plain == 2:
            take_apart(tensors[0], (path,))  # says why it cannot be filled
            return UnsupportedLeafError(path, kind_of(tensors[0]), NOT_FILLED)
        if is_distributed(mine) != is_distributed(theirs):
            nothing = "no distributed tensor"
            expected, actual = (
                self._layout(each) or nothing for each in (theirs, mine)
            )
            if tag_of(theirs) == "tensor" or tag_of(mine) == "tensor":
                return mismatch_of(path, expected, actual)
        expected, actual = self._words(theirs), self._words(mine, own=True)
        if lengths:
            sizes = (len(items_of(each) or ()) for each in (theirs, mine))
            ends = (f" of {size}" for size in sizes)
            expected, actual = expected + next(ends), actual + next(ends)
        named = {self._type_of(theirs), self._type_of(mine, own=True)} == {int, str}
        detail = _NAMED if named and _PARAMETER.search(path) else ""
        return mismatch_of(path, expected, actual, detail)

    def _layout(self, node: Any) -> str:
        if not is_distributed(node):
            return ""
        return str(self._catalogue.layouts.read((), node[1], node[2])[1])

    def _words(self, node: Any, *, own: bool = False) -> str:
        """Return what a node is, for an error; ``own``: a node of the template."""
        if node is None:
            return "None"
        if is_distributed(node):
            return self._layout(node)
        if tag_of(node) == "tensor":
            number = number_of(node, "")
            if own:
                return words_of(self._wanted.tensors[number])
            piece = self._catalogue.piece(number)
            return f"{piece.dtype} {[*piece.shape]}"
        kind = self._type_of(node, own=own)
        if kind is None:
            tag = str(node[1]).removeprefix(NAMED_TUPLE).removeprefix(PYTREE)[:200]
            return f"a value of type {tag}"
        if issubclass(kind, _CONTAINERS):
            return (
                f"an {kind.__name__}" if kind is OrderedDict else f"a {kind.__name__}"
            )
        return f"a value of type {kind.__name__}"


def mismatch_of(
    path: str, expected: str, actual: str, detail: str = ""
) -> TemplateMismatchError:
    """Return the error that a template does not fit."""
    return TemplateMismatchError(path, expected=expected, actual=actual, detail=detail)
