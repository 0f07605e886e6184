"""torchft's contract over its process group, where it is not the same as over HTTP."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torchft.checkpointing.transport_test import TIMEOUT_REGEX
from torchft.process_group import ProcessGroupGloo

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    PeerFailedError,
    StagingError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from aiockpt.memory.device import Event
from aiockpt.state.flatten import ready_for_threads
from aiockpt.testing import assert_same
from aiockpt.torchft import PGTransport
from tests.support.accelerators import FakeAccelerator
from tests.support.groups import store_at
from tests.support.proofs import proves

pytestmark = pytest.mark.allow_leaks("fds", "threads")  # torchft's and gloo's

LIMIT = timedelta(seconds=10)
Make = Callable[..., PGTransport[Any]]


class Quorums:
    """The groups of two replicas, which are configured anew in each quorum."""

    def __init__(self) -> None:
        self.store = store_at()
        self.groups = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(2)]
        self.count = 0

    def next(self) -> None:
        """Configure both."""
        self.count += 1
        address = f"127.0.0.1:{self.store.port}/{self.count}"
        with ThreadPoolExecutor(2) as pool:
            works = [
                pool.submit(group.configure, address, f"replica {rank}", rank, 2)
                for rank, group in enumerate(self.groups)
            ]
            for work in works:
                work.result()

    def transports(self, **options: Any) -> list[PGTransport[Any]]:
        """Make a transport for each."""
        host = torch.device("cpu")
        return [PGTransport(group, LIMIT, host, **options) for group in self.groups]


@pytest.fixture
def quorums() -> Iterator[Quorums]:
    """Make two groups that are not configured yet."""
    made = Quorums()
    yield made
    for group in made.groups:
        group.shutdown()


def state(value: float = 1.0) -> dict[str, Any]:
    """Return something to send."""
    return {"weight": torch.full((1000,), value), "step": 3}


def exchange(
    source: PGTransport[Any], heir: PGTransport[Any], content: object, step: int = 1
) -> tuple[object, object]:
    """Send and receive at once; return what came of the send, and of the receive."""
    with ThreadPoolExecutor(2) as pool:
        got = pool.submit(
            heir.recv_checkpoint,
            src_rank=0,
            metadata=source.metadata(),
            step=1,
            timeout=LIMIT,
        )
        sent = pool.submit(
            source.send_checkpoint,
            dst_ranks=[1],
            step=step,
            state_dict=content,
            timeout=LIMIT,
        )
        return tuple(each.exception() or each.result() for each in (sent, got))  # type: ignore[return-value]


@proves(
    "cell torchft.PGTransport, every call: success",
    "cell torchft.PGTransport, every call: timeout",
)
def test_one_transport_for_all_quorums(quorums: Quorums) -> None:
    """Made before the first; a failure in one is forgotten in the next."""
    source, heir = quorums.transports()
    quorums.next()
    _, got = exchange(source, heir, state(1.0))
    assert_same(got, state(1.0))
    with pytest.raises(AiockptError) as caught:
        heir.recv_checkpoint(0, source.metadata(), 1, timedelta(milliseconds=300))
    assert re.match(TIMEOUT_REGEX, str(caught.value))
    quorums.next()
    _, got = exchange(source, heir, state(2.0))
    assert_same(got, state(2.0))
    source.shutdown()
    heir.shutdown()


@proves("cell torchft.PGTransport, every call: error")
def test_failures_are_told_and_leave_the_group_as_it_is(quorums: Quorums) -> None:
    """A leaf that cannot travel, and a step that nobody asked for."""
    source, heir = quorums.transports()
    quorums.next()
    sent, got = exchange(source, heir, {"bad": object()})
    assert isinstance(sent, UnsupportedLeafError)
    assert isinstance(got, PeerFailedError)
    sent, got = exchange(source, heir, state(), step=2)
    assert isinstance(sent, PeerFailedError)
    assert isinstance(got, StepNotFoundError)
    _, got = exchange(source, heir, state())
    assert_same(got, state())
    source.shutdown()
    heir.shutdown(wait=False)


def test_a_state_that_cannot_be_sent_to_an_heir_that_is_not_there(
    quorums: Quorums,
) -> None:
    """The source learns it at once, the heir when it comes; then the group works."""
    source, heir = quorums.transports()
    quorums.next()
    with pytest.raises(UnsupportedLeafError):
        source.send_checkpoint([1], 1, {"bad": object()}, LIMIT)
    with pytest.raises(PeerFailedError, match="UnsupportedLeafError"):
        heir.recv_checkpoint(0, source.metadata(), 1, LIMIT)
    with pytest.raises(UnsupportedLeafError):
        source.send_checkpoint([1], 1, {"bad": object()}, LIMIT)
    quorums.next()
    _, got = exchange(source, heir, state())
    assert_same(got, state())
    source.shutdown()
    heir.shutdown()


def test_the_own_rank_is_refused(quorums: Quorums) -> None:
    """A wrapper of torchft says 0 for every rank, the group inside it knows."""
    source, heir = quorums.transports()
    quorums.next()
    for rank, transport in enumerate((source, heir)):
        with pytest.raises(ValueError, match="is this process"):
            transport.send_checkpoint([rank], 1, state(), LIMIT)
    _, got = exchange(source, heir, state())
    assert_same(got, state())
    source.shutdown()
    heir.shutdown()


def test_a_template_is_asked_for_in_the_calling_thread_and_filled(
    quorums: Quorums,
) -> None:
    """The calling thread has the caller's streams and groups."""
    live, asked = state(0.0), []

    def template() -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        return live

    source, heir = quorums.transports(state_dict=template)
    quorums.next()
    exchange(source, heir, state(4.0))
    assert_same(live["weight"], state(4.0)["weight"])
    assert asked[0].startswith("ThreadPoolExecutor")
    source.shutdown()
    heir.shutdown()


def test_a_template_that_lacks_something_is_filled_each_time(quorums: Quorums) -> None:
    """An optimizer has no state before its first step: that is no reason to fail."""
    weight = torch.zeros(1000)
    source, heir = quorums.transports(state_dict=lambda: {"weight": weight})
    content = {**state(), "moments": {0: torch.ones(5)}}
    quorums.next()
    for _ in range(2):
        weight.zero_()
        sent, got = exchange(source, heir, content)
        assert sent is None
        assert_same(got, content)
        assert_same(weight, content["weight"])
    source.shutdown()
    heir.shutdown()


@proves("cell torchft.PGTransport, every call: error")
def test_a_template_that_raises_is_told(quorums: Quorums) -> None:
    """The sender does not wait for its deadline."""

    def template() -> dict[str, Any]:
        raise ZeroDivisionError("no template")

    source, heir = quorums.transports(state_dict=template)
    quorums.next()
    sent, got = exchange(source, heir, state())
    assert isinstance(got, ZeroDivisionError)
    assert isinstance(sent, PeerFailedError)
    source.shutdown()
    heir.shutdown()


def test_disallow_waits_for_a_send_and_no_longer(quorums: Quorums) -> None:
    """It waits for nobody when none is under way, and never raises."""
    source, heir = quorums.transports()
    quorums.next()
    source.disallow_checkpoint()
    exchange(source, heir, state())
    source.disallow_checkpoint()
    heir.shutdown()
    source.shutdown()
    source.disallow_checkpoint()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads
def test_a_forked_child_does_not_wait_for_its_parent_s_send(quorums: Quorums) -> None:
    """Nobody would tell it of the end."""
    source, heir = quorums.transports()
    quorums.next()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(source.send_checkpoint, [1], 1, state(), LIMIT)
        while source._idle.is_set():
            time.sleep(0.005)
        if (child := os.fork()) == 0:
            signal.alarm(3)  # the wait would be longer
            source.disallow_checkpoint()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        heir.recv_checkpoint(0, source.metadata(), 1, LIMIT)
        assert sent.result(20) is None
    source.shutdown()
    heir.shutdown()


def test_that_a_stream_has_failed_is_told(
    quorums: Quorums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was to compute can never be sent, and the receiver need not wait."""

    class Broken(FakeAccelerator):
        def marker(self) -> Callable[[], Event]:
            raise RuntimeError("an illegal memory access was encountered")

    source, heir = quorums.transports()
    quorums.next()
    ready = partial(ready_for_threads, ports=Broken().port_for)
    monkeypatch.setattr("aiockpt.torchft.group.ready_for_threads", ready)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(heir.recv_checkpoint, 0, source.metadata(), 1, LIMIT)
        with pytest.raises(StagingError, match="illegal memory access"):
            source.send_checkpoint([1], 1, state(), LIMIT)
        with pytest.raises(PeerFailedError, match="stream failed: an illegal"):
            got.result(5)
    source.shutdown()
    heir.shutdown()


def test_shutdown_ends_what_is_under_way(quorums: Quorums) -> None:
    """Running calls end at once, and the group stays the caller's."""
    source, heir = quorums.transports()
    quorums.next()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(heir.recv_checkpoint, 0, source.metadata(), 1, LIMIT)
        time.sleep(0.2)
        heir.shutdown(wait=False)
        assert isinstance(got.exception(30), ClosedError)
    source.shutdown()
