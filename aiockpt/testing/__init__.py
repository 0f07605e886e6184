"""Tools to test a transport or a checkpointer, and to break one on purpose.

`TransportConformance` and `CheckpointerConformance` need the extra `aiockpt[testing]`.
The rest needs only the package. What needs torch or pytest loads when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy
from aiockpt.testing.faults import (
    Answer,
    BlackHole,
    CutAfter,
    Delay,
    Drip,
    Drop,
    Fault,
    FaultProxy,
    FlipBit,
    Refuse,
    StallAfter,
)
from aiockpt.testing.interrupting import Interruption, interrupted, interruptions
from aiockpt.testing.processes import LaggingLoop, PeerProcess, wall_clock_jumped

if TYPE_CHECKING:
    from aiockpt.state.equality import assert_same
    from aiockpt.testing.conformance import (
        CheckpointerConformance,
        TransportConformance,
    )

__all__ = [
    "Answer",
    "BlackHole",
    "CheckpointerConformance",
    "CutAfter",
    "Delay",
    "Drip",
    "Drop",
    "Fault",
    "FaultProxy",
    "FlipBit",
    "Interruption",
    "LaggingLoop",
    "PeerProcess",
    "Refuse",
    "StallAfter",
    "TransportConformance",
    "assert_same",
    "interrupted",
    "interruptions",
    "wall_clock_jumped",
]

_HOMES = {
    "CheckpointerConformance": "aiockpt.testing.conformance",
    "TransportConformance": "aiockpt.testing.conformance",
    "assert_same": "aiockpt.state.equality",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
