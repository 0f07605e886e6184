"""Receives of every kind, and what is left of one: the words of ``outcomes``."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt.memory.arena import Arena
from aiockpt.state.load_plan import EverythingNew
from aiockpt.transfer.destination import Destination
from tests.support.transports import Transport, weights

__all__ = [
    "COUNT",
    "FILLING",
    "MIB_LARGE",
    "MIB_SENT",
    "SHARING",
    "Gate",
    "arenas",
    "held_up",
    "left",
    "lends",
    "options_of",
    "there",
]

MIB_SENT = 4.0
MIB_LARGE = 24.0  # more than the buffers of one slow connection hold
COUNT = 16
_PARTS = {"select": [f"w{n}" for n in range(COUNT // 2, COUNT)]}
_HELD = [f"w{n}" for n in range(COUNT // 2)]

Places = tuple[tuple[Any, str], ...]
FILLING: Places = ((Destination, "_load"),)
"""Where a template is filled, which is one call in a thread."""
SHARING: Places = ((EverythingNew, "assemble"),)
"""Where a state dict is made, for which the memory is there by then."""


def options_of(call: str, mib: float = MIB_SENT) -> dict[str, Any]:
    """Return the options of a receive that are in the name of its row."""
    options: dict[str, Any] = {}
    if "into=" in call:
        options["into"] = weights(0.0, mib=mib, count=COUNT)
    if "direct=" in call:
        options["direct"] = True
    if "select=" in call:
        options |= _PARTS
    if "share=" in call:
        options["share"] = True
    if "have=" in call:
        options |= _having(options, mib)
    return options


def _having(options: dict[str, Any], mib: float) -> dict[str, Any]:
    """Return what says that half of what is sent is there, maybe in the template."""
    held = options.get("into", weights(0.0, mib=mib, count=COUNT))
    for name in _HELD:
        held[name].fill_(1.0)
    return {"have": "into" in options or held}


def lends(call: str) -> bool | None:
    """Return the ``same_host`` of the sender that a row is about."""
    return True if "share=" in call else None


def there(sender: Transport) -> str:
    """Say what is left at a sender that nobody reads from any more."""
    store: Any = sender._store
    spent = getattr(store.latest.servable.arena, "spent", False)
    lent = sender.statistics().lent > 0
    assert spent or not lent
    return "lent" if lent else "idle"


def arenas() -> int:
    """Return how many allocations for checkpoints there are."""
    gc.collect()
    return sum(isinstance(each, Arena) for each in gc.get_objects())


def left(options: dict[str, Any], before: int) -> str:
    """Say what is left of a receive that has not succeeded."""
    have = options.get("have")
    held = options.get("into") if have is True else have
    assert held is None or all(held[name].eq(1.0).all() for name in _HELD)
    if "into" not in options:
        assert held is None or not any(held[name].any() for name in _PARTS["select"])
        return "nothing" if arenas() <= before else "something"
    wanted = _PARTS["select"] if have else options.get("select", options["into"])
    filled = torch.cat([options["into"][name] for name in wanted])
    if not filled.any():
        return "untouched"
    return "filled" if filled.eq(1.0).all() else "torn"


class Gate:
    """Stops a thread of a receive, between its last byte and its template."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.go.wait(30)


def held_up(monkeypatch: pytest.MonkeyPatch, places: Places = FILLING) -> Gate:
    """Hold up the threads that come to one of these places."""
    gate = Gate()
    for owner, name in places:
        monkeypatch.setattr(owner, name, _after(gate, getattr(owner, name)))
    return gate


def _after(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    def wait_first(*args: Any) -> Any:
        gate()
        return function(*args)

    return wait_first
