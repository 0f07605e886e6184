"""The port to the accelerator: the only module that names one.

A copy runs on a *side stream* that first waits for the caller's event, its *mark*. So
staging sees the results of all work that the caller has enqueued before the call, and
training continues meanwhile. Enqueueing returns at once; `completed` awaits the copies.

A stream is current for a thread, not for a task. As soon as a coroutine awaits
something, another task may make another stream the current one. So a public verb makes
its `Marks` before it awaits anything, and passes them down.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, cast

import torch

from aiockpt.errors import StagingError
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import leave_behind, start_daemon

logger = logging.getLogger(__name__)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scattered:
    """Small tensors of a device, whose bytes lie near each other in host memory.

    To begin a copy takes longer than the copy of a small tensor. So their bytes travel
    together, through one buffer on the device.

    Attributes:
        tensors: The tensors, as bytes.
        sizes: The size of each one, and of the gap behind it, in turn.
    """

    tensors: list[torch.Tensor]
    sizes: list[int]

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the part of each tensor in memory that has all of them."""
        return whole.split_with_sizes(self.sizes)[::2]

    def buffer(self, host: torch.Tensor) -> torch.Tensor:
        """Return as many bytes on the device; if it has none left, ``host`` itself.

        They belong to the current stream. So their memory may go to later work of the
        stream while the copy has not run yet.
        """
        with suppress(RuntimeError):  # of MPS, it is no `torch.OutOfMemoryError`
            return torch.empty_like(host, device=self.tensors[0].device)
        return host


Move: TypeAlias = tuple[torch.Tensor | Scattered, torch.Tensor | Scattered]
"""A destination and a source of a copy; at most one of them is scattered."""

_FIRST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 2e-3


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

    def copy(self, moves: Iterable[Move], *, after: Event) -> Event:
        """Enqueue ``destination, source`` copies behind ``after``; return their end.

        All tensors must live until the returned event has completed.
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

Fences: TypeAlias = Mapping[torch.device, Event]
"""An event of each device, which copies to or from the device wait for."""

_HOST: Final = torch.device("cpu")
_PORTABLE: Final = 1  # cudaHostRegisterPortable: page-locked for every device


class Accelerator:
    """A device that ``torch.accelerator`` knows: CUDA, ROCm, XPU and others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device)
        # Torch gives up the interpreter lock in each function. Threads that enqueue
        # small copies at once would wait for each other after every one of them.
        self._turn = threading.Lock()

    def fence(self) -> Event:
        """Mark the work enqueued so far on the current stream."""
        return self.marker()()

    def marker(self) -> Callable[[], Event]:
        """Return what marks the stream that is the current one now, at any time."""
        stream = self._module.current_stream(self.device)
        return cast("Callable[[], Event]", stream.record_event)

    def copy(self, moves: Iterable[Move], *, after: Event) -> Event:
        """Enqueue the copies on the side stream, behind the event."""
        with self._turn, self.aside(after):
            for each in moves:
                move(*each)
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
        """Page-lock an arena if the device is CUDA; return a function to undo it.

        The memory is then page-locked for all CUDA devices of this process.
        """
        if self.device.type != "cuda":
            return lambda: None
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = arena.address  # the undo function must not keep the arena alive
        # Registering what is mapped keeps huge pages and lets the arena be shared.
        with self._module.device(self.device):
            failed = int(runtime.cudaHostRegister(address, arena.nbytes, _PORTABLE))
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


def move(
    destination: torch.Tensor | Scattered,
    source: torch.Tensor | Scattered,
    *,
    non_blocking: bool = True,
) -> None:
    """Enqueue a copy on the current stream."""
    if isinstance(source, Scattered):
        assert isinstance(destination, torch.Tensor)
        buffer = source.buffer(destination).zero_()  # padding reads as zeros
        torch._foreach_copy_(source.split(buffer), source.tensors, non_blocking)
        source = buffer
    elif isinstance(destination, Scattered):
        buffer = destination.buffer(source)
        buffer.copy_(source, non_blocking=non_blocking)
        parts = destination.split(buffer)
        torch._foreach_copy_(destination.tensors, parts, non_blocking)
        return
    if destination is not source:
        destination.copy_(source, non_blocking=non_blocking)


class _PastEvent:
    """The end of work that has run already, or that the device orders by itself."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class OneQueue:
    """A device whose module has no streams (MPS): torch runs its work in one order.

    So nothing must be marked. A copy blocks its thread until it has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    def fence(self) -> Event:
        """Return an event that has completed, because later work runs later."""
        return _PastEvent()

    def copy(self, moves: Iterable[Move], *, after: Event) -> Event:
        """Copy, and block until the copies have ended."""
        del after
        for each in moves:
            move(*each, non_blocking=False)
        self.synchronize()
        return _PastEvent()

    def aside(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        del after
        return nullcontext()

    def mark(self) -> Event:
        """Block until the device is idle."""
        self.synchronize()
        return _PastEvent()

    def synchronize(self) -> None:
        """Block the calling thread until the device is idle."""
        self._module.synchronize()

    def pin(self, arena: Arena) -> Callable[[], None]:
        """Do nothing: a copy that blocks gains nothing from page-locked memory."""
        del arena
        return lambda: None


_ports: dict[torch.device, Accelerator | OneQueue] = {}


def port_for(device: torch.device) -> Port | None:
    """Return the port of a device; None for host memory, which needs none."""
    if device.type == "cpu":
        return None
    if device not in _ports:
        streams = hasattr(torch.get_device_module(device), "Stream")
        _ports[device] = (Accelerator if streams else OneQueue)(device)
    return _ports[device]


# --------------------------------------------------------------- the caller's work


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of the device work that the caller of a public verb has enqueued.

    Attributes:
        events: The mark of each device, on the stream that was current at the call.
    """

    events: Fences = field(default_factory=dict)
    _markers: Mapping[torch.device, Callable[[], Event]] = field(default_factory=dict)

    @classmethod
    def of(cls, ports: PortFor) -> Marks:
        """Mark the current streams of the calling thread, on every device in use.

        A public verb calls this before its first await. It never raises: if a device
        has failed, whatever waits for its mark raises the device's error.
        """
        events: dict[torch.device, Event] = {}
        markers: dict[torch.device, Callable[[], Event]] = {}
        for device in (_HOST, *_in_use()):  # the ports of a test may know the host
            if (port := ports(device)) is None:
                continue
            try:
                # A device with one queue has no streams to remember.
                marker = getattr(port, "marker", None)
                markers[device] = port.fence if marker is None else marker()
                events[device] = markers[device]()
            except Exception as error:  # noqa: BLE001 - see above
                events[device] = _Failed(error)
        return cls(events, markers)

    @classmethod
    def of_caller(cls, ports: PortFor) -> Marks:
        """Return the marks that the caller has made by `marked`, else make them here.

        A blocking proxy runs a verb in another thread, which has other current streams.
        """
        made = _marked.get()
        return cls.of(ports) if made is None else made

    def again(self) -> list[Event]:
        """Return the marks, and new ones of what the same streams got since the call.

        A template may be used while its new bytes are on their way.
        """
        well = (d for d, event in self.events.items() if not isinstance(event, _Failed))
        return [*self.events.values(), *(self._markers[device]() for device in well)]

    def wait(self) -> None:
        """Block until the marked work has run."""
        for event in self.events.values():
            event.synchronize()


_marked: ContextVar[Marks | None] = ContextVar("aiockpt_marks", default=None)


@contextmanager
def marked(ports: PortFor = port_for) -> Iterator[None]:
    """Mark the calling thread's streams for the verb that the body calls on a loop.

    The loop may belong to another thread: the verb's task gets the context variables.
    """
    token = _marked.set(Marks.of(ports))
    try:
        yield
    finally:
        _marked.reset(token)


class _Failed:
    """The mark of a device that has failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def query(self) -> bool:
        raise self._error

    def synchronize(self) -> None:
        self.query()


def checked(event: Event) -> Event:
    """Return an event that a stream can wait for.

    Raises:
        Exception: it is the mark of a device that has failed, with this error.
    """
    if isinstance(event, _Failed):
        event.query()
    return event


def _in_use() -> Iterator[torch.device]:
    """Yield the devices that this process has used.

    To mark another one would make a context on it, which takes hundreds of megabytes.
    """
    kind = _kind()
    if kind is None:
        return
    module: Any = torch.get_device_module(kind)
    # Nothing here may initialize a driver: a forked child could not use it any more.
    if not getattr(module, "is_initialized", lambda: True)():
        return
    known = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # noqa: SLF001 - torch has no public name
    for index in range(module.device_count()):
        if kind != "cuda" or known is None or known(index):
            yield torch.device(kind, index)


def _kind() -> str | None:
    """Return the type of this build's accelerator."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "cuda"
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: the thread's current one, if it has none."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def settle(ports: PortFor = port_for) -> None:
    """Block until the work on the calling thread's current streams has run.

    Call it before another thread, with other current streams, uses the tensors.

    Raises:
        Exception: a device has failed, with this error.
    """
    Marks.of(ports).wait()


async def completed(*events: Event) -> None:
    """Wait until events have completed, without blocking the loop or a core.

    This polls with growing pauses, because a CUDA event's ``synchronize`` spins a core
    by default and cannot be cancelled. If this is cancelled, the copies go on.
    """
    for event in events:
        pause = _FIRST_PAUSE_S
        while not event.query():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


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
