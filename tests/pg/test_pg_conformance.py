"""PGTransport passes those parts of the public suite that hold for any transport.

Two ranks in one process do, and ranks in two and three processes of their own.

`Offers` and some of `Endings` do not: nothing stays offered after a send, and a call
that times out breaks the group. What holds instead is in this directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

from aiockpt.testing.conformance import Endings
from tests.support import groups, lockstep
from tests.support.groups import Transport
from tests.support.proofs import proves
from tests.support.rendezvous import Rendezvous

pytestmark = pytest.mark.every_loop


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
@proves(
    "cell PGTransport.send_checkpoint: success",
    by="test_several_receivers_get_it_at_once",
)
@pytest.mark.asyncio
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

    @pytest.mark.allow_error_logs
    @pytest.mark.allow_leaks("fds")  # pytest keeps the log, whose frames keep the group
    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """Somebody else's bug is logged."""
        await super().test_a_progress_that_raises_disturbs_nothing()


Outcome = dict[str, list[str]]
"""By a test's name: what went wrong in each of its cases, or nothing."""

SECONDS = 150


def in_step(directory: Path, count: int, loop: str) -> list[Outcome]:
    """Run the suite in ``count`` processes; return what came of it in each of them."""
    support = Path(lockstep.__file__)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", loop]
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


@pytest.fixture(
    scope="module",
    params=[(2, "not uvloop"), (3, "uvloop" if find_spec("uvloop") else "asyncio")],
    ids=["2 ranks", "3 ranks"],
)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Outcome]:
    """Run the suite once for as many ranks, on either loop."""
    return in_step(tmp_path_factory.mktemp("ranks"), *request.param)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "name", [each for each in dir(lockstep.TestInStep) if each.startswith("test_")]
)
def test_a_promise_holds_between_processes(outcomes: list[Outcome], name: str) -> None:
    """In each of its cases, and in every rank; a third receives beside the second."""
    for ran in outcomes:
        wrong = [each for each in ran[name] if each]
        assert not wrong, "\n".join(wrong)
        assert ran[name], "never ran: an earlier one failed"
    assert len({len(ran[name]) for ran in outcomes}) == 1
