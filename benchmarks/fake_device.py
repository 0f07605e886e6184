"""What a process does where there is no accelerator: a fake one stands for it.

Host memory stands for the device's, and figures mean nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.memory import device as ports
from benchmarks.device import Device
from benchmarks.measures import Sample
from benchmarks.training import Training
from tests.support.accelerators import FakeAccelerator

if TYPE_CHECKING:
    import torch

__all__ = ["FakeDevice"]


class FakeDevice(Device):
    """Has every transport and checkpointer of this process use a fake accelerator."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._fake = vars(ports)["_fake"] = FakeAccelerator(held=False)
        # Modules have the function already, also as a default, so it gets another code.
        ports.port_for.__code__ = _port_for.__code__

    async def stage(self) -> Sample:
        """Send; raise if that did not pass the fake accelerator."""
        before = self._fake.copied
        found = await super().stage()
        if self._fake.copied == before:
            raise AssertionError("the fake accelerator has copied nothing")
        return found


def _port_for(device: torch.device) -> Any:
    return _fake.port_for(device)  # type: ignore[name-defined]  # noqa: F821 - see above
