"""What a template has, to notice that an entry or a tensor of it changes meanwhile.

A template is described first, and filled later. In between it belongs to its owner. An
entry may be replaced or removed, or its tensor may get other memory. A copy would then
go to a tensor that is no longer in the template, and the template would lack the values
of the checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import chain, compress
from operator import and_, is_
from typing import Any, Final, NamedTuple

import torch

from aiockpt.format.paths import Path, format_path
from aiockpt.memory.held import Geometry, HeldMemory, changed_error
from aiockpt.runtime.system import collector_paused
from aiockpt.state.distributed import local_tensors
from aiockpt.state.nodes import opened

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types without state beyond their elements."""

_GONE: Final = object()


class ContainerContent(NamedTuple):
    """A container of a template, and what it had.

    Attributes:
        path: The keys that lead to the container.
        container: The container.
        keys: The keys of its tensors and containers: of a dict, or positions.
        values: These tensors and containers.
        length: How many items it had; -1 if more of them do no harm.
    """

    path: Path
    container: Any
    keys: Sequence[Any]
    values: Sequence[Any]
    length: int = -1

    def path_of(self, key: object) -> str:
        """Return the path of one of its items."""
        return format_path((*self.path, key))


class Contents:
    """The tensors of a template, where they are in it, and their memory, which is held.

    Args:
        entries: The containers of the template.
        held: The memory of its tensors, if that is held already.
        shapes: The shapes of these tensors.
    """

    def __init__(
        self,
        entries: Iterable[ContainerContent],
        held: HeldMemory | None = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._entries = [*entries]
        self._wholes: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        tensors: list[torch.Tensor] = []
        for entry in self._entries:
            if {*map(type, entry.values)} <= PLAIN:
                tensors += entry.values if held is None else ()
                continue
            for value in entry.values:
                if type(value) in PLAIN and held is None:
                    tensors.append(value)
                elif isinstance(value, torch.Tensor) and (own := local_tensors(value)):
                    self._wholes.append((value, own))
                    tensors += own
        dense = [each for each in tensors if each.layout is torch.strided]
        self._held = [HeldMemory.of(dense)]
        self._geometries = [Geometry(dense)]
        if held is not None:
            self._held.append(held)
            self._geometries.append(Geometry(held.tensors, shapes))

    def check(self) -> None:
        """Check that the template has the same tensors, in the same memory.

        Call it right before the template is filled.

        Raises:
            LocalProtocolError: one was replaced, removed or added, or has other memory
                or another shape, stride or dtype.
        """
        with collector_paused():  # there may be 100,000 tensors
            self._check_tensors()
            for held, geometry in zip(self._held, self._geometries, strict=True):
                geometry.check(partial(self.name_of, held.tensors))

    def check_filled(self) -> None:
        """Check that the template still has what was copied; call it after the copies.

        Another view of the same memory makes no difference then.

        Raises:
            LocalProtocolError: a tensor was replaced, removed or added, or has other
                memory.
        """
        with collector_paused():
            self._check_tensors()

    def _check_tensors(self) -> None:
        for entry in self._entries:
            _check_items(entry)
        for whole, own in self._wholes:
            if not are_same(local_tensors(whole), own):
                raise changed_error(self.path_of(whole), "got another local tensor")
        for held in self._held:
            held.check(partial(self.name_of, held.tensors))

    def name_of(self, tensors: Sequence[torch.Tensor], number: int) -> str:
        """Return the path of a tensor, or of the one whose local part it is."""
        tensor = tensors[number]
        for whole, own in self._wholes:
            if any(each is tensor for each in own):
                tensor = whole
        return self.path_of(tensor)

    def path_of(self, tensor: torch.Tensor) -> str:
        """Return the path of a tensor that is in the template; "" for others."""
        for entry in self._entries:
            for key, value in zip(entry.keys, entry.values, strict=True):
                if value is tensor:
                    return entry.path_of(key)
        return ""


def entries_of(template: object) -> Iterator[ContainerContent]:
    """Yield the containers of a template, to notice whatever changes in it."""
    if isinstance(template, torch.Tensor):
        template = {"tensor": template}
    waiting: list[tuple[Path, Any]] = [((), template)]
    seen: dict[int, object] = {}  # a node may make its children on access
    while waiting:
        path, container = waiting.pop()
        if id(container) in seen or (items := _items(container)) is None:
            continue
        seen[id(container)] = container
        keys, values = items
        count = len(values)
        if not {*map(type, values)} <= PLAIN:
            noted = [*map(is_noted, values)]
            if opened(container) is not None:  # it may make them anew each time
                again = _items(container) or ((), ())
                noted = [*map(and_, noted, map(is_, values, again[1]))]
            keys, values = [*compress(keys, noted)], [*compress(values, noted)]
            pairs = zip(keys, values, strict=True)
            waiting += (((*path, key), value) for key, value in pairs)
        if values or isinstance(container, dict | list):  # something may be added
            yield ContainerContent(path, container, keys, values, count)
        if type(container) is OrderedDict:
            waiting.append((path, vars(container)))


def entries_with(
    template: object, tensors: Set[int], *, every: bool
) -> Iterator[ContainerContent]:
    """Yield the containers of a template that have some tensors, at any depth.

    Args:
        template: The template.
        tensors: The `id` of each of these tensors.
        every: Whether to yield containers that have none of them, too.
    """
    above: set[int] = set()  # the containers that have one
    for entry in reversed([*entries_of(template)]):  # from below
        kept = [
            id(each) in tensors
            or id(each) in above
            or (every and not isinstance(each, torch.Tensor))
            for each in entry.values
        ]
        if any(kept):
            above.add(id(entry.container))
            keys, values = (
                [*compress(column, kept)] for column in (entry.keys, entry.values)
            )
            yield ContainerContent(entry.path, entry.container, keys, values)


def _items(value: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Return the keys and items of a container; None for any other value."""
    if (inside := opened(value)) is not None:  # maybe a subclass of dict
        return range(len(inside.children)), inside.children
    if isinstance(value, dict):
        return [*value], [*value.values()]
    if type(value) in (list, tuple, deque):
        return range(len(value)), [*value]
    return None


def is_noted(value: object) -> bool:
    """Say whether a template is filled by what it has here, not by a new value."""
    if isinstance(value, torch.Tensor | dict | list):
        return True
    return any(True for _ in entries_of(value))


def _check_items(entry: ContainerContent) -> None:
    container: Any = entry.container
    if isinstance(container, dict):
        now, count = [*map(container.get, entry.keys)], len(container)
        if are_same(now, entry.values) and not 0 <= entry.length < count:
            return
    items = _items(container)
    assert items is not None  # the type of an object stays
    there = dict(zip(*items, strict=True))
    for key, value in zip(entry.keys, entry.values, strict=True):
        if (found := there.pop(key, _GONE)) is not value:
            what = "was removed" if found is _GONE else "was replaced"
            raise changed_error(entry.path_of(key), what)
    if 0 <= entry.length < len(items[0]):
        for key, value in there.items():
            if _has_tensor(value):
                raise changed_error(entry.path_of(key), "was added")


def _has_tensor(value: object) -> bool:
    within = chain.from_iterable(entry.values for entry in entries_of(value))
    return any(isinstance(each, torch.Tensor) for each in within)


def are_same(some: Any, others: Any) -> bool:
    """Say whether two rows have the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
