"""HTTPTransport passes the public suites; users can run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

from aiockpt import BackgroundTransport, HTTPTransport, Server
from aiockpt.runtime.bridge import Bridge
from aiockpt.testing.conformance import (
    Endings,
    Offers,
    RoundTrips,
    Selections,
    Templates,
)
from tests.support.proofs import proves

Transport = HTTPTransport[Any]


class Plain:
    """Transports over loopback, in chunks small enough for many requests."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make each of them in the same way."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(made()) for _ in range(count)]


@proves(
    "cell HTTPTransport.recv_checkpoint, into=: success",
    "cell HTTPTransport.recv_checkpoint, into=, direct=True: success",
    by="test_a_template_is_filled",
)
@proves(
    "cell HTTPTransport.recv_checkpoint, select=, into=: success",
    by="test_a_template_is_filled_where_selected",
)
@proves(
    "cell HTTPTransport.recv_checkpoint, select=: success",
    by="test_what_is_selected_arrives",
)
@proves(
    "cell HTTPTransport.recv_checkpoint: success", by="test_what_arrives_is_independent"
)
@proves(
    "cell HTTPTransport.disallow_checkpoint: success",
    by="test_nothing_is_served_after_disallow",
)
@proves("invariant 9", by="test_the_state_may_change_after_the_send")
@proves(
    "cell HTTPTransport.send_checkpoint: success",
    by="test_a_new_step_takes_the_place_of_the_old",
)
@proves(
    "cell HTTPTransport.send_checkpoint: success",
    by="test_a_receive_that_comes_first_waits",
)
@pytest.mark.asyncio
class TestHTTPTransport(
    Plain,
    RoundTrips[Transport],
    Offers[Transport],
    Templates[Transport],
    Selections[Transport],
):
    """What arrives, and where, does not know the loop."""


@proves(
    "cell HTTPTransport.disallow_checkpoint: cancel",
    by="test_a_cancelled_disallow_can_be_repeated",
)
@proves("cell HTTPTransport.shutdown: success", by="test_shutdown_is_idempotent")
@proves("invariant 4", by="test_a_receive_times_out_promptly")
@pytest.mark.asyncio
@pytest.mark.every_loop
class TestEveryLoop(Plain, Endings[Transport]):
    """How calls end."""


@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): success",
    by="test_a_new_step_takes_the_place_of_the_old",
)
@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): success",
    by="test_a_receive_that_comes_first_waits",
)
@proves(
    "cell HTTPTransport.send_checkpoint, Server(process=True): the other one dies",
    by="test_a_receiver_that_leaves_disturbs_nobody",
)
@pytest.mark.asyncio
class TestServerProcess(Endings[Transport], Offers[Transport]):
    """What callers see of a server process is what they see of one on the loop."""

    # Of these, the sender sees nothing.
    test_a_receive_times_out_promptly: Any = None
    test_a_receive_without_time_does_not_look: Any = None
    test_a_senseless_timeout_is_refused: Any = None
    test_a_cancelled_wait_leaves_the_transport_usable: Any = None

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Serve apart from the first one, which is the sender."""
        async with AsyncExitStack() as stack:
            kinds = [True, *[False] * (count - 1)]
            yield [await stack.enter_async_context(made(process=p)) for p in kinds]


class Awaited:
    """A blocking transport as the suites need one: each call waits in a thread."""

    def __init__(self, transport: BackgroundTransport[Any], bridge: Bridge) -> None:
        self._transport, self._bridge = transport, bridge

    def metadata(self) -> str:
        """Return it without waiting, as every transport does."""
        return self._transport.metadata()

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._transport, name)
        return lambda *given, **more: self._bridge.run(partial(verb, *given, **more))


@pytest.mark.asyncio
class TestBackgroundTransport(Endings[Any], Offers[Any], Selections[Any]):
    """The proxy does what the transport does; a thread stands for each caller."""

    # A thread cannot be cancelled. What Ctrl-C does is seen in
    # tests/behaviour/test_background_transport.py.
    test_a_cancelled_receive_leaves_the_transport_usable: Any = None
    test_a_cancelled_wait_leaves_the_transport_usable: Any = None
    test_a_cancelled_send_leaves_something_whole: Any = None
    test_a_cancelled_disallow_can_be_repeated: Any = None
    test_a_cancelled_shutdown_can_be_repeated: Any = None

    test_what_is_selected_arrives: Any = None

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Any]]:
        """Make each of them with a thread of its own."""
        bridge = Bridge(threads=8, name="callers")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(bridge.aclose, timeout=5)
            found = []
            for _ in range(count):
                proxy = BackgroundTransport(made())
                await bridge.run(proxy.start)
                stack.push_async_callback(partial(bridge.run, proxy.shutdown))
                found.append(Awaited(proxy, bridge))
            yield found


def made(**server: Any) -> Transport:
    """Return a transport with nothing but the defaults that matter."""
    options = Server(host="127.0.0.1", **server)
    return HTTPTransport(chunk_bytes=64 << 10, server=options)


# What a user has who has neither numpy nor this project's settings of pytest.
CONFTEST = """
import sys
sys.modules["numpy"] = None  # from here on it cannot be imported
"""
MODULE = """
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import aiockpt
from aiockpt.testing import TransportConformance


@pytest.mark.asyncio
class TestMine(TransportConformance[aiockpt.HTTPTransport]):
    @asynccontextmanager
    async def transports(self, count):
        async with AsyncExitStack() as stack:
            local = aiockpt.Server(host="127.0.0.1")
            made = [aiockpt.HTTPTransport(server=local) for _ in range(count)]
            yield [await stack.enter_async_context(each) for each in made]
"""


def test_the_suite_runs_in_a_project_of_its_own(tmp_path: Path) -> None:
    """It runs with default chunks, without numpy, and with checked markers."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--strict-markers", "-k", "keys or progress"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
