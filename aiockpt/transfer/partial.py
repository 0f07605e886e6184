"""A load by the template's keys, or of a selection, or onto a device.

The load has three steps. First it reads what values other than tensors are made of.
Then it walks the values beside the template, and finds out what is wanted, and where.
Then it reads that, and puts the rest in its place. A source is not named here: a
checkpointer reads files or a peer, and a transport its senders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiockpt.memory.device import PortFor
from aiockpt.runtime.system import collector_paused
from aiockpt.state.load_plan import LoadPlanner, ValueWalk
from aiockpt.state.nodes import decoders_for
from aiockpt.state.selection import Selection
from aiockpt.transfer.placement import PlannedPlacement
from aiockpt.transfer.segment import Segment

__all__ = ["PartialLoad", "state_over"]


class PartialLoad:
    """What is wanted of some data segments, and what comes of it.

    Args:
        segments: The data segments; several are shards of flat dicts.
        values: The state dict itself, where there are no segments.
        selection: What is wanted.
        template: What is filled; None: the result is new.
        device: Where tensors go that have no place in the template.
        ports: Finds the port of a device.

    Attributes:
        placements: Of each segment, once there is a plan.
        result: The state dict, once there is a plan; `finish` completes it.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        values: object | None = None,
        *,
        selection: Selection,
        template: object | None,
        device: torch.device | None,
        ports: PortFor,
    ) -> None:
        self.placements: Sequence[PlannedPlacement] = ()
        self.result: object = None
        self._segments, self._values = segments, values
        self._template, self._ports = template, ports
        self._planner = LoadPlanner(segments, device=device)
        self._walk = ValueWalk(selection, self._planner)

    def __repr__(self) -> str:
        return f"<PartialLoad {self._planner}>"

    @property
    def touched(self) -> bool:
        """Whether a template may have been modified."""
        return self._planner.touched

    @property
    def missing(self) -> Sequence[str]:
        """The keys of the template that the checkpoint lacks."""
        return self._walk.missing

    def unmet(self) -> list[str]:
        """Return what was wanted, and was not found or has no place in the template."""
        return self._walk.unmet()

    def plan(self) -> None:
        """Find out what is wanted; the bytes of values must be there.

        Raises:
            TemplateMismatchError: a value of the template is of another type, shape or
                dtype.
            UnsupportedLeafError: a tensor of the template is not dense.
        """
        with collector_paused():  # there may be 100,000 tensors
            found = state_over(self._segments, self._values, self._template)
            self.result = self._walk.plan(self._template, found)

    def place(self) -> Sequence[PlannedPlacement]:
        """Return where the bytes of each segment go.

        The copies to a device wait for what this thread has given it until now.
        """
        self.placements = [
            PlannedPlacement(segment, plan, self._ports)
            for segment, plan in zip(self._segments, self._planner.plans(), strict=True)
        ]
        return self.placements

    def begin(self) -> None:
        """Say that the template changes from now on."""
        self._planner.begin()

    def finish(self) -> object:
        """Put in its place what did not arrive there; return the state dict."""
        self._planner.finish()
        self._walk.finish()
        return self.result


def state_over(
    segments: Sequence[Segment], values: object | None, template: object = None
) -> object:
    """Return the state dict over the segments, which may not be filled yet.

    Named tuples and pytree nodes are of the template's types. Without segments it is
    ``values``.
    """
    if not segments:
        return values
    nodes = decoders_for(template)
    first, *others = (segment.assemble(nodes) for segment in segments)
    for other in others:  # shards of another tool's: flat dicts of tensors
        assert isinstance(first, dict)
        assert isinstance(other, dict)
        first.update(other)
    return first
