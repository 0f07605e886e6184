"""What calls of a transport for torchft leave behind, where no other test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from aiockpt import StepNotFoundError
from aiockpt.errors import PeerFailedError, TransferTimeoutError
from aiockpt.testing import Drip, FaultProxy, assert_same
from aiockpt.torchft import HTTPTransport
from tests.support.commandline import beside, until
from tests.support.proofs import Cell, each_cell
from tests.support.torchft_job import stuck_reader
from tests.support.transports import arenas

Transport = HTTPTransport[Any]
Make = Callable[..., Transport]

PATIENCE = 20.0


def state(fill: float = 1.0, mib: int = 1) -> dict[str, Any]:
    """Return what is sent."""
    return {"weight": torch.full((mib << 18,), fill)}


@contextmanager
def interrupting(
    monkeypatch: pytest.MonkeyPatch, ready: Callable[[], Any]
) -> Iterator[None]:
    """Press Ctrl-C in this thread once it waits in a call, and ``ready()`` holds."""
    ours = threading.current_thread()

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            if threading.current_thread() is not ours:
                return function(*args)
            until(ready)
            raise KeyboardInterrupt

        return wait

    with monkeypatch.context() as patch:
        for owner, name in ((Future, "result"), (threading.Thread, "join")):
            patch.setattr(owner, name, interrupted(getattr(owner, name)))
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail("it was not interrupted")


def test_replicas_that_heal_together_serve_each_other(make: Make) -> None:
    """Each replica stops serving as soon as it is healed."""
    sent = {"weight": torch.arange(1 << 19)}
    source = make(chunk_bytes=1 << 16)
    healing = [make(swarm=True, same_host=False) for _ in range(3)]
    source.send_checkpoint([1, 2, 3], 1, sent, 10)
    port = urlsplit(source.metadata()).port or 0
    slow = Drip(400_000, burst=8192)
    with (
        beside(FaultProxy("127.0.0.1", port, otherwise=slow)) as proxy,
        ThreadPoolExecutor(3) as pool,
    ):
        url = source.metadata().replace(str(port), str(proxy.port))
        calls = [pool.submit(each.recv_checkpoint, 0, url, 1, 30) for each in healing]
        for call in calls:
            assert_same(call.result(PATIENCE), sent)
    assert sum(each.statistics().bytes_sent for each in healing) > 0
    assert source.statistics().bytes_sent < 2 * sent["weight"].nbytes
    assert not any(each.statistics().readers for each in healing)


@each_cell(
    "torchft.HTTPTransport.send_checkpoint: timeout",
    "torchft.HTTPTransport.send_checkpoint: cancel",
)
def test_a_send_that_does_not_succeed(
    cell: Cell, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the step is told; what was offered is received as before."""
    source, heir = make(), make()
    source.send_checkpoint([1], 1, state(), 10)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(heir.recv_checkpoint, 0, source.metadata(), 2, 30)
        until(lambda: source.statistics().waiting)
        if cell.ending == "timeout":
            with pytest.raises(TransferTimeoutError):
                source.send_checkpoint([1], 2, state(2.0), 0)
        else:
            _interrupt_a_send(source, monkeypatch)
        assert isinstance(call.exception(PATIENCE), PeerFailedError)
    assert_same(heir.recv_checkpoint(0, source.metadata(), 1, 10), state())
    assert cell.left == "old / told"


def _interrupt_a_send(source: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def describe(_: object) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        raise AssertionError("it is cancelled by then")

    stager: Any = source._transport._stager  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(stager, "_describe", describe)
        with interrupting(monkeypatch, begun.is_set):
            source.send_checkpoint([1], 2, state(2.0), 30)
        go.set()


@each_cell(
    "torchft.HTTPTransport.recv_checkpoint: error",
    "torchft.HTTPTransport.recv_checkpoint: timeout",
    "torchft.HTTPTransport.recv_checkpoint: cancel",
)
def test_a_receive_that_does_not_succeed(
    cell: Cell, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is kept, and the source offers as before."""
    source, heir = make(), make()
    source.send_checkpoint([1], 2, state(), 10)
    before = arenas()
    if cell.ending == "error":
        with pytest.raises(StepNotFoundError):
            heir.recv_checkpoint(0, source.metadata(), 1, 10)
    elif cell.ending == "timeout":
        with pytest.raises(TransferTimeoutError):
            heir.recv_checkpoint(0, source.metadata(), 3, 0.3)
    else:
        with interrupting(monkeypatch, lambda: source._http.statistics().waiting):
            heir.recv_checkpoint(0, source.metadata(), 3, 30)
    until(lambda: not source.statistics().waiting)
    assert arenas() <= before
    assert_same(heir.recv_checkpoint(0, source.metadata(), 2, 10), state())
    assert cell.left == "nothing / idle"


@each_cell("torchft.HTTPTransport.disallow_checkpoint: cancel")
def test_a_withdrawal_that_is_interrupted(
    cell: Cell, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of live memory has its grace, whoever waits for it."""
    source = make(grace=1.0, zero_copy=True)
    source.send_checkpoint([1], 1, state(mib=16), 10)
    with stuck_reader(source.metadata(), 1):
        until(lambda: source.statistics().readers)
        withdrawn: list[int] = []

        def ready() -> bool:
            now = source._transport.statistics()  # type: ignore[attr-defined]
            withdrawn[:] = [now.readers]
            return now.step is None

        with interrupting(monkeypatch, ready):
            source.disallow_checkpoint()
        assert withdrawn == [1]
        until(lambda: not source.statistics().readers)
    assert cell.left == "none / reads on"


@each_cell("torchft.HTTPTransport.shutdown: cancel")
def test_an_end_that_is_interrupted(
    cell: Cell, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes by itself, and the reader is evicted."""
    source = make(grace=0.3)
    source.send_checkpoint([1], 1, state(mib=16), 10)
    with stuck_reader(source.metadata(), 1) as stuck:
        until(lambda: source.statistics().readers)
        with interrupting(monkeypatch, lambda: True):
            source.shutdown()
        until(lambda: not source._facade._thread.is_alive())
        stuck.settimeout(PATIENCE)
        with suppress(ConnectionError):
            while stuck.recv(1 << 20):
                pass
    assert cell.left == "closing / evicted"
