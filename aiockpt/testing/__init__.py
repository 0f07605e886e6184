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
    from aiockpt.testing.link import Link
    from aiockpt.testing.namespaces import (
        FaultNotPermittedError,
        Namespace,
        few_ports,
    )

__all__ = [
    "Answer",
    "BlackHole",
    "CutAfter",
    "Delay",
    "Drip",
    "Drop",
    "FakeAccelerator",
    "Fault",
    "FaultNotPermittedError",
    "FaultProxy",
    "FlipBit",
    "Link",
    "Namespace",
    "Refuse",
    "StallAfter",
    "TransportConformance",
    "assert_same",
    "exhausted_fds",
    "few_ports",
]

_FAULTS = "aiockpt.testing.faults"
_HOMES = {
    **dict.fromkeys(__all__, _FAULTS),
    **dict.fromkeys(
        ("FaultNotPermittedError", "Namespace", "few_ports"),
        "aiockpt.testing.namespaces",
    ),
    "FakeAccelerator": "aiockpt.testing.devices",
    "Link": "aiockpt.testing.link",
    "exhausted_fds": "aiockpt.testing.exhaustion",
    "TransportConformance": "aiockpt.testing.conformance",
    "assert_same": "aiockpt.testing.equality",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
