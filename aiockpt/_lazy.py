"""Lazy public names: a package loads the module of a name on its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def lazy(
    package: str, homes: Mapping[str, str], *, packages: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package (PEP 562).

    Call it where no type checker looks, since a checker would then accept any name.
    Imports under ``TYPE_CHECKING`` tell it the real names.

    Args:
        package: The package's ``__name__``. A name stays there after its first use.
        homes: The module of each lazy name.
        packages: Those inside this one that load on first use, too.
    """
    names = vars(sys.modules[package])

    def load(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(import_module(home), name)
        return names[name]

    return load, lambda: sorted({*names, *names["__all__"]})
