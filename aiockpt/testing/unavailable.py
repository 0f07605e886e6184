"""The error of a fault tool on a machine that does not let it work."""

from __future__ import annotations

__all__ = ["FaultUnavailableError"]


class FaultUnavailableError(RuntimeError):
    """This machine does not permit a fault; ``fault`` is which, ``reason`` is why.

    It is no failure of what was to be tested: skip the test, and say the reason.
    """

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(fault, reason)
        self.fault = fault
        self.reason = reason

    def __str__(self) -> str:
        return f"no {self.fault} here: {self.reason}"
