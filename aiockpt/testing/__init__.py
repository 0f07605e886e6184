"""Tools to test a transport or a checkpointer, and to break one on purpose.

`TransportConformance` and `CheckpointerConformance` need pytest, the rest does not;
nothing loads before its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.testing.checkpointers import CheckpointerConformance
    from aiockpt.testing.clocks import WallClock, monotonic_ahead, wall_clock_jumped
    from aiockpt.testing.conformance import TransportConformance
    from aiockpt.testing.devices import FakeAccelerator
    from aiockpt.testing.disks import in_small_shm, small_disk
    from aiockpt.testing.equality import assert_same
    from aiockpt.testing.exhaustion import exhausted_fds
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
    from aiockpt.testing.link import Link
    from aiockpt.testing.namespaces import Namespace, few_ports
    from aiockpt.testing.processes import PeerProcess
    from aiockpt.testing.system_calls import SystemCallFault, system_call_faults
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
    "Link",
    "Namespace",
    "PeerProcess",
    "Refuse",
    "StallAfter",
    "SystemCallFault",
    "TransportConformance",
    "WallClock",
    "assert_same",
    "busy_interpreter",
    "exhausted_fds",
    "few_ports",
    "in_small_shm",
    "interrupted",
    "interruptions",
    "monotonic_ahead",
    "small_disk",
    "system_call_faults",
    "wall_clock_jumped",
]

_FAULTS = "aiockpt.testing.faults"
_HOMES = {
    **dict.fromkeys(__all__, _FAULTS),
    **dict.fromkeys(("Namespace", "few_ports"), "aiockpt.testing.namespaces"),
    "FakeAccelerator": "aiockpt.testing.devices",
    "Link": "aiockpt.testing.link",
    "exhausted_fds": "aiockpt.testing.exhaustion",
    "FaultUnavailableError": "aiockpt.testing.unavailable",
    "Interruption": "aiockpt.testing.interrupting",
    "LaggingLoop": "aiockpt.testing.lag",
    "PeerProcess": "aiockpt.testing.processes",
    "SystemCallFault": "aiockpt.testing.system_calls",
    "CheckpointerConformance": "aiockpt.testing.checkpointers",
    "TransportConformance": "aiockpt.testing.conformance",
    "WallClock": "aiockpt.testing.clocks",
    "assert_same": "aiockpt.testing.equality",
    "busy_interpreter": "aiockpt.testing.lag",
    "in_small_shm": "aiockpt.testing.disks",
    "interrupted": "aiockpt.testing.interrupting",
    "interruptions": "aiockpt.testing.interrupting",
    "monotonic_ahead": "aiockpt.testing.clocks",
    "small_disk": "aiockpt.testing.disks",
    "system_call_faults": "aiockpt.testing.system_calls",
    "wall_clock_jumped": "aiockpt.testing.clocks",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
