"""A tree in a few lines: what lies at the top, and how much is below it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from aiockpt.cli.text import counted
from aiockpt.format.paths import Node

__all__ = ["outline"]

_MAX_LINES = 30


def outline(node: Node) -> list[str]:
    """Return the top level of an encoded tree, one line per child.

    A malformed node counts as one value: this reads headers that nobody has decoded.
    """
    kind, children = _open(node)
    if children is None:
        return [_describe(node)]
    if all(_open(child)[0] == "tensor" for _, child in children):
        return [_describe(node)]  # the table of tensors says the rest
    shown = children[:_MAX_LINES]
    width = max((len(key) for key, _ in shown), default=0)
    lines = [f"{kind} of {len(children)}"]
    lines += [f"  {key.ljust(width)}  {_describe(child)}" for key, child in shown]
    if len(children) > len(shown):
        lines.append(f"  ... and {len(children) - len(shown)} more")
    return lines


def _describe(node: Node) -> str:
    kind, children = _open(node)
    if children is None:
        return kind
    tensors, values = _count(node)
    counts = [(tensors, "tensor"), (values, "value")]
    below = ", ".join(counted(count, what) for count, what in counts if count)
    return f"{kind} of {len(children)}: {below or 'empty'}"


def _count(node: Node) -> tuple[int, int]:
    """Return how many tensors and how many other leaves lie below."""
    tensors = values = 0
    stack = [node]
    while stack:
        kind, children = _open(stack.pop())
        if children is not None:
            stack += [child for _, child in children]
        elif kind == "tensor":
            tensors += 1
        else:
            values += 1
    return tensors, values


def _open(node: Node) -> tuple[str, list[tuple[str, Node]] | None]:
    """Return a node's kind, and its children by name unless it is a leaf."""
    match node:
        case ["list" | "tuple" | "set" | "frozenset" as kind, [*items]]:
            return kind, list(_numbered(items))
        case ["deque", _, [*items]]:
            return "deque", list(_numbered(items))
        case ["tensors", [*keys], [*indices]]:
            tensors: list[Node] = [["tensor", index] for index in indices]
            return "dict", list(_keyed(keys, tensors))
        case ["dict" | "odict" as kind, [*keys], [*values], *_]:
            name = "OrderedDict" if kind == "odict" else "dict"
            return name, list(_keyed(keys, values))
        case ["defaultdict", _, [*keys], [*values]]:
            return "defaultdict", list(_keyed(keys, values))
        case ["ext", str(tag), child]:
            return tag, _open(child)[1]
    return _leaf_kind(node), None


def _numbered(items: list[Node]) -> Iterator[tuple[str, Node]]:
    return ((f"[{index}]", item) for index, item in enumerate(items))


def _keyed(keys: list[Node], values: list[Node]) -> Iterator[tuple[str, Node]]:
    for key, value in zip(keys, values, strict=False):
        name = key if isinstance(key, str) else msgspec.json.encode(key).decode()
        yield name, value


def _leaf_kind(node: Node) -> str:
    match node:
        case [str(tag), *_]:
            return "tensor" if tag == "tensor" else tag
        case None:
            return "None"
        case str():
            return f"str {msgspec.json.encode(node[:60]).decode()}"
    return f"{type(node).__name__} {node}"
