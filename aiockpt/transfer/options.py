"""The options of one receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from aiockpt.events import Progress
from aiockpt.format.limits import Limits
from aiockpt.memory.arena import ArenaPool
from aiockpt.memory.device import Marks, PortFor, port_for
from aiockpt.state.selection import Select


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """The options of one receive, made once by the public verb.

    The deadline is not one of them, because it belongs to the whole call.

    Attributes:
        limits: The largest sizes and counts that are accepted; a checkpoint beyond them
            raises `LimitExceededError`.
        allow_pickle: Whether to unpickle leaves that have no other encoding. If not,
            such a leaf raises `UnsupportedLeafError`.
        into: A state dict to fill; None: return new tensors. A state dict that does not
            fit raises `TemplateMismatchError`.
        template: Returns a state dict, which is filled as far as the checkpoint fits
            it. Called on the loop if there is no ``into``; its errors are the caller's.
        direct: Whether chunks go into the tensors of ``into`` before all of them are
            verified. A receive that fails may then have modified it.
        hold: Whether to return a `Prepared`, which fills ``into`` later.
        have: A state dict that may hold some of the bytes already; it may be ``into``.
            A leaf that no checkpoint can hold raises `UnsupportedLeafError`.
        select: The paths to receive; None: all of them.
        keys: Whether to receive only the keys of ``into``, which may have more or fewer
            keys than the checkpoint.
        strict: Whether a path of ``select`` or ``keys`` that the checkpoint lacks
            raises `MissingKeysError`. Otherwise the result names it.
        device: The device for tensors that ``into`` lacks; None: host memory.
        progress: Called on the loop as bytes arrive.
        ports: Returns the port of a device; tests pass a fake one.
        marks: The caller's device work. Nothing is copied to or from a device before
            that work has run.
        warm: A pool of memory to reuse; None: the memory is allocated and freed.
        ahead: Whether to map all pages before their bytes arrive. Gloo needs this,
            because it has a single thread.
    """

    limits: Limits
    allow_pickle: bool
    into: object | None = None
    template: Callable[[], object] | None = None
    direct: bool = False
    hold: bool = False
    have: object | None = None
    select: Select | None = None
    keys: bool = False
    strict: bool = True
    device: torch.device | None = None
    progress: Callable[[Progress], None] | None = None
    ports: PortFor = port_for
    marks: Marks = Marks()  # noqa: RUF009 - frozen
    warm: ArenaPool | None = None
    ahead: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the whole checkpoint is received, without ``keys`` or ``device``."""
        return self.select is None and self.device is None and not self.keys
