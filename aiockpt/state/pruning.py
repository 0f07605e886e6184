"""What is left of a checkpoint's tree when only a selection of it is wanted.

Tensors cost nothing before they are fetched, so they stay. A value that is made of
fetched bytes, such as a numpy array, gives way to None where it is not selected, and
so do distributed tensors, whose mesh need not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiockpt.format.paths import Node
from aiockpt.state.selection import Selection, below, item

__all__ = ["pruned"]

_SCALARS: Final = (str, int, float, bool, type(None))

# A list whose item is still to be looked at, which one, and its path.
_Spot = tuple[list[Node], int, str]


def pruned(tree: Node, selection: Selection) -> Node:
    """Return the tree without what is not selected; both share what is left.

    The selection meets every path but those below keys that are no scalars. What is
    malformed stays for `decode_tree` to refuse.
    """
    top = [tree]
    first: _Spot = (top, 0, "")
    # No peer's tree makes this recursive, or hold more than one spot per level.
    levels: list[Iterator[_Spot]] = [iter([first])]
    while levels:
        spot = next(levels[-1], None)
        if spot is None:
            levels.pop()
            continue
        values, at, path = spot
        node = values[at]
        if selection.takes(path):
            continue
        inside = _opened(node, path, selection)
        if inside is not None:
            values[at], found = inside
            levels.append(found)
        elif not selection.takes_leaf(path) and _costs(node):
            values[at] = None
    return top[0]


def _opened(
    node: Node, path: str, selection: Selection
) -> tuple[Node, Iterator[_Spot]] | None:
    """Return a container's copy, and where its values are; None for other nodes."""
    match node:
        case ["tensors", [*names], [*_]]:
            for name in names:
                selection.takes(below(path, name))
            return node, iter(())
        case ["list", [*items]]:
            spots = ((items, at, item(path, at)) for at in range(len(items)))
            return ["list", items], spots
        case ["dict" | "odict" as tag, [*keys], [*values], *rest]:
            return [tag, keys, values, *rest], _keyed(keys, values, path)
        case ["defaultdict", factory, [*keys], [*values]]:
            keyed = _keyed(keys, values, path)
            return ["defaultdict", factory, keys, values], keyed
    return None


def _keyed(keys: list[Node], values: list[Node], path: str) -> Iterator[_Spot]:
    for at, key in enumerate(keys[: len(values)]):
        if isinstance(key, _SCALARS):  # other keys' paths are not known yet
            yield values, at, below(path, key)


def _costs(node: Node) -> bool:
    """Say whether making the value takes more than the node itself."""
    return type(node) is list and node[:1] != ["tensor"]
