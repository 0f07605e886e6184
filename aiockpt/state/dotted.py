"""Finds a template's values in the tree of another tool by their dotted names.

Other tools save flat names: ``model.layers.0.weight``. Or they turn every key into
text: ``optimizer.state["0"]``. A template may have the same values in dicts of dicts,
with keys of any type. Both have the same dotted name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, cast

from aiockpt.errors import TemplateMismatchError
from aiockpt.format.paths import Node
from aiockpt.state.selection import below
from aiockpt.state.trees import DICTS, items_of, keys_of, tag_of

_Steps: TypeAlias = tuple[object, ...]


class _Dict(dict[object, tuple[Node, Any]]):
    """The items of a dict's node: key -> the key's node, and a node or a `_Dict`."""

    @classmethod
    def of(cls, node: Node) -> Any:
        """Return a node, with a `_Dict` for each dict from there down."""
        if tag_of(node) not in DICTS:
            return node
        keys = keys_of(node)
        items = (items_of(node) or {}).items()
        return cls((key, (keys[key], cls.of(each))) for key, each in items)

    def closed(self) -> Node:
        """Return the node."""
        keys = [key for key, _ in self.values()]
        values = [
            each.closed() if isinstance(each, _Dict) else each
            for _, each in self.values()
        ]
        return ["dict", keys, values]

    def take(self, steps: _Steps) -> Node:
        """Remove and return a value, and the dicts that are empty then."""
        (first, *rest) = steps
        if not rest:
            return cast("Node", self.pop(first)[1])
        inner = self[first][1]
        found = inner.take((*rest,))
        if not inner:
            del self[first]
        return cast("Node", found)

    def put(self, steps: _Steps, template: _Dict, value: Node) -> bool:
        """Add a value at a path of a template; say whether the path was free."""
        first, *rest = steps
        key, inner = template[first]
        if not rest:
            free = first not in self
            self.setdefault(first, (key, value))
            return free
        _, mine = self.setdefault(first, (key, _Dict()))
        return isinstance(mine, _Dict) and mine.put((*rest,), inner, value)


def renested(tree: Node, template: Node) -> Node:
    """Return a tree of another tool with the paths of a template.

    A value moves if its path is not in the template, and its dotted name is that of one
    path of the template.

    Raises:
        TemplateMismatchError: two paths have the same dotted name.
    """
    theirs = _by_name(tree)
    moves: list[tuple[_Steps, _Steps]] = []
    for name, wanted in _by_name(template).items():
        found = theirs.get(name, [])
        if not found or {*wanted} & {*found}:
            continue
        if len(found) > 1 or len(wanted) > 1:
            raise TemplateMismatchError(
                name,
                expected=f"values at {[*map(list, found)]}",
                actual=f"values at {[*map(list, wanted)]}",
                detail="their dotted names are the same: rename one of them",
            )
        moves.append((found[0], wanted[0]))
    if not moves:
        return tree
    opened, paths = _Dict.of(tree), _Dict.of(template)
    values = [opened.take(old) for old, _ in moves]
    for (_, new), value in zip(moves, values, strict=True):
        if not opened.put(new, paths, value):
            name = ".".join(map(str, new))
            upper = ".".join(map(str, new[:-1]))
            raise TemplateMismatchError(
                name, expected=f"a value at {upper}", actual=f"a dict at {upper}"
            )
    return cast("Node", opened.closed())


def _by_name(node: Node) -> dict[str, list[_Steps]]:
    """Return the paths of all values that are no dicts, by their dotted names."""
    found: dict[str, list[_Steps]] = {}
    for name, steps in _values_of(node, "", ()):
        found.setdefault(name, []).append(steps)
    return found


def _values_of(node: Node, name: str, steps: _Steps) -> Iterator[tuple[str, _Steps]]:
    if tag_of(node) in DICTS:
        for key, each in (items_of(node) or {}).items():
            yield from _values_of(each, below(name, key), (*steps, key))
    elif steps:
        yield name, steps
