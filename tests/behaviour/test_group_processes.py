"""Ranks in processes of their own: peers that die, stop, or come late."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from aiockpt.errors import ProcessGroupError, TransferTimeoutError
from aiockpt.testing import assert_same
from tests.support.groups import Transport, joined, store_in, summed
from tests.support.proofs import proves
from tests.support.ranks import MIB_SENT, ranks, transport
from tests.support.transports import MIB, weights

if TYPE_CHECKING:
    from pathlib import Path

    from aiockpt import Progress

# What a peer does comes to the loop by way of the threads that wait for it, which the
# other tests of this directory do on both loops. uvloop starts its own processes, which
# are no forks: see tests/support/forkserver.py.
pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_blocking", "only_waits_left"),
]

Call = Callable[[Transport], Coroutine[Any, Any, object]]


def large(fill: float) -> dict[str, Any]:
    """Return what a rank sends, or a template for it."""
    return weights(fill, mib=MIB_SENT, count=64)


async def receive(ours: Transport) -> object:
    """Receive from rank 1."""
    return await ours.recv_checkpoint(1, "", 1)


async def send(ours: Transport) -> None:
    """Send to it."""
    await ours.send_checkpoint([1], 1, weights())


@proves(
    "cell PGTransport.send_checkpoint: the other one dies",
    "cell PGTransport.recv_checkpoint: the other one dies",
    "cell PGTransport.shutdown: the other one dies",
    "cell torchft.PGTransport, every call: the other one dies",
)
@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "before"])
@pytest.mark.parametrize("call", [receive, send])
async def test_a_dead_peer_is_an_error_at_once(
    tmp_path: Path, call: Call, *, waiting: bool
) -> None:
    """It died before it sent, or received, anything; the deadline is far away."""
    async with ranks(tmp_path, "idle") as (group, (peer,)), transport(group) as ours:
        calling = asyncio.create_task(call(ours)) if waiting else None
        await asyncio.sleep(0.1)
        peer.kill()
        await peer.wait()
        with pytest.raises(ProcessGroupError, match="make a new group") as e:
            await (calling or call(ours))
        assert e.value.rank == 1
        for other in (receive, send):
            with pytest.raises(ProcessGroupError, match="make a new group"):
                await other(ours)


@proves(
    "cell PGTransport.send_checkpoint: this process dies",
    "cell PGTransport.recv_checkpoint, into=: the other one dies",
    "cell PGTransport.recv_checkpoint, into=, direct=True: the other one dies",
    "cell PGTransport.recv_checkpoint, into=, direct=True: timeout",
    "cell PGTransport.disallow_checkpoint: this process dies",
    "cell PGTransport.shutdown: this process dies",
    "cell torchft.PGTransport, every call: this process dies",
)
@pytest.mark.allow_leaks("threads", "fds")  # of the wait that its death did not end
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_struck_half_way(
    tmp_path: Path, number: signal.Signals, *, direct: bool
) -> None:
    """A template is untouched, or the error says that it is not.

    A death is noticed at once; the deadline ends the wait for a rank that stands still.
    """
    into, died = large(0.0), number == signal.SIGKILL
    async with ranks(tmp_path, "send") as (group, (peer,)), transport(group) as ours:

        def strike(progress: Progress) -> None:
            if progress.bytes_done > MIB_SENT * MIB / 10 and peer.returncode is None:
                peer.send_signal(number)

        options: Any = {"into": into, "direct": direct, "progress": strike}
        kind = ProcessGroupError if died else TransferTimeoutError
        with pytest.raises(kind, match="rank 1") as caught:
            await ours.recv_checkpoint(1, "", 1, 30 if died else 2, **options)
    words = "was modified" if direct else "was not modified"
    assert f"the template {words}" in caught.value.__notes__
    if not direct:
        assert_same(into, large(0.0))


@proves(
    "cell PGTransport.send_checkpoint: the other one dies",
    "cell PGTransport.recv_checkpoint: this process dies",
    "cell PGTransport.recv_checkpoint, into=: this process dies",
    "cell PGTransport.recv_checkpoint, into=, direct=True: this process dies",
)
@pytest.mark.allow_leaks("threads", "fds")  # of the wait that its death did not end
async def test_a_receiver_killed_half_way_disturbs_no_other(tmp_path: Path) -> None:
    """The other one gets all of it, and the error names the dead one, and soon."""
    async with (
        ranks(tmp_path, "die_half_way", "receive") as (group, (dying, _)),
        transport(group, chunk_bytes=MIB) as ours,
    ):
        sending = asyncio.create_task(ours.send_checkpoint([1, 2], 1, large(1.0)))
        assert await dying.wait() == -signal.SIGKILL
        with pytest.raises(ProcessGroupError) as caught:
            await sending
        assert caught.value.rank == 1
        # Its wait for the last word of the dead one may have failed, too.
        notes = getattr(caught.value, "__notes__", [])
        assert all("with rank 1 failed" in note for note in notes), "rank 2 has it"


@proves("cell PGTransport.send_checkpoint: timeout")
@pytest.mark.allow_leaks("threads", "fds")  # of the waits that nothing ends
@pytest.mark.parametrize("life", ["die_half_way", "stop_half_way"])
async def test_a_rank_that_waits_hears_of_another_ones_loss(
    tmp_path: Path, life: str
) -> None:
    """It waits for the sender, which sends nothing any more in this group."""
    async with (
        ranks(tmp_path, life, "witness") as (group, (_, witness)),
        transport(group, chunk_bytes=MIB) as ours,
    ):
        kind = ProcessGroupError if life == "die_half_way" else TransferTimeoutError
        with pytest.raises(kind, match="rank 1"):
            await ours.send_checkpoint([1], 1, large(1.0), 2)
        with pytest.raises(ProcessGroupError, match="make a new group"):
            await ours.send_checkpoint([1], 1, {})
        assert witness.stdout is not None
        async with asyncio.timeout(60):
            assert await witness.stdout.readline() == b"ProcessGroupError 0\n"


@proves("invariant 4")
@pytest.mark.allow_leaks("threads", "fds")  # the waiting one, which its deadline ends
@pytest.mark.parametrize("role", ["send", "receive"])
async def test_a_stopped_peer_ends_with_the_deadline(tmp_path: Path, role: str) -> None:
    """The loop has been running all the time, and the group is broken afterwards."""
    async with ranks(tmp_path, role) as (group, (peer,)), transport(group) as ours:
        peer.send_signal(signal.SIGSTOP)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        call = (
            ours.recv_checkpoint(1, "", 1, timeout=1)
            if role == "send"
            else ours.send_checkpoint([1], 1, weights(), timeout=1)
        )
        with pytest.raises(TransferTimeoutError, match="rank 1"):
            await call
        ticking.cancel()
        assert ticks > 2
        with pytest.raises(ProcessGroupError, match="make a new group"):
            await ours.send_checkpoint([1], 1, weights())


@pytest.mark.allow_leaks("threads", "fds")  # the waiting ones
async def test_a_broken_group_breaks_no_other(tmp_path: Path) -> None:
    """P17: the same ranks go on training, by the group that they train by."""
    async with ranks(tmp_path, "train") as (group, (peer,)), transport(group) as ours:
        training = await joined(store_in(str(tmp_path / "store of training"), 2), 0, 2)
        assert await summed(training, 10) == 11

        def give_up(_: Progress) -> None:
            receiving.cancel()

        receiving = asyncio.create_task(
            ours.recv_checkpoint(1, "", 1, progress=give_up)
        )
        await asyncio.wait({receiving})
        assert receiving.cancelled()
        assert "broken" in repr(ours)
        assert peer.stdout is not None
        assert b"broken" in await peer.stdout.readline()
        assert await summed(training, 20) == 21


@pytest.mark.usefixtures("fresh_interpreters")
async def test_the_interpreter_exits_beside_waiting_threads(tmp_path: Path) -> None:
    """Nobody joins them; one even comes back while the modules are torn down."""
    async with ranks(tmp_path, "leave_late") as (_, (peer,)):
        other = await joined(store_in(str(tmp_path / "store of training"), 2), 0, 2)
        assert peer.stdout is not None
        for _ in range(2):
            assert await peer.stdout.readline() == b"cancelled\n"
        async with asyncio.timeout(60):
            assert await peer.wait() == 0
        del other
