"""Where a checkpoint goes whose bytes arrive on a device."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import torch

from aiockpt.format.manifest import Manifest
from aiockpt.memory.copies import Fences, once
from aiockpt.memory.device import Event
from aiockpt.pg.device.board import Board
from aiockpt.pg.device.segment import (
    Bounds,
    Homes,
    Segment,
    in_blocks,
    in_state,
    pairs,
)
from aiockpt.pg.device.staging import owned, without
from aiockpt.runtime.bridge import Bridge
from aiockpt.state.rebuild import Frame, check_meshes
from aiockpt.state.template import Match, Template
from aiockpt.transfer.destination import Destination, Fresh, InTemplate, Terms

__all__ = ["device_destination_of"]


def device_destination_of(
    manifest: Manifest,
    placement: Iterable[int],
    board: Board,
    template: Template | None,
    terms: Terms,
    bridge: Bridge,
) -> Destination:
    """Return where the checkpoint goes; for a thread.

    ``placement`` says which entries the sender has on its device. They go to this one,
    but where a template has them.
    """
    if template is None:
        check_meshes(Frame.of(manifest), limits=terms.limits)
        return _Fresh(manifest, placement, board, terms, bridge)
    match = template.match(manifest)
    return _InTemplate(manifest, placement, board, match, terms, bridge)


class _Fresh(Fresh):
    """Tensors of its own: on the device, where they are on the sender's."""

    def __init__(
        self,
        manifest: Manifest,
        placement: Iterable[int],
        board: Board,
        terms: Terms,
        bridge: Bridge,
    ) -> None:
        bounds = _bounds(manifest)
        homes = _blocks(board, bounds, placement, _viewed(manifest))
        super().__init__(manifest, terms, bridge, away=_bytes(homes, bounds))
        self._board = board
        self._segment = Segment(board.device, self.memory, bounds, homes)
        self.memory = self._segment

    def begin(self) -> None:
        self._segment.after = self._board.line.fence()

    async def prepare(self, start: int, stop: int) -> None:
        """Do nothing: what is for the host is copied there, not received."""


class _InTemplate(InTemplate):
    """The tensors of a template, of which some are on the device."""

    def __init__(
        self,
        manifest: Manifest,
        placement: Iterable[int],
        board: Board,
        match: Match,
        terms: Terms,
        bridge: Bridge,
    ) -> None:
        self._board, self._own = board, match.backings
        self._bounds = bounds = _bounds(manifest)
        own = owned(match.backings, board)
        there = in_state(match.backings, bounds, own) if terms.direct else {}
        self._copied = [entry for entry in own if entry not in there]
        # What is no tensor of the template is made anew, where the sender has it.
        values = [e for e in placement if not match.backings.tensors[e].numel()]
        viewed = _viewed(manifest) if match.fresh else set()
        made = _blocks(board, bounds, {*self._copied, *values}, viewed)
        self._homes = there | made
        away = _bytes(self._homes, bounds)
        others = replace(match, backings=without(match.backings, own))
        super().__init__(manifest, others, terms, bridge, away=away)
        self._segment = Segment(board.device, self.memory, bounds, self._homes)
        self.memory = self._segment

    def begin(self) -> None:
        super().begin()
        self._segment.after = self._board.line.fence()

    async def prepare(self, start: int, stop: int) -> None:
        """Do nothing: what is for the host is copied there, not received."""

    def _fences(self) -> Fences:
        return {**super()._fences(), self._board.device: self._board.port.fence()}

    def _load(self, fences: Fences) -> list[Event]:
        events = super()._load(fences)
        found = pairs(self._own, self._bounds, self._homes, self._copied)
        copies = (once(state, place) for place, state in found)
        events.append(self._board.port.copy(copies, after=fences[self._board.device]))
        return events

    def _drain(self) -> None:
        self._board.port.synchronize()
        super()._drain()


def _bounds(manifest: Manifest) -> Bounds:
    return manifest.entries.starts, manifest.entries.stops


def _viewed(manifest: Manifest) -> set[int]:
    """Return the entries that need storages of their own, because of views."""
    return {spec.storage for spec in manifest.views}


def _blocks(
    board: Board, bounds: Bounds, entries: Iterable[int], apart: Set[int]
) -> Homes:
    homes = in_blocks(bounds, entries, apart=apart, allocate=board.allocate)
    # What this thread's stream still does with memory that was freed comes first.
    with board.line.aside(board.line.fence()):
        return homes


def _bytes(homes: Homes, bounds: Bounds) -> dict[int, torch.Tensor]:
    return {
        entry: home.bytes(bounds[1][entry] - bounds[0][entry])
        for entry, home in homes.items()
    }
