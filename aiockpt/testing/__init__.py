"""Tools to test a transport or a checkpointer, and to break one on purpose.

`TransportConformance` and `CheckpointerConformance` need the extra `aiockpt[testing]`.
The rest needs only the package. Each name loads when it is first used, and the command
line loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.state.equality import assert_same
    from aiockpt.testing.conformance import (
        CheckpointerConformance,
        TransportConformance,
    )
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
    from aiockpt.testing.processes import (
        LaggingLoop,
        PeerProcess,
        wall_clock_jumped,
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
    **dict.fromkeys(__all__, "aiockpt.testing.faults"),
    **dict.fromkeys(
        ("CheckpointerConformance", "TransportConformance"),
        "aiockpt.testing.conformance",
    ),
    **dict.fromkeys(
        ("Interruption", "interrupted", "interruptions"), "aiockpt.testing.interrupting"
    ),
    **dict.fromkeys(
        ("LaggingLoop", "PeerProcess", "wall_clock_jumped"), "aiockpt.testing.processes"
    ),
    "assert_same": "aiockpt.state.equality",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
