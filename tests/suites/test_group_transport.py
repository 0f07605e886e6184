"""PGTransport passes those parts of the public suite that hold for any transport.

Two ranks in one process do, on the host and on a device, and three in processes.

`Offers` and some of `Endings` do not: nothing stays offered after a send, and a call
that times out breaks the group. `behaviour/test_group_transport.py` has what holds
instead.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

from aiockpt.errors import PeerFailedError
from aiockpt.testing.conformance import Endings, RoundTrips, Templates
from tests.support import groups, lockstep
from tests.support.accelerators import FakeAccelerator, FakeBoard, device_transports
from tests.support.groups import Transport
from tests.support.proofs import proves

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiockpt.transport import Timeout

pytestmark = pytest.mark.usefixtures("no_blocking", "only_waits_left")
KEEPS = pytest.mark.allow_leaks(
    "fds"
)  # pytest keeps the log, whose frames keep the group


class Rendezvous(RoundTrips[Transport], Templates[Transport]):
    """Both ends call at the same time: a send goes out with each receive."""

    @KEEPS
    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """The caller's own error is logged."""
        await super().test_a_progress_that_raises_disturbs_nothing()

    def setup_method(self) -> None:
        """Start with nothing to send."""
        self._offers: dict[int, tuple[object, int]] = {}

    async def send(self, sender: Transport, state: object, *, step: int = 1) -> None:
        """Remember what the next receive is going to meet."""
        sender.metadata()  # raises once it is closed
        self._offers[id(sender)] = state, step

    async def receive(
        self,
        sender: Transport,
        receiver: Transport,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Send and receive; a receiver's own error counts, not what its peer says."""
        limit = self.timeout if timeout is None else timeout
        receive: Any = receiver.recv_checkpoint
        receiving = receive(0, sender.metadata(), step, limit, **options)
        if id(sender) not in self._offers:
            return await receiving
        state, offered = self._offers[id(sender)]
        sending = asyncio.create_task(
            sender.send_checkpoint([1], offered, state, self.timeout)
        )
        try:
            return await receiving
        finally:
            with suppress(PeerFailedError):
                await sending


@proves(
    "cell PGTransport.recv_checkpoint, into=: error",
    by="test_a_template_that_does_not_fit_is_untouched",
)
@proves(
    "cell PGTransport.recv_checkpoint, into=: success",
    "cell PGTransport.recv_checkpoint, into=, direct=True: success",
    by="test_a_template_is_filled",
)
@proves(
    "cell PGTransport.recv_checkpoint: success", by="test_what_arrives_is_independent"
)
@pytest.mark.asyncio
@pytest.mark.every_loop
class TestPGTransport(Rendezvous):
    """Two ranks in one process, over gloo."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make a group for every test."""
        async with groups.transports(count) as made:
            yield made

    test_a_senseless_timeout_is_refused = Endings.test_a_senseless_timeout_is_refused
    test_a_send_times_out_promptly = Endings.test_a_send_times_out_promptly
    test_shutdown_is_idempotent = Endings.test_shutdown_is_idempotent
    test_a_cancelled_shutdown_can_be_repeated = (
        Endings.test_a_cancelled_shutdown_can_be_repeated
    )


@pytest.mark.asyncio
class TestDevice(Rendezvous):
    """The same, with every tensor on a device whose memory the group moves."""

    @pytest.fixture(autouse=True)
    def _patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make a group for every test."""
        fakes = [FakeAccelerator(held=False) for _ in range(count)]
        boards = [FakeBoard(fake, all_its_own=True) for fake in fakes]
        async with device_transports(self._patch, *boards) as made:
            yield made


Outcome = dict[str, list[str]]
"""By a test's name: what went wrong in each of its cases, or nothing."""

SECONDS = 150


def in_step(directory: Path, count: int, but: str) -> list[Outcome]:
    """Run the suite in ``count`` processes; return what came of it in each of them.

    Tests with ``but`` in their names are left out.
    """
    support = Path(lockstep.__file__)
    # A process that is forked from one with torch has imported pytest's plugins, too.
    imported = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", imported, "-k", f"not {but}"]
    meeting = str(directory / "store")
    ranks = []
    for rank in range(count):
        place = os.pathsep.join([meeting, str(rank), str(count)])
        report = f"--junitxml={directory / str(rank)}"
        command = [sys.executable, "-m", "pytest", *options, report, str(support)]
        env = {**os.environ, lockstep.VARIABLE: place}
        with (directory / f"said {rank}").open("wb") as said:
            ranks.append(subprocess.Popen(command, env=env, stdout=said))
    until = time.monotonic() + SECONDS
    try:
        for process in ranks:
            process.wait(until - time.monotonic())
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [outcome(directory, rank) for rank in range(count)]


def outcome(directory: Path, rank: int) -> Outcome:
    """Read what one rank reports."""
    said = (directory / f"said {rank}").read_text()
    assert (directory / str(rank)).exists(), said
    found: Outcome = defaultdict(list)
    for case in ET.parse(directory / str(rank)).iter("testcase"):
        wrong = [f"rank {rank}: {each.text}" for each in case if each.tag != "skipped"]
        found[case.get("name", "").partition("[")[0]].append("\n".join(wrong))
    return found


@proves("cell PGTransport.send_checkpoint: success")
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "but", ["leaf", pytest.param("nothing", marks=pytest.mark.nightly)]
)
def test_the_suite_passes_between_three_processes(tmp_path: Path, but: str) -> None:
    """Each test passes in every rank; a third rank receives beside the second."""
    outcomes = in_step(tmp_path, 3, but)
    names = {name for name in dir(lockstep.TestInStep) if name.startswith("test_")}
    names = {name for name in names if but not in name}
    for ran in outcomes:
        assert not [wrong for cases in ran.values() for wrong in cases if wrong]
        assert ran.keys() == names
        assert {name: len(cases) for name, cases in ran.items()} == {
            name: len(cases) for name, cases in outcomes[0].items()
        }
