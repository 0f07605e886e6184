"""Timeouts as newer versions of torchft have them: left out, None, or 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torchft.process_group import ProcessGroupGloo

import aiockpt
from aiockpt import StepNotFoundError
from aiockpt.testing import assert_same
from aiockpt.torchft import HTTPTransport, PGTransport, adapt
from tests.support.groups import store_at

Make = Callable[..., HTTPTransport[Any]]

STATE = {"weight": torch.arange(4.0), "step": 3}
SHORT = 0.2
LONG = timedelta(seconds=30)
LEFT_OUT: dict[str, Any] = {}
NONE = {"timeout": None}

default = pytest.mark.parametrize("given", [LEFT_OUT, NONE], ids=["left out", "None"])


@pytest.fixture
def groups() -> Iterator[list[ProcessGroupGloo]]:
    """Make two ranks of a group, whose own timeout is 20 seconds."""
    store = store_at()
    made = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        address = f"127.0.0.1:{store.port}/timeouts"
        works = [
            pool.submit(each.configure, address, f"replica {rank}", rank, 2)
            for rank, each in enumerate(made)
        ]
        for work in works:
            work.result()
    yield made
    for each in made:
        each.shutdown()


def over(group: ProcessGroupGloo, timeout: float) -> PGTransport[Any]:
    """Make a transport over a group."""
    return PGTransport(group, timedelta(seconds=timeout), torch.device("cpu"))


class TestGroup:
    """These timeouts hold over a process group."""

    pytestmark = pytest.mark.allow_leaks("fds", "threads")  # torchft's and gloo's

    @default
    @pytest.mark.parametrize("direction", ["send", "receive"])
    def test_the_constructor_s_holds(
        self, groups: list[ProcessGroupGloo], direction: str, given: dict[str, Any]
    ) -> None:
        """A peer that never comes is a RuntimeError, as in torch."""
        transport = over(groups[0], SHORT)
        call = {
            "send": partial(transport.send_checkpoint, [1], 1, STATE),
            "receive": partial(transport.recv_checkpoint, 1, "", 1),
        }[direction]
        with pytest.raises(RuntimeError, match=f"timed out after {SHORT} s"):
            call(**given)
        transport.shutdown()

    @default
    def test_a_transfer_without_one(
        self, groups: list[ProcessGroupGloo], given: dict[str, Any]
    ) -> None:
        """Both ends may leave it out."""
        source, heir = (over(each, 20) for each in groups)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(source.send_checkpoint, [1], 1, STATE, **given)
            assert_same(heir.recv_checkpoint(0, source.metadata(), 1, **given), STATE)
            sent.result(20)
        source.shutdown()
        heir.shutdown()

    def test_0_is_the_group_s_if_that_is_longer(
        self, groups: list[ProcessGroupGloo]
    ) -> None:
        """The class of torchft passes 0 on to gloo, too."""
        source, heir = (over(each, SHORT / 10) for each in groups)
        nothing = timedelta(0)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(source.send_checkpoint, [1], 1, STATE, nothing)
            time.sleep(SHORT)
            assert_same(heir.recv_checkpoint(0, "", 1, nothing), STATE)
            sent.result(20)
        source.shutdown()
        heir.shutdown()


class TestHTTP:
    """These timeouts hold over HTTP."""

    @default
    def test_the_constructor_s_holds(self, make: Make, given: dict[str, Any]) -> None:
        """A step that is never sent is an error at the deadline."""
        source, heir = make(), make(SHORT)
        with pytest.raises(RuntimeError, match=f"timed out after {SHORT} s"):
            heir.recv_checkpoint(0, source.metadata(), 1, **given)

    @default
    def test_a_transfer_without_one(self, make: Make, given: dict[str, Any]) -> None:
        """Both ends may leave it out."""
        source, heir = make(), make()
        source.send_checkpoint([1], 1, STATE, **given)
        assert_same(heir.recv_checkpoint(0, source.metadata(), 1, **given), STATE)

    def test_an_adapted_transport_has_one(self, make: Make) -> None:
        """It is given to `adapt`, which does not know that of the transport."""
        source = make()
        heir = adapt(
            aiockpt.HTTPTransport[Any](server=aiockpt.Server(host="127.0.0.1")),
            timeout=SHORT,
        )
        with pytest.raises(TimeoutError, match=f"timed out after {SHORT} s"):
            heir.recv_checkpoint(0, source.metadata(), 1)
        heir.shutdown()


def test_a_step_is_allowed_under_another_number(make: Make) -> None:
    """What was sent last is offered as another step, as with torchft's class."""
    source, heir = make(), make()
    source.send_checkpoint([1], 1, STATE, LONG)
    source.allow_checkpoint(1)
    source.allow_checkpoint(2)
    assert_same(heir.recv_checkpoint(0, source.metadata(), 2, LONG), STATE)
    with pytest.raises(StepNotFoundError):
        heir.recv_checkpoint(0, source.metadata(), 1, LONG)


def test_nothing_is_allowed_where_nothing_is_offered(make: Make) -> None:
    """Neither before a send nor after what was sent has been released."""
    source = make()
    with pytest.raises(StepNotFoundError):
        source.allow_checkpoint(1)
    source.send_checkpoint([1], 1, STATE, LONG)
    source.disallow_checkpoint()
    with pytest.raises(StepNotFoundError):
        source.allow_checkpoint(1)
