"""Which values of a state dict are meant, by their dotted paths, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from aiockpt.format.limits import enforce, raise_if_cancelled
from aiockpt.format.paths import Node
from aiockpt.runtime.system import of_caller

__all__ = ["Select", "Selection", "below", "item", "listed", "pruned"]

_SCALARS: Final = (str, int, float, bool, type(None))
# A list whose item is still to be looked at, which one, and its path.
_Spot = tuple[list[Node], int, str]

_LONGEST: Final = 16 << 10

Select: TypeAlias = Iterable[str] | Callable[[str], bool]
"""Dotted paths, with all that is below each; or a function that is asked for each."""


def listed(select: Select | None) -> Select | None:
    """Return a selection with its names, which may come only once, in a list.

    Raises:
        TypeError: it is neither a function nor names.
    """
    if select is None:
        return None
    if callable(select):
        return of_caller(select)
    if isinstance(select, str):
        raise TypeError(f"select takes a list of paths, not the string {select!r}")
    names = [*select]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"select takes paths, which are strings, got {name!r}")
    return names


def below(path: str, key: object) -> str:
    """Return the path of what a dict has under ``key``.

    Raises:
        LimitExceededError: it is so long that a peer must want to waste our time.
    """
    found = f"{path}.{key}" if path else f"{key}"
    enforce("the length of a path", len(found), _LONGEST)
    return found


def item(path: str, index: int) -> str:
    """Return the path of what a list has at ``index``."""
    return f"{path}[{index}]"


class Selection:
    """Says which paths are selected; remembers those that were never met."""

    def __init__(self, select: Select | None) -> None:
        self._asks = select if callable(select) else None
        wanted = listed(select)
        self._wanted = dict.fromkeys(wanted if isinstance(wanted, list) else (), False)
        # Where a wanted path may end in another: few lengths, however many paths.
        self._sizes = sorted({*map(len, self._wanted)})
        self._above = {upper for each in self._wanted for upper in _upwards(each)}
        self.everything = select is None

    def __repr__(self) -> str:
        return f"<Selection {list(self._wanted) or self._asks or 'everything'}>"

    def takes(self, path: str) -> bool:
        """Say whether everything at and below a path is selected."""
        raise_if_cancelled()  # a peer may have sent half a million paths
        if not self._wanted:
            return self.everything
        found = [
            upper
            for size in self._sizes
            if (upper := path[:size]) in self._wanted and _ends(path, size)
        ]
        for each in found:
            self._wanted[each] = True
        return bool(found)

    def takes_leaf(self, path: str) -> bool:
        """Say whether a value is selected in which nothing can be selected apart."""
        return self.takes(path) if self._asks is None else bool(self._asks(path))

    def enters(self, path: str) -> bool:
        """Say whether something below a path may be selected, or all of it is."""
        if self.everything or self._asks is not None:
            return True
        return path in self._above or self.takes(path)

    def unmet(self) -> list[str]:
        """Return the selected paths that were not found."""
        return [path for path, met in self._wanted.items() if not met]


def _ends(path: str, size: int) -> bool:
    """Say whether a step of the path ends after ``size`` letters."""
    return not size or size == len(path) or path[size : size + 1] in (".", "[")


def _upwards(path: str) -> Iterator[str]:
    """Yield a path and all that are above it: whatever ends before a dot or bracket."""
    if path:
        yield ""
    for at, letter in enumerate(path):
        if at and letter in ".[":
            yield path[:at]
    yield path


def pruned(tree: Node, selection: Selection) -> Node:
    """Return the tree without what is not selected; both share what is left.

    Tensors cost nothing before they are fetched, so they stay. A value that is made of
    fetched bytes, such as a numpy array, gives way to None where it is not selected.
    So do distributed tensors, whose mesh need not exist here.

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
