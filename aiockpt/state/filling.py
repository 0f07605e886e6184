"""What of a checkpoint is wanted, and where: by a template, a selection, a device.

Nothing is changed while this is found out. `Filling.places` then says what is to be
read to where, and `Filling.finish` puts the rest in its place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final

import torch

from aiockpt.errors import (
    StateDictError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.state.containers import DICTS, Containers, children
from aiockpt.state.distributed import take_apart
from aiockpt.state.load_plan import PLAIN, LoadPlanner
from aiockpt.state.nodes import opened
from aiockpt.state.selection import Selection, below, item

__all__ = ["Filling"]

_NOTHING: Final = object()


class Filling(Containers):
    """One load's plan; ``missing`` lists what the template has and is not there.

    Args:
        selection: What is wanted.
        wants: Takes down what is to be read.
    """

    def __init__(self, selection: Selection, wants: LoadPlanner) -> None:
        super().__init__()
        self.missing: list[str] = []
        self._selection = selection
        self._wants = wants
        self._in_leaf = 0  # in what is selected as a whole

    def __repr__(self) -> str:
        return f"<Filling missing={len(self.missing)}>"

    def plan(self, template: object | None, found: object) -> object:
        """Return what the load returns, once `finish` has been called.

        Raises:
            TemplateMismatchError: a value of the template is of another type, or a
                tensor of another shape or dtype, than the checkpoint's.
            UnsupportedLeafError: a tensor of the template is not dense.
        """
        if template is not None:
            self._selection.takes("")  # the template is there, whatever it is
            return self._into(template, found, "")
        chosen = self._chosen(found, "")
        return {} if chosen is _NOTHING else chosen

    def unmet(self) -> list[str]:
        """Return what was wanted, and was not found or has no place in the template."""
        return [*dict.fromkeys([*self.missing, *self._selection.unmet()])]

    def _chosen(self, value: object, path: str) -> object:
        """Return what is selected of a value; `_NOTHING` if nothing is."""
        if self._selection.takes(path):
            return self._taken(value)
        if type(value) in DICTS:
            return self._chosen_of_dict(value, path)
        if type(value) is list:
            items = [self._chosen(v, item(path, i)) for i, v in enumerate(value)]
            if all(each is _NOTHING for each in items):
                return _NOTHING
            return [None if each is _NOTHING else each for each in items]
        return self._taken(value) if self._selection.takes_leaf(path) else _NOTHING

    def _chosen_of_dict(self, value: Any, path: str) -> object:
        if not self._selection.enters(path):
            return _NOTHING
        for key in [*value]:
            chosen = self._chosen(value[key], below(path, key))
            if chosen is _NOTHING:
                del value[key]
            else:
                value[key] = chosen
        return value or _NOTHING

    def _taken(self, value: object) -> object:
        """Return a value of the checkpoint with all of its tensors wanted."""
        return _mapped(value, self._wanted)

    def _wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = _parts(tensor)
        if parts is None:
            return self._wants.take(tensor)
        for part in parts.tensors:
            self._wants.keep(part)
        return tensor

    def _into(self, target: object, value: object, path: str) -> object:
        if target is None or (isinstance(target, torch.Tensor) and _is_meta(target)):
            if target is not None:
                _check_tensor(target, value, path)
            return self._anew(value, path)
        if isinstance(value, torch.Tensor):
            return self._into_tensor(target, value, path)
        if not isinstance(target, dict if type(value) in DICTS else type(value)):
            raise _mismatch(path, value, target)
        if isinstance(target, dict):
            return self._into_dict(target, value, path)
        if isinstance(target, list):
            return self._into_list(target, value, path)
        if type(target) is type(value):
            old, new = children(target), children(value)
            if old is not None and new is not None and len(old) == len(new):
                items = self._items(old, new, path)
                return self._rebuilt(target, value, items)
        return self._taken(value)

    def _into_dict(self, target: dict[Any, Any], value: Any, path: str) -> object:
        for key, old in target.items():
            where = below(path, key)
            if key not in value:
                if self._selection.takes(where):
                    self.missing.append(where)
            elif self._is_selected(value[key], where):
                new = self._into(old, value[key], where)
                if new is not old:
                    self._assign(target, key, new)
        return target

    def _items(self, old: Sequence[Any], new: Sequence[Any], path: str) -> list[Any]:
        self._in_leaf += 1
        pairs = enumerate(zip(old, new, strict=True))
        found = [self._into(*pair, item(path, at)) for at, pair in pairs]
        self._in_leaf -= 1
        return found

    def _anew(self, value: object, path: str) -> object:
        """Return what is selected of a value that is, for a place that has nothing."""
        if self._in_leaf or type(value) not in (*DICTS, list):
            return self._taken(value)
        chosen = self._chosen(value, path)
        return None if chosen is _NOTHING else chosen

    def _into_list(self, target: list[Any], value: Any, path: str) -> object:
        found = [*target]
        for at, (mine, theirs) in enumerate(zip_longest(target, value)):
            where = item(path, at)
            if self._is_selected(theirs, where):
                # It grows as far as something is selected, and no further.
                found += [None] * (at + 1 - len(found))
                found[at] = self._into(mine, theirs, where)
        self._assign_items(target, found)
        return target

    def _is_selected(self, value: object, path: str) -> bool:
        if self._in_leaf or self._selection.everything or self._selection.takes(path):
            return True
        if type(value) in (*DICTS, list):
            return self._selection.enters(path)
        return self._selection.takes_leaf(path)

    def _into_tensor(
        self, target: object, value: torch.Tensor, path: str
    ) -> torch.Tensor:
        if not isinstance(target, torch.Tensor):
            raise _mismatch(path, value, target)
        mine, theirs = _parts(target), _parts(value)
        # Torch does not tell the dtype of a distributed tensor without local parts.
        if all(parts is None or parts.tensors for parts in (mine, theirs)):
            _check_tensor(target, value, path)
        if mine is None and theirs is None:
            _check_layout(target, path)
            self._wants.fill(target, value)
            return target
        if mine is None or theirs is None or not _same_layout(mine, theirs):
            kinds = [
                "a tensor" if each is None else each.tag for each in (theirs, mine)
            ]
            layouts = [f"{kind} of another layout" for kind in kinds]
            expected, actual = layouts if kinds[0] == kinds[1] else kinds
            raise TemplateMismatchError(path, expected=expected, actual=actual)
        for own, part in zip(mine.tensors, theirs.tensors, strict=True):
            _check_tensor(own, part, path)
            self._wants.fill(own, part, whole=target)
        return target


def _parts(tensor: torch.Tensor) -> Any:
    """Return what a distributed tensor is made of; None for other tensors."""
    return None if type(tensor) in PLAIN else take_apart(tensor, ())


def _is_meta(target: torch.Tensor) -> bool:
    parts = _parts(target)
    if parts is None:
        return target.is_meta
    return bool(parts.tensors) and all(part.is_meta for part in parts.tensors)


def _same_layout(mine: Any, theirs: Any) -> bool:
    """Compare what two distributed tensors travel as, but for their tensors."""
    if mine.tag != theirs.tag or len(mine.tensors) != len(theirs.tensors):
        return False
    return bool(mine.payload[1:-1] == theirs.payload[1:-1])


def _check_layout(target: torch.Tensor, path: str) -> None:
    """Refuse what is made of other tensors, whose sizes may differ from theirs."""
    if target.layout is not torch.strided:
        remedy = "what it is made of cannot be filled; put None in its place"
        raise UnsupportedLeafError(path, f"{target.layout} tensor", remedy)


def _check_tensor(target: torch.Tensor, value: object, path: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise _mismatch(path, value, target)
    if target.shape != value.shape or target.dtype != value.dtype:
        raise _mismatch(path, value, target)


def _mismatch(path: str, value: object, target: object) -> StateDictError:
    if remedy := remedy_for(target):
        return unsupported(target, path, remedy)
    expected, actual = _words(value), _words(target)
    return TemplateMismatchError(path, expected=expected, actual=actual)


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _mapped(value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors replaced; its own containers are changed."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return put(value)
    if kind in DICTS:
        for key in value:
            value[key] = _mapped(value[key], put)
        if kind is OrderedDict:
            _mapped(vars(value), put)
    elif kind is list:
        value[:] = _each(value, put)
    elif kind in (tuple, set, frozenset):
        return kind(_each(value, put))
    elif kind is deque:
        return deque(_each(value, put), value.maxlen)
    elif (inside := opened(value)) is not None:
        return inside.make(_each(inside.children, put))
    return value


def _each(
    values: Iterable[Any], put: Callable[[torch.Tensor], torch.Tensor]
) -> Sequence[Any]:
    return [_mapped(value, put) for value in values]
