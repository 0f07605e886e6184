"""Selects values of a state dict by dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from aiockpt.format.limits import enforce, raise_if_cancelled
from aiockpt.runtime.system import of_caller

_MAX_PATH_CHARACTERS: Final = 16 << 10

Select: TypeAlias = Iterable[str] | Callable[[str], bool]
"""Dotted paths, each with everything below it, or a function from a path to bool."""


def listed(select: Select | None) -> Select | None:
    """Return a selection with its names in a list, because an iterator ends.

    Raises:
        TypeError: the selection is neither a function nor an iterable of names.
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
    """Return the path of a dict's value under ``key``.

    Raises:
        LimitExceededError: the path is longer than any honest peer sends.
    """
    found = f"{path}.{key}" if path else f"{key}"
    enforce(
        "the length of a path",
        len(found),
        _MAX_PATH_CHARACTERS,
        remedy="use shorter keys",
    )
    return found


def item(path: str, index: int) -> str:
    """Return the path of a list's item at ``index``."""
    return f"{path}[{index}]"


class Selection:
    """A selection of paths, which remembers the names that matched nothing."""

    def __init__(self, select: Select | None) -> None:
        self._asks = select if callable(select) else None
        wanted = listed(select)
        names = wanted if isinstance(wanted, list) else ()
        self._names = {_spelled(name): name for name in names}
        self._wanted = dict.fromkeys(self._names, False)
        # The lengths of the wanted paths: few, however many paths there are.
        self._sizes = sorted({*map(len, self._wanted)})
        self._above = {upper for each in self._wanted for upper in _upwards(each)}
        self.everything = select is None

    def takes(self, path: str) -> bool:
        """Say whether everything at and below a path is selected."""
        raise_if_cancelled()  # a peer may have sent 500,000 paths
        if not self._wanted:
            return self.everything
        path = _spelled(path)
        found = [
            upper
            for size in self._sizes
            if (upper := path[:size]) in self._wanted and _ends(path, size)
        ]
        for each in found:
            self._wanted[each] = True
        return bool(found)

    def takes_leaf(self, path: str) -> bool:
        """Say whether a value without selectable parts is selected."""
        return self.takes(path) if self._asks is None else bool(self._asks(path))

    def enters(self, path: str) -> bool:
        """Say whether a path, or something below it, may be selected."""
        if self.everything or self._asks is not None:
            return True
        return _spelled(path) in self._above or self.takes(path)

    def unmet(self) -> list[str]:
        """Return the selected names that matched no path."""
        return [self._names[path] for path, met in self._wanted.items() if not met]


def _spelled(path: str) -> str:
    """Return a path with a dot before each step, however it was written.

    Errors and headers write ``state[0]`` for the int key that is ``state.0`` here.
    """
    if "[" not in path:  # most have none
        return path
    return path.replace("[", ".").replace("]", "").removeprefix(".")


def _ends(path: str, size: int) -> bool:
    """Say whether a step of the path ends after ``size`` characters."""
    return not size or size == len(path) or path[size : size + 1] == "."


def _upwards(path: str) -> Iterator[str]:
    """Yield a path and all paths above it: each prefix before a dot."""
    if path:
        yield ""
    for at, letter in enumerate(path):
        if at and letter == ".":
            yield path[:at]
    yield path
