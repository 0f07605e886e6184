"""Puts the values of a checkpoint into the containers of a template.

``into=`` and ``load(state_dict=)`` share this rule. Dicts and lists of the template
stay the same objects, and their items are assigned. A value without assignable items,
such as a number, a tuple or a set, is replaced in its container. A tuple or deque stays
if nothing in it differs. Nothing is assigned before `Adoption.finish`.

For errors, `left_empty` and `how_keys_differ` say how a template and a checkpoint
differ.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, Final

import torch

from aiockpt.errors import TemplateMismatchError
from aiockpt.state.contents import PLAIN, are_same, is_noted
from aiockpt.state.distributed import take_apart
from aiockpt.state.nodes import opened

_DICT_TYPES: Final = (dict, OrderedDict, defaultdict)

STAYS: Final = object()
"""Stands in a state dict for an item that stays as the template has it."""


class Adoption:
    """Puts a state dict, made of the template's tensors, into the template.

    Keys that the template lacks are added. Keys that the state dict lacks stay.

    Args:
        template: The template.
        filled: The `id` of each tensor of the template that is filled, and stays.
    """

    def __init__(self, template: object, filled: Set[int] = frozenset()) -> None:
        self._template, self._filled = template, filled
        self._later: list[Callable[[], None]] = []

    def plan(self, state: object) -> object:
        """Return the template, or its replacement if it is not a dict or list."""
        return self._into(self._template, state)

    def finish(self) -> None:
        """Make all planned assignments."""
        for assign in self._later:
            assign()

    def _into(self, target: object, value: object) -> object:
        """Return the final value of an item: ``target`` if that container stays."""
        kind = type(value)
        if value is STAYS:
            return target
        if isinstance(target, dict) and kind in _DICT_TYPES:
            return self._into_dict(target, value)
        if isinstance(target, list) and kind is list:
            self._assign_items(target, self._items(target, value))
            return target
        if kind is type(target) and (inside := children(value)) is not None:
            mine = children(target) or ()
            if len(mine) != len(inside):  # it was taken as a whole
                return value
            return self._rebuilt(target, value, self._items(mine, inside))
        if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
            return target if self._stays(target) else value
        return value

    def _stays(self, target: torch.Tensor) -> bool:
        if id(target) in self._filled:
            return True
        # A rank without a local part of a distributed tensor has no tensor to fill, so
        # the template's own tensor cannot be recognized by its parts.
        parts = None if type(target) in PLAIN else take_apart(target, ())
        return parts is not None and not any(each.is_meta for each in parts.tensors)

    def _into_dict(self, target: dict[Any, Any], value: Any) -> object:
        # Most dicts have nothing but tensors, of which there may be 100,000.
        tensors = {*map(type, value.values())} <= PLAIN
        same = tensors and are_same(target.values(), value.values())
        if not (same and [*target] == [*value]):
            for key, new in value.items():
                if key not in target:
                    self._assign(target, key, new)
                else:
                    old = target[key]
                    self._put(target, key, old, self._into(old, new))
        if type(target) is type(value) is OrderedDict:
            self._into_dict(vars(target), vars(value))
        return target

    def _items(self, target: Any, value: Any) -> list[Any]:
        old = [*target]
        return [
            self._into(old[at], new) if at < len(old) else new
            for at, new in enumerate(value)
        ]

    def _assign(self, container: Any, key: object, value: object) -> None:
        self._later.append(lambda: container.__setitem__(key, value))

    def _put(self, container: Any, key: object, old: object, new: object) -> None:
        """Assign an item unless it stays.

        A number or text is assigned in any case: the owner may replace it meanwhile.
        """
        if new is not old or not is_noted(old):
            self._assign(container, key, new)

    def _assign_items(self, target: list[Any], items: Sequence[Any]) -> None:
        if not (are_same(target, items) and all(map(is_noted, items))):
            self._later.append(lambda: target.__setitem__(slice(None), items))

    def _rebuilt(self, target: Any, value: Any, items: Sequence[Any]) -> object:
        """Return a tuple, deque or node of ``items``; ``target`` if it has the same."""
        if (inside := opened(value)) is not None:
            return target if are_same(children(target), items) else inside.make(items)
        if type(value) is deque:
            same = target.maxlen == value.maxlen and are_same(target, items)
            return target if same else deque(items, value.maxlen)
        return target if are_same(target, items) else tuple(items)


_OPTIMIZER: Final = (
    "make the state first with get_optimizer_state_dict(model, optimizer) of "
    "torch.distributed.checkpoint.state_dict"
)

_WRAPPERS: Final = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)
"""What DDP, compile, FSDP and activation checkpointing put into the names."""


def left_empty(
    path: str, kind: type, full: Collection[object], *, optimizer: bool, whole: bool
) -> TemplateMismatchError:
    """Return the error for an empty container that the checkpoint has full.

    Args:
        path: The container's path.
        kind: The container's type.
        full: Its items, or its keys, in the checkpoint.
        optimizer: Whether it is the state of an optimizer.
        whole: Whether the template must fit exactly, as in a receive.
    """
    unit = "key" if issubclass(kind, dict) else "item"
    remedy = f"give it the {unit}s of the checkpoint"
    if optimizer:
        remedy = _OPTIMIZER
        if all(type(key) is int for key in full):  # as optimizer.state_dict() has them
            remedy += " and take optimizer.state_dict() again"
    if whole:
        remedy += ", or receive without into="
    elif path:
        remedy += ", or put None there to take it as it is"
    else:
        remedy = "leave out into= to load all of it"
    many = f"{len(full)} {unit}{'s' * (len(full) != 1)}"
    return TemplateMismatchError(path, expected=many, actual="empty", detail=remedy)


def how_keys_differ(target: dict[Any, Any], value: dict[Any, Any], path: str) -> str:
    """Return how the keys of a template and a checkpoint differ, and what to do."""
    mine, theirs = _only(target, value), _only(value, target)
    if not mine or not theirs:
        return ""
    at = f" at {path}" if path else ""
    return (
        renamed(target, value, path)
        or f"the template has {mine[0]!r}{at}, and the checkpoint {theirs[0]!r}"
    )


def _only(some: dict[Any, Any], others: dict[Any, Any]) -> list[Any]:
    return [key for key in some if key not in others]


def renamed(target: dict[Any, Any], value: dict[Any, Any], path: str) -> str:
    """Return what to do if the keys differ by a word, or lie at another depth."""
    mine, theirs = _only(target, value), _only(value, target)
    if not mine or not theirs or not isinstance(first := mine[0], str):
        return ""
    at = f" at {path}" if path else ""
    named = [key for key in theirs if isinstance(key, str)]
    loaded = f"the dict at {path} of the loaded state" if path else "the loaded state"
    for key in named:
        if isinstance(value[key], dict) and first in value[key]:
            into = f"into={{{key!r}: template}}"
            return f"the checkpoint has {first!r} below {key!r}{at}: pass {into} there"
    for key in named:
        if isinstance(target[first], dict) and key in target[first]:
            return (
                f"the checkpoint has {key!r}{at}, which the template has below "
                f"{first!r}: pass what the template has there"
            )
    ends = [key.removesuffix(first) for key in named if key.endswith(f".{first}")]
    for word in (*_WRAPPERS, *ends):
        if {*mine} <= {key.replace(word, "") for key in named}:
            other = next(key for key in named if key.replace(word, "") == first)
            return (
                f"the template has {first!r}{at}, and the checkpoint {other!r}: load "
                f"it without into=, and take {word!r} out of the keys: "
                f"{{key.replace({word!r}, ''): value for key, value in "
                f"state.items()}}, where state is {loaded}"
            )
    starts = [first.removesuffix(key) for key in named if first.endswith(f".{key}")]
    for word in (*_WRAPPERS, *starts):
        if {str(key).replace(word, "") for key in mine} <= {*named} and word in first:
            other = first.replace(word, "")
            inner = f"model.{word}state_dict()" if word in _WRAPPERS else "those keys"
            return (
                f"the template has {first!r}{at}, and the checkpoint {other!r}: pass a "
                f"template without {word!r} in its keys, such as {inner}"
            )
    return ""


def children(value: Any) -> Sequence[Any] | None:
    """Return the items of a value that is rebuilt if one of them differs."""
    if type(value) in (tuple, deque):
        return [*value]
    inside = opened(value)
    return None if inside is None else inside.children
