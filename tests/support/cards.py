"""Devices for the tests of ``tests/cuda``: a CUDA device, and a stand-in with streams.

These tests also run by plain pytest, without conftest.py and without pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec

import pytest
import torch

from aiockpt.checkpointers import DefaultStager
from aiockpt.memory.arena import Arena
from aiockpt.memory.device import PortFor, port_for
from aiockpt.transfer.stager import Stager
from tests.support.accelerators import FakeAccelerator

P = ParamSpec("P")

_A_WHILE = 400_000_000
"""Cycles that a device is kept busy: some 200 ms."""


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function; no plugin is needed."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Card:
    """A real device.

    Attributes:
        many: How many small tensors a test makes.
        size: Numbers in the tensors that take a while to copy.
    """

    name = "cuda"
    many = 10_000
    size = 1 << 20

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.ports: PortFor = port_for

    def busy_then(self, work: Callable[[], object]) -> None:
        """Enqueue something slow on the current stream, and behind it ``work``."""
        torch.cuda._sleep(_A_WHILE)
        work()

    def stream(self) -> AbstractContextManager[object]:
        """Make a new stream the current one of this thread."""
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def graphed(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return what replays a graph of ``work``, which has run once."""
        side, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def is_locked(self, arena: Arena) -> bool:
        """Say whether memory is page-locked."""
        return torch.frombuffer(arena.buffer, dtype=torch.uint8).is_pinned()

    def finish(self) -> None:
        """Wait for all work, and make the default stream the current one."""
        torch.cuda.synchronize(self.device)
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))


class StandIn(Card):
    """Host memory that stands for a device's; a thread lets the device run."""

    name = "stand-in"
    many = 500
    size = 1 << 17  # eight chunks

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.fake = FakeAccelerator()
        self.ports = self.fake.port_for
        self._streams = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def busy_then(self, work: Callable[[], object]) -> None:
        over = time.monotonic() + 0.1
        self.fake.produce(work, when=lambda: time.monotonic() > over)

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._streams += 1
        with self.fake.stream(f"stream {self._streams}"):
            yield

    def graphed(self, work: Callable[[], object]) -> Callable[[], object]:
        self.fake.produce(work)
        return lambda: self.fake.produce(work)

    def is_locked(self, arena: Arena) -> bool:
        return arena.address in self.fake.pinned

    def finish(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self.fake.run()


@pytest.fixture(params=[Card, StandIn], ids=lambda kind: kind.name)
def card(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Card]:
    """Return a device, which all transports and checkpointers of the test use."""
    if request.param is Card and not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    made: Card = request.param()
    if isinstance(made, StandIn):
        for kind in (Stager, DefaultStager):
            defaults: Any = kind.__init__.__kwdefaults__
            monkeypatch.setitem(defaults, "ports", made.ports)
        for home in ("http_transport", "pg.transport"):
            monkeypatch.setattr(f"aiockpt.{home}.port_for", made.ports)
    # Another thread would mark the default stream.
    stream = made.stream() if isinstance(made, StandIn) else nullcontext()
    try:
        with stream:
            yield made
    finally:
        made.finish()
