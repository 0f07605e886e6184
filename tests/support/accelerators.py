"""An accelerator that is not there: host memory stands for its memory.

The work of a `FakeAccelerator` waits until a test lets it run. A CPU tensor is a tensor
on the device::

    device = FakeAccelerator()
    stager = Stager(..., ports=device.port_for)
    staging = asyncio.create_task(stager.stage(state, step=1))
    device.run()  # what training and staging have enqueued, in the order of the streams
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from threading import Condition, local
from typing import Any, Final

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aiockpt.memory.arena import Arena
from aiockpt.memory.device import Event, Move, Port, Scattered, move
from aiockpt.pg.device import Device, DeviceMedium
from tests.support.groups import Transport, gloo_groups

_PATIENCE: Final = 30.0
_DEFAULT: Final = "default"

Work = Callable[[], bool]
"""Does its part of a stream and says True, or says that it cannot be done yet."""


class FakeEvent:
    """A mark in a stream; counts how often it was asked for."""

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._done = False
        self.queries = 0

    def query(self) -> bool:
        """Say whether everything before the mark has run."""
        self.queries += 1
        return self._done

    def synchronize(self) -> None:
        """Block the calling thread until then."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, _PATIENCE):
                raise TimeoutError("nobody let the device run")

    def reached(self) -> bool:
        """Complete it, as the work of a stream."""
        self._done = True
        return True

    def passed(self) -> bool:
        """Say whether another stream may go on behind it, as the work of a stream."""
        return self._done


class FakeAccelerator:
    """A device with streams of its callers and a side stream, all driven by the test.

    As in torch, each thread has a current stream: the default one until `stream` makes
    another one current, for all tasks of the thread.

    Like a real one it keeps no memory alive: a copy whose source or destination was
    freed before it ran is an error, raised where the test lets it run.

    Args:
        held: Whether work waits for :meth:`run`; else it runs as it is enqueued.
    """

    def __init__(self, *, held: bool = True) -> None:
        self.held = held
        self.copied = 0
        self.pinned: set[int] = set()
        self.events: list[FakeEvent] = []
        self._changed = Condition()
        self._streams: defaultdict[str, deque[Work]] = defaultdict(deque)
        self._current = local()
        self._side: deque[Work] = deque()

    def __repr__(self) -> str:
        waiting = {name: len(works) for name, works in self._streams.items()}
        return f"<FakeAccelerator streams={waiting} side={len(self._side)}>"

    @property
    def current(self) -> str:
        """The name of the calling thread's current stream."""
        return getattr(self._current, "name", _DEFAULT)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before, self._current.name = self.current, name
        try:
            yield
        finally:
            self._current.name = before

    def port_for(self, device: torch.device) -> Port | None:
        """Return itself, whatever the device is: what a ``PortFor`` does."""
        return self

    def produce(
        self, work: Callable[[], object], *, when: Callable[[], bool] = lambda: True
    ) -> None:
        """Enqueue what training does, on the current stream, which is busy until then.

        Other streams run meanwhile.
        """
        stream = self._streams[self.current]
        self._enqueue(stream, when, lambda: (work(), True)[1])

    def run(
        self,
        *,
        producer: bool = True,
        copies: int | None = None,
        only: str | None = None,
    ) -> int:
        """Run what is enqueued until it has to wait; return how much ran.

        Args:
            producer: Whether the callers' streams run, or only the side stream.
            copies: How many works of the side stream may run; None: all of them.
            only: The one stream of a caller that runs; None: all of them.
        """
        with self._changed:
            names = ([*self._streams] if only is None else [only]) if producer else []
            count = sum(_drain(self._streams[name], None) for name in names)
            count += _drain(self._side, copies)
            self._changed.notify_all()
        return count

    @property
    def idle(self) -> bool:
        """Whether the side stream has nothing to do."""
        return not self._side

    # What staging and loading ask of a device; called from any thread.

    def fence(self) -> Event:
        """Mark what the current stream has been given so far."""
        return self.marker()()

    def marker(self) -> Callable[[], Event]:
        """Return what marks the stream that is the current one now, at any time."""
        stream = self._streams[self.current]

        def mark() -> Event:
            event = self._event()
            self._enqueue(stream, event.reached)
            return event

        return mark

    def copy(self, moves: Iterable[Move], *, after: Event) -> Event:
        """Enqueue copies on the side stream, behind an event of this device."""
        assert isinstance(after, FakeEvent)
        done = self._event()
        works: list[Work] = [after.passed]
        works += [_Copy(self, *each) for each in moves]
        self._enqueue(self._side, *works, done.reached)
        return done

    @contextmanager
    def aside(self, after: Event | None = None) -> Iterator[None]:
        """Wait for the event and the side stream; then what the thread does is done."""
        if after is not None:
            after.synchronize()
        self.synchronize()
        yield

    def mark(self) -> Event:
        """Mark what the side stream has been given so far."""
        event = self._event()
        self._enqueue(self._side, event.reached)
        return event

    def synchronize(self) -> None:
        """Block the calling thread until the side stream is idle."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.idle, _PATIENCE):
                raise TimeoutError("nobody let the device run")

    def pin(self, arena: Arena) -> Callable[[], None]:
        """Remember the arena as pinned."""
        address = arena.address
        self.pinned.add(address)
        return lambda: self.pinned.discard(address)

    def _event(self) -> FakeEvent:
        event = FakeEvent(self._changed)
        self.events.append(event)
        return event

    def _enqueue(self, stream: deque[Work], *works: Work) -> None:
        with self._changed:
            stream.extend(works)
        if not self.held:
            self.run()


class _Copy:
    """A copy on its way, which owns nothing."""

    def __init__(
        self,
        device: FakeAccelerator,
        destination: torch.Tensor | Scattered,
        source: torch.Tensor | Scattered,
    ) -> None:
        self._device = device
        self._destination, self._source = _places(destination), _places(source)

    def __call__(self) -> bool:
        destination, source = self._destination(), self._source()
        with torch.no_grad():
            move(destination, source)
        single = [source] if isinstance(source, torch.Tensor) else source.tensors
        self._device.copied += sum(each.nbytes for each in single)
        return True


def _places(one: torch.Tensor | Scattered) -> Callable[[], torch.Tensor | Scattered]:
    if isinstance(one, torch.Tensor):
        return _Place(one).tensor
    places, sizes = [*map(_Place, one.tensors)], one.sizes
    return lambda: Scattered([each.tensor() for each in places], sizes)


class _Place:
    """Where a tensor lies, without keeping its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RuntimeError("a copy ran after its memory had been freed")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


def _drain(stream: deque[Work], most: int | None) -> int:
    count = 0
    while stream and (most is None or count < most) and stream[0]():
        stream.popleft()
        count += 1
    return count


CPU = torch.device("cpu")


class FakeBoard(Device):
    """A device whose tensors are those that were put there; or all but bytes.

    Bytes are the host's on real devices too: those of values and of generators.

    Attributes:
        allocated: Bytes that a transport has taken of it for good.
    """

    def __init__(self, fake: FakeAccelerator, *, all_its_own: bool = False) -> None:
        super().__init__(CPU, fake, fake)
        self.allocated = 0
        self._all_its_own = all_its_own
        self._storages: dict[int, torch.UntypedStorage] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor, and whatever shares its storage, is on the device."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # kept, so that no other gets it
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether it was put there, or allocated there."""
        if self._all_its_own:
            return tensor.dtype != torch.uint8
        return tensor.untyped_storage()._cdata in self._storages

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory, which is on the device."""
        self.allocated += nbytes
        return self.put(super().allocate(nbytes))


class DeviceOnly:
    """A group that refuses host memory, as NCCL does."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent

    def size(self) -> int:
        """Return how many ranks there are."""
        return int(self.parent.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Pass on memory of the device."""
        _refuse_host_memory(tensors)
        return self.parent.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Pass on memory of the device."""
        _refuse_host_memory(tensors)
        return self.parent.recv(tensors, rank, tag)


def _refuse_host_memory(tensors: list[torch.Tensor]) -> None:
    # Memory that torch has allocated stands for the device's, and that of Python's
    # objects is the host's. torch cannot resize the latter.
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            raise RuntimeError("the group of a device was given host memory")


@asynccontextmanager
async def device_transports(
    monkeypatch: pytest.MonkeyPatch, *boards: FakeBoard, **options: Any
) -> AsyncIterator[list[Transport]]:
    """Make a transport for each board, all in one new group that needs a device."""
    options = {"timeout": 20, "chunk_bytes": 64 << 10, **options}
    groups = [DeviceOnly(group) for group in await gloo_groups(len(boards))]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(made)
            for made in _made(monkeypatch, boards, groups, options)
        ]


def _made(
    monkeypatch: pytest.MonkeyPatch,
    boards: tuple[FakeBoard, ...],
    groups: list[Any],
    options: dict[str, Any],
) -> Iterator[Transport]:
    for board, group in zip(boards, groups, strict=True):

        def medium_of(_: object, *given: Any, board: Any = board, **more: Any) -> Any:
            return DeviceMedium(board, *given, **more)

        monkeypatch.setattr("aiockpt.pg.transport._medium_of", medium_of)
        yield Transport(group, **options)


def run_beside(device: FakeAccelerator, call: Any) -> Any:
    """Make a blocking call while a device works."""

    async def main() -> Any:
        working = asyncio.create_task(asyncio.to_thread(call))
        while not working.done():
            device.run()
            await asyncio.sleep(0.001)
        return await working

    return asyncio.run(main())
