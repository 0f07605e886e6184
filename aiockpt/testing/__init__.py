"""Tools to test a transport, and to break one on purpose.

`TransportConformance` needs pytest, the rest does not; nothing loads before its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
