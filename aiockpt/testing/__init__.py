"""Tools to test a transport or a checkpointer, and to break one on purpose.

`TransportConformance` and `CheckpointerConformance` need pytest, the rest does not;
nothing loads before its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.state.equality import assert_same
    from aiockpt.testing.checkpointers import CheckpointerConformance
    from aiockpt.testing.clocks import WallClock, monotonic_ahead, wall_clock_jumped
    from aiockpt.testing.conformance import TransportConformance
    from aiockpt.testing.devices import FakeAccelerator
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
    from aiockpt.testing.interrupting import (
        Interruption,
        interrupted,
        interruptions,
    )
    from aiockpt.testing.lag import LaggingLoop, busy_interpreter
    from aiockpt.testing.processes import PeerProcess
    from aiockpt.testing.unavailable import FaultUnavailableError

__all__ = [
    "Answer",
    "BlackHole",
    "CheckpointerConformance",
    "CutAfter",
    "Delay",
    "Drip",
    "Drop",
    "FakeAccelerator",
    "Fault",
    "FaultProxy",
    "FaultUnavailableError",
    "FlipBit",
    "Interruption",
    "LaggingLoop",
    "PeerProcess",
    "Refuse",
    "StallAfter",
    "TransportConformance",
    "WallClock",
    "assert_same",
    "busy_interpreter",
    "interrupted",
    "interruptions",
    "monotonic_ahead",
    "wall_clock_jumped",
]

_FAULTS = "aiockpt.testing.faults"
_HOMES = {
    **dict.fromkeys(__all__, _FAULTS),
    "FakeAccelerator": "aiockpt.testing.devices",
    "FaultUnavailableError": "aiockpt.testing.unavailable",
    "Interruption": "aiockpt.testing.interrupting",
    "LaggingLoop": "aiockpt.testing.lag",
    "PeerProcess": "aiockpt.testing.processes",
    "CheckpointerConformance": "aiockpt.testing.checkpointers",
    "TransportConformance": "aiockpt.testing.conformance",
    "WallClock": "aiockpt.testing.clocks",
    "assert_same": "aiockpt.state.equality",
    "busy_interpreter": "aiockpt.testing.lag",
    "interrupted": "aiockpt.testing.interrupting",
    "interruptions": "aiockpt.testing.interrupting",
    "monotonic_ahead": "aiockpt.testing.clocks",
    "wall_clock_jumped": "aiockpt.testing.clocks",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
