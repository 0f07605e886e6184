"""Receives of every kind, and what is left of one: the words of ``outcomes``."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt.destination import InTemplate
from aiockpt.http.selecting import _Part
from aiockpt.memory import Arena
from transports import weights

__all__ = [
    "COUNT",
    "MIB_LARGE",
    "MIB_SENT",
    "Gate",
    "arenas",
    "held_up",
    "left",
    "options_of",
]

MIB_SENT = 4.0
MIB_LARGE = 24.0  # more than the buffers of one slow connection hold
COUNT = 16
_PARTS = {"select": [f"w{n}" for n in range(COUNT // 2, COUNT)]}


def options_of(call: str, mib: float = MIB_SENT) -> dict[str, Any]:
    """Return the options of a receive that are in the name of its row."""
    options: dict[str, Any] = {}
    if "into=" in call:
        options["into"] = weights(0.0, mib=mib, count=COUNT)
    if "direct=" in call:
        options["direct"] = True
    if "select=" in call:
        options |= _PARTS
    return options


def arenas() -> int:
    """Return how many allocations for checkpoints there are."""
    gc.collect()
    return sum(isinstance(each, Arena) for each in gc.get_objects())


def left(options: dict[str, Any], before: int) -> str:
    """Say what is left of a receive that has not succeeded."""
    if "into" not in options:
        return "nothing" if arenas() <= before else "something"
    wanted = options.get("select", options["into"])
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


def held_up(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Hold up the filling of templates, which is one call in a thread."""
    gate = Gate()
    for owner, name in ((InTemplate, "_load"), (_Part, "finish")):
        monkeypatch.setattr(owner, name, _after(gate, getattr(owner, name)))
    return gate


def _after(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    def wait_first(*args: Any) -> Any:
        gate()
        return function(*args)

    return wait_first
