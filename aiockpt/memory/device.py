"""The port to the accelerator: the only module that names one.

A copy runs on a *side stream* that first waits for the producer's event. So staging
sees the results of all work that training has enqueued so far, and training continues
meanwhile. Enqueueing returns at once; `completed` awaits the copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TypeAlias, cast

import torch

from aiockpt.errors import StagingError
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import leave_behind, start_daemon

__all__ = [
    "Accelerator",
    "Event",
    "Port",
    "PortFor",
    "completed",
    "keep_until",
    "numbered",
    "port_for",
    "settle",
]

logger = logging.getLogger(__name__)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_FIRST_POLL = 50e-6
_LAST_POLL = 2e-3


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Say whether everything before the mark has run."""

    def synchronize(self) -> None:
        """Block the calling thread until everything before the mark has run."""


class Port(Protocol):
    """The operations of one device that staging and loading need."""

    def fence(self) -> Event:
        """Mark the work enqueued so far on the calling thread's current stream."""

    def copy(self, pairs: Iterable[Pair], *, after: Event) -> Event:
        """Enqueue ``destination, source`` copies behind ``after``; return their end.

        Both tensors must live until the returned event has completed.
        """

    def aside(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Return a context in which this thread enqueues work on the side stream.

        With ``after``, this and all later work of that stream runs after the event.
        """

    def mark(self) -> Event:
        """Mark what the side stream has been given so far."""

    def synchronize(self) -> None:
        """Block the calling thread until the side stream is idle."""

    def pin(self, arena: Arena) -> Callable[[], None]:
        """Page-lock an arena if the device benefits; return a function to undo it."""


PortFor: TypeAlias = Callable[[torch.device], Port | None]


class Accelerator:
    """A device that ``torch.accelerator`` knows: CUDA, ROCm, XPU and others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device)

    def __repr__(self) -> str:
        return f"<Accelerator {self.device}>"

    def fence(self) -> Event:
        """Mark the work enqueued so far on the current stream."""
        stream = self._module.current_stream(self.device)
        return cast("Event", stream.record_event())

    def copy(self, pairs: Iterable[Pair], *, after: Event) -> Event:
        """Enqueue the copies on the side stream, behind the event."""
        with self.aside(after):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self.mark()

    @contextmanager
    def aside(self, after: Event | None = None) -> Iterator[None]:
        """Run the body with the side stream as the current one."""
        if after is not None:
            self._side.wait_event(after)
        with self._module.device(self.device), self._module.stream(self._side):
            yield

    def mark(self) -> Event:
        """Mark what the side stream has been given so far."""
        return cast("Event", self._side.record_event())

    def synchronize(self) -> None:
        """Block the calling thread until the side stream is idle."""
        self._side.synchronize()

    def pin(self, arena: Arena) -> Callable[[], None]:
        """Page-lock an arena if the device is CUDA; return a function to undo it."""
        if self.device.type != "cuda":
            return lambda: None
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = arena.address  # the undo function must not keep the arena alive
        # Registering what is mapped keeps huge pages and lets the arena be shared.
        with self._module.device(self.device):
            failed = int(runtime.cudaHostRegister(address, arena.nbytes, 0))
        if failed:
            self._forget_error()
            return lambda: None
        return lambda: runtime.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        # CUDA keeps the last error of a thread until it is asked for, and torch asks
        # after the next kernel's launch, which would fail for it. torch has no other
        # name for cudaGetLastError.
        with suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(0)


_ports: dict[torch.device, Accelerator] = {}


def port_for(device: torch.device) -> Port | None:
    """Return the port of a device; None for host memory, which needs none."""
    if device.type == "cpu":
        return None
    if device not in _ports:
        _ports[device] = Accelerator(device)
    return _ports[device]


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: the thread's current one, if it has none."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def settle() -> None:
    """Block until all work enqueued on the calling thread's current stream has run.

    Call it before another thread, with another current stream, uses the tensors.
    """
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


async def completed(*events: Event) -> None:
    """Wait until events have completed, without blocking the loop or a core.

    This polls with growing pauses, because a CUDA event's ``synchronize`` spins a core
    by default and cannot be cancelled. If this is cancelled, the copies go on.
    """
    for event in events:
        pause = _FIRST_POLL
        while not event.query():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)


def keep_until(drain: Callable[[], object]) -> None:
    """Run ``drain`` in a daemon thread, and keep its objects alive until it returns.

    A device may still copy from or to their memory, and ``drain`` waits for that. The
    interpreter's exit does not wait for the thread, unlike for a bridge's.
    """
    try:
        leave_behind(start_daemon("aiockpt-drain", _attempt, drain))
    except (RuntimeError, StagingError):  # no thread: blocking beats freed memory
        _attempt(drain)


def _attempt(drain: Callable[[], object]) -> None:
    try:
        drain()
    except Exception:
        logger.exception("waiting for a device failed")
