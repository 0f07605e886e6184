"""A template's own containers, and how a checkpoint's values get into them.

This is the one rule for ``into=`` and ``load(state_dict=)``. Dicts and lists of the
template stay, and get the checkpoint's values as items. A value that has no items to
assign, such as a number, a tuple or a set, replaces the old one in the container around
it. A tuple or deque in which nothing differs stays. Nothing is assigned before
`Containers.finish`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final

import torch

from aiockpt.state.distributed import take_apart
from aiockpt.state.nodes import opened

__all__ = ["DICTS", "Adoption", "Containers", "children"]

DICTS: Final = (dict, OrderedDict, defaultdict)


class Containers:
    """Plans what is assigned to the containers of a template; `finish` assigns it."""

    def __init__(self) -> None:
        self._later: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Assign everything that was planned."""
        for assign in self._later:
            assign()

    def _into(self, target: object, value: object, path: str) -> object:
        """Return what a place of the template has in the end.

        It is ``target`` itself if that is a container that stays.
        """
        raise NotImplementedError

    def _assign(self, container: Any, key: object, value: object) -> None:
        self._later.append(lambda: container.__setitem__(key, value))

    def _assign_items(self, target: list[Any], items: Sequence[Any]) -> None:
        if not _are_same(target, items):
            self._later.append(lambda: target.__setitem__(slice(None), items))

    def _rebuilt(self, target: Any, value: Any, items: Sequence[Any]) -> object:
        """Return a tuple, deque or node like ``value``, or the template's if it is."""
        if (inside := opened(value)) is not None:
            return target if _are_same(children(target), items) else inside.make(items)
        if type(value) is deque:
            same = target.maxlen == value.maxlen and _are_same(target, items)
            return target if same else deque(items, value.maxlen)
        return target if _are_same(target, items) else tuple(items)


class Adoption(Containers):
    """Puts a whole state dict into a template, whose tensors it has already.

    What the template lacks is added. What the checkpoint lacks stays as it is.
    """

    def __init__(self, template: object) -> None:
        super().__init__()
        self._template = template

    def plan(self, state: object) -> object:
        """Return the template, or what takes its place if it is no dict or list."""
        return self._into(self._template, state)

    def _into(self, target: object, value: object, path: str = "") -> object:
        kind = type(value)
        if isinstance(target, dict) and kind in DICTS:
            return self._into_dict(target, value)
        if isinstance(target, list) and kind is list:
            self._assign_items(target, self._items(target, value))
            return target
        if kind is type(target) and (inside := children(value)) is not None:
            return self._rebuilt(target, value, self._items(children(target), inside))
        if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
            # A rank that holds no part of a distributed tensor has nothing to fill,
            # by which the template's tensor would be known.
            return value if take_apart(target, ()) is None else target
        return value

    def _into_dict(self, target: dict[Any, Any], value: Any) -> object:
        # Most dicts have nothing but tensors, of which there may be 100,000.
        # The order counts: equal numbers are one object under any key.
        if not (_are_same(target.values(), value.values()) and [*target] == [*value]):
            for key, new in value.items():
                if key not in target:
                    self._assign(target, key, new)
                elif (old := target[key]) is not new:
                    put = self._into(old, new)
                    if put is not old:
                        self._assign(target, key, put)
        if type(target) is type(value) is OrderedDict:
            self._into_dict(vars(target), vars(value))
        return target

    def _items(self, target: Any, value: Any) -> list[Any]:
        old = [*target]
        return [
            self._into(old[at], new) if at < len(old) else new
            for at, new in enumerate(value)
        ]


def children(value: Any) -> Sequence[Any] | None:
    """Return what is in a value that is made anew if something in it differs."""
    if type(value) in (tuple, deque):
        return [*value]
    inside = opened(value)
    return None if inside is None else inside.children


def _are_same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
