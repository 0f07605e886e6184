"""Where a leaf is: paths as people read them, such as ``optimizer.state[0].step``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, Union

import msgspec

__all__ = [
    "Node",
    "Path",
    "format_path",
    "is_unicode",
    "renumber",
    "tensor_leaves",
    "tensor_paths",
]

Node: TypeAlias = Union[bool, int, float, str, "list[Node]", None]
"""One JSON value of an encoded tree; anything but a scalar is ``[tag, ...]``."""

Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead from the root of a state dict to a leaf."""


def format_path(path: Iterable[object]) -> str:
    """Return a readable path: strings joined by dots, everything else in brackets."""
    text = ""
    for key in path:
        text = _extend(text, key if isinstance(key, str) else "", key)
    return text


def _extend(prefix: str, name: str, key: object) -> str:
    if not name or not is_unicode(name):
        return f"{prefix}[{key!r}]"
    return f"{prefix}.{name}" if prefix else name


def is_unicode(text: str) -> bool:
    """Whether ``text`` has no lone surrogates, which JSON cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tensor_paths(node: Node) -> dict[int, str]:
    """Return where each tensor index (blobs included) appears first in the tree."""
    paths: dict[int, str] = {}
    for path, tag, index in _references(node):
        del tag
        paths.setdefault(index, path)
    return paths


def tensor_leaves(node: Node) -> Iterator[tuple[str, int]]:
    """Yield the path and index of each tensor of the tree, blobs excluded."""
    return ((path, index) for path, tag, index in _references(node) if tag == "tensor")


def _references(root: Node) -> Iterator[tuple[str, str, int]]:
    """Yield ``(path, tag, index)`` of tensors and blobs, in the order of the tree.

    Nothing is decoded or looked up, and a malformed node counts as empty, so this
    works on any header, also on one that is about to be refused.
    """
    stack: list[tuple[str, Node]] = [("", root)]
    while stack:
        prefix, node = stack.pop()
        match node:
            case ["tensor" | "blob" as tag, int(index)]:
                yield prefix, str(tag), index
            case ["tensors", [*names], [*indices]]:
                for name, each in zip(names, indices, strict=False):
                    if isinstance(each, int):
                        yield _below(prefix, name), "tensor", each
            case [*_]:
                stack += reversed(list(_children(prefix, node)))


def _children(prefix: str, node: list[Node]) -> Iterator[tuple[str, Node]]:
    match node:
        case ["list" | "tuple" | "set" | "frozenset", [*items]]:
            yield from _indexed(prefix, items)
        case ["deque", _, [*items]]:
            yield from _indexed(prefix, items)
        case ["dict", [*keys], [*values]] | ["defaultdict", _, [*keys], [*values]]:
            yield from _keyed(prefix, keys, values)
        case ["odict", [*keys], [*values], *attributes]:
            yield from _keyed(prefix, keys, values)
            yield from ((prefix, attribute) for attribute in attributes)
        case ["ext", _, child]:
            yield prefix, child


def _indexed(prefix: str, items: list[Node]) -> Iterator[tuple[str, Node]]:
    return ((f"{prefix}[{index}]", item) for index, item in enumerate(items))


def _keyed(
    prefix: str, keys: list[Node], values: list[Node]
) -> Iterator[tuple[str, Node]]:
    pairs = zip(keys, values, strict=False)
    return ((_below(prefix, key), value) for key, value in pairs)


def _below(prefix: str, key: Node) -> str:
    if isinstance(key, list):
        # Not decoded, so shown as it was sent.
        return f"{prefix}[{msgspec.json.encode(key).decode()}]"
    return _extend(prefix, key if isinstance(key, str) else "", key)


def renumber(root: Node, numbers: Sequence[int]) -> None:
    """Replace each tensor index ``i`` of our own tree by ``numbers[i]``, in place."""
    stack = [root]
    while stack:
        match stack.pop():
            case ["tensor" | "blob", int(index)] as node:
                node[1] = numbers[index]
            case ["tensors", _, list(indices)]:
                indices[:] = [numbers[i] for i in indices if isinstance(i, int)]
            case [*parts]:
                stack += [part for part in parts if isinstance(part, list)]
