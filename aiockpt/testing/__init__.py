"""Tools to test a transport, and to break one on purpose.

`TransportConformance` needs pytest, the rest does not; nothing loads before its use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.testing.conformance import TransportConformance
    from aiockpt.testing.devices import FakeAccelerator
    from aiockpt.testing.equality import assert_same
    from aiockpt.testing.faults import (
        Answer,
        CutAfter,
        Drip,
        Drop,
        FaultProxy,
        FlipBit,
        Refuse,
        StallAfter,
    )

__all__ = [
    "Answer",
    "CutAfter",
    "Drip",
    "Drop",
    "FakeAccelerator",
    "FaultProxy",
    "FlipBit",
    "Refuse",
    "StallAfter",
    "TransportConformance",
    "assert_same",
]

_FAULTS = "aiockpt.testing.faults"
_HOMES = {
    **dict.fromkeys(__all__, _FAULTS),
    "FakeAccelerator": "aiockpt.testing.devices",
    "TransportConformance": "aiockpt.testing.conformance",
    "assert_same": "aiockpt.testing.equality",
}


if not TYPE_CHECKING:  # a type checker that sees it would accept any name

    def __getattr__(name: str) -> object:
        """Load a public name on first use and keep it."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
