"""Where a tree refers to tensors, exactly: to pair two trees, and to renumber one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from aiockpt.wire.paths import Node, Path

__all__ = ["renumber", "tensor_leaves"]


def tensor_leaves(node: Node) -> Iterator[tuple[Path, int]]:
    """Yield the path and the number of every tensor leaf of a well-formed tree.

    Unlike readable paths these never coincide: a step is a string key, an index, or
    the JSON bytes of any other key. Blobs are no tensors of the state dict.
    """
    stack: list[tuple[Path, Node]] = [((), node)]
    while stack:
        path, node = stack.pop()
        match node:
            case ["tensor", int(number)]:
                yield path, number
            case ["tensors", [*names], [*numbers]]:
                for name, number in zip(names, numbers, strict=True):
                    yield (*path, name), number  # type: ignore[misc]
            case [*_]:
                stack += (((*path, step), child) for step, child in _children(node))


def renumber(node: Node, numbers: Sequence[int]) -> None:
    """Replace every tensor number ``n`` of a tree by ``numbers[n]``, in place."""
    stack: list[Node] = [node]
    while stack:
        match stack.pop():
            case ["tensor" | "blob", int(number)] as reference:
                reference[1] = numbers[number]
            case ["tensors", _, [*_]] as references:
                old = references[2]
                references[2] = [numbers[n] for n in old]  # type: ignore[index, union-attr]
            case [*_] as other:
                stack += (child for _, child in _children(other))


def _children(node: list[Node]) -> Iterator[tuple[object, Node]]:
    """Yield the step to each child of a container's node, and the child."""
    match node:
        case ["list" | "tuple" | "set" | "frozenset", [*items]]:
            yield from enumerate(items)
        case ["deque", _, [*items]]:
            yield from enumerate(items)
        case ["dict", keys, values] | ["defaultdict", _, keys, values]:
            yield from _keyed(keys, values)
        case ["odict", keys, values, *attributes]:
            yield from _keyed(keys, values)
            yield from ((b"attributes", each) for each in attributes)
        case ["ext", _, payload]:
            yield b"ext", payload


def _keyed(keys: Node, values: Node) -> Iterator[tuple[object, Node]]:
    assert isinstance(keys, list)
    assert isinstance(values, list)
    for key, value in zip(keys, values, strict=True):
        yield (key if isinstance(key, str) else msgspec.json.encode(key)), value
