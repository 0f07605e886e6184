"""Public names of a package that load their module when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy"]


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package (PEP 562).

    Call it where no type checker looks, which would accept any name from then on, and
    tell those by imports under ``TYPE_CHECKING``.

    Args:
        package: Its ``__name__``; a name that was used once is kept there.
        homes: The module where each lazy name lives.
    """
    names = vars(sys.modules[package])

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(import_module(home), name)
        return names[name]

    return load, lambda: sorted({*names, *names["__all__"]})
