"""What is left of calls when a process is killed: at the end that lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import ProcessGroupError
from tests.support.deaths import at_the_receivers, at_the_senders
from tests.support.groups import Transport as GroupTransport
from tests.support.proofs import Cell, each_cell
from tests.support.ranks import ranks
from tests.support.transports import weights

# The kernel tells of a death, whatever the loop is.
LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """Kill one process for all cells of a test; it takes seconds to start."""
    return asyncio.run(_in_a_stack(request.param, tmp_path_factory.mktemp("dies")))


async def _in_a_stack(scenario: Any, path: Path) -> Mapping[str, str]:
    async with AsyncExitStack() as stack:
        result: Mapping[str, str] = await scenario(stack, path)
        return result


def killing(scenario: Any) -> Any:
    """Give a test what is found where a scenario's process was killed."""
    return pytest.mark.parametrize("found", [scenario], indirect=True, ids=["killed"])


@killing(at_the_receivers)
@each_cell(
    "HTTPTransport.start: this process dies",
    "HTTPTransport.send_checkpoint*: this process dies",
    "HTTPTransport.allow_checkpoint: this process dies",
    "HTTPTransport.disallow_checkpoint: this process dies",
    "HTTPTransport.shutdown: this process dies",
)
def test_a_sender_dies(cell: Cell, found: Mapping[str, str]) -> None:
    """The sender dies in its call, and each reader or waiter gets an error at once."""
    assert found[cell.call.removeprefix("HTTPTransport.")] == cell.left


@killing(at_the_receivers)
@each_cell(
    "HTTPTransport.recv_checkpoint*: the other one dies",
    "HTTPTransport.prepare: the other one dies",
)
def test_a_receive_outlives_its_sender(cell: Cell, found: Mapping[str, str]) -> None:
    """It ends, and says in a note what it has done to its template."""
    assert found[cell.call] == cell.left


@killing(at_the_senders)
@each_cell(
    "HTTPTransport.recv_checkpoint*: this process dies",
    "HTTPTransport.prepare: this process dies",
    "HTTPTransport.steps: this process dies",
    "HTTPTransport.follow: this process dies",
    "torchft.HTTPTransport.recv_checkpoint: this process dies",
)
def test_a_receiver_dies(cell: Cell, found: Mapping[str, str]) -> None:
    """The receiver dies in its call, and the sender has no reader any more."""
    assert found[cell.call.removeprefix("torchft.")] == cell.left


@pytest.mark.asyncio(loop_factories=[LOOP])
@each_cell("PGTransport.disallow_checkpoint: the other one dies")
async def test_a_withdrawal_ends(cell: Cell, tmp_path: Path) -> None:
    """It ends with the send, which the receiver's death has broken."""
    async with (
        ranks(tmp_path, "idle") as (group, (peer,)),
        GroupTransport(group, timeout=30) as ours,
    ):
        sending = asyncio.create_task(ours.send_checkpoint([1], 1, weights()))
        await asyncio.sleep(0.1)
        withdrawing = asyncio.create_task(ours.disallow_checkpoint())
        peer.kill()
        async with asyncio.timeout(20):
            await withdrawing
        with pytest.raises(ProcessGroupError):
            await sending
        assert "broken" in repr(ours)
    assert cell.left == "none, broken"
