"""PGTransport: what it refuses, whom it tells, and when the group is broken."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from aiockpt import (
    IntegrityError,
    Limits,
    StepNotFoundError,
    TemplateMismatchError,
    TransferEvent,
)
from aiockpt.errors import (
    ClosedError,
    LimitExceededError,
    LocalProtocolError,
    PeerFailedError,
    ProcessGroupError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.events import add_hook
from aiockpt.pg.conversation import Frame, Kind
from aiockpt.testing import assert_same
from aiockpt.testing.conformance.transports import TURNS, cancelled_after, sample
from tests.support.groups import (
    Transport,
    both,
    flip_bits,
    gloo_groups,
    moved,
    transports,
)
from tests.support.proofs import proves
from tests.support.transports import weights

pytestmark = pytest.mark.asyncio

# Nothing ends a wait for gloo but its deadline, which such tests put soon.
LEFT = pytest.mark.allow_leaks("threads", "fds")
SOON = 0.3


@proves("cell PGTransport.recv_checkpoint: error")
async def test_another_step_is_refused_before_anything_moves() -> None:
    """P15: both ends hear of it, and the group is as good as before."""
    async with transports() as (sender, receiver):
        into = sample(2)
        sent, got = await both(sender, receiver, sample(), 7, wanted=5, into=into)
        assert isinstance(got, StepNotFoundError)
        assert (got.step, got.serving) == (5, 7)
        assert isinstance(sent, PeerFailedError)
        assert sent.rank == 1
        assert "step 5" in sent.reason
        assert_same(into, sample(2))
        assert_same(await moved(sender, receiver, sample()), sample())


@proves("cell PGTransport.send_checkpoint: error")
async def test_what_cannot_be_sent_is_told_at_once() -> None:
    """P2: the receivers do not wait for their deadlines."""
    bad = {"layers": [torch.ones(2), object()]}
    async with transports(3, timeout=20) as (sender, first, second):
        started = time.monotonic()
        receiving = [
            asyncio.create_task(each.recv_checkpoint(0, "", 1))
            for each in (first, second)
        ]
        with pytest.raises(UnsupportedLeafError) as caught:
            await sender.send_checkpoint([1, 2], 1, bad)
        assert caught.value.path == "layers[1]"
        for task in receiving:
            with pytest.raises(PeerFailedError, match=r"UnsupportedLeafError.*layers"):
                await task
        assert time.monotonic() - started < 10
        assert_same(await moved(sender, first, sample()), sample())


@proves("cell PGTransport.send_checkpoint: error")
async def test_a_template_that_does_not_fit_is_told() -> None:
    """The sender learns which tensor it was."""
    async with transports() as (sender, receiver):
        for bad in ({"w": torch.ones(3)}, {"w": object()}):
            sent, got = await both(sender, receiver, {"w": torch.ones(2)}, into=bad)
            assert isinstance(got, (TemplateMismatchError, UnsupportedLeafError))
            assert got.__notes__ == ["the template was not modified"]
            assert isinstance(sent, PeerFailedError)
            assert type(got).__name__ in sent.reason


@LEFT
async def test_a_template_that_does_not_fit_has_nobody_to_be_told() -> None:
    """What is raised is what is wrong with it, not that no sender came."""
    async with transports() as (_, receiver):
        with pytest.raises(UnsupportedLeafError) as caught:
            await receiver.recv_checkpoint(0, "", 1, SOON, into={"w": object()})
        assert caught.value.__notes__ == [
            "the sender could not be told in time",
            "the template was not modified",
        ]
        with pytest.raises(ProcessGroupError):
            await receiver.recv_checkpoint(0, "", 1)


@proves("cell PGTransport.recv_checkpoint: error")
@pytest.mark.parametrize(
    "limits", [Limits(max_header_bytes=64), Limits(max_bytes=10)], ids=["header", "all"]
)
async def test_limits_hold_before_anything_is_allocated(limits: Limits) -> None:
    """A sender cannot make a receiver take more than that."""
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending) as sender,
        Transport(receiving, limits=limits) as ours,
    ):
        sent, got = await both(sender, ours, weights())
        assert isinstance(got, LimitExceededError)
        assert isinstance(sent, PeerFailedError)


async def test_an_empty_state_and_nobody_to_send_it_to() -> None:
    """Neither is an error."""
    async with transports() as (sender, receiver):
        assert await moved(sender, receiver, {}) == {}
        await sender.send_checkpoint([], 1, sample())


@proves(
    "cell PGTransport.recv_checkpoint, into=: error",
    "cell PGTransport.recv_checkpoint, into=, direct=True: error",
)
@proves("invariant 1")
async def test_a_flipped_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: the template is untouched, both ends hear of it, and the group goes on."""
    async with transports() as (sender, receiver):
        flip_bits(monkeypatch)
        into = weights(2.0)
        sent, got = await both(sender, receiver, weights(), into=into)
        assert isinstance(got, IntegrityError)
        assert isinstance(sent, PeerFailedError)
        assert_same(into, weights(2.0))
        sent, got = await both(sender, receiver, weights(), into=into, direct=True)
        assert isinstance(got, IntegrityError)
        assert got.__notes__ == ["the template was modified"]
        monkeypatch.undo()
        assert_same(await moved(sender, receiver, weights()), weights())


async def test_both_directions_at_once() -> None:
    """Two ranks may send to each other in one breath, and again behind that."""
    async with transports() as (left, right):
        calls = [
            *(left.send_checkpoint([1], step, sample(step)) for step in (1, 2)),
            *(right.send_checkpoint([0], step, sample(-step)) for step in (1, 2)),
            *(right.recv_checkpoint(0, "", step) for step in (1, 2)),
            *(left.recv_checkpoint(1, "", step) for step in (1, 2)),
        ]
        got = await asyncio.gather(*calls)
        for state, seed in zip(got[4:], (1, 2, -1, -2), strict=True):
            assert_same(state, sample(seed))


async def test_the_state_dict_of_the_constructor_is_filled() -> None:
    """As with torchft; ``into`` comes before it."""
    sending, receiving = await gloo_groups(2)
    ours, other = weights(0.0), weights(0.0)
    async with (
        Transport(sending) as sender,
        Transport(receiving, 20, torch.device("cpu"), lambda: ours) as receiver,
    ):
        got = await moved(sender, receiver, weights(1.0))
        assert got["w0"] is ours["w0"]
        assert_same(ours, weights(1.0))
        got = await moved(sender, receiver, weights(2.0), into=other)
        assert got["w0"] is other["w0"]
        assert_same(ours, weights(1.0))


def raises() -> dict[str, Any]:
    """Fail as a caller's own code does."""
    raise KeyError("not trained yet")


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (raises, KeyError),
        (lambda: {"w0": object()}, UnsupportedLeafError),
    ],
    ids=["raises", "is none"],
)
async def test_a_state_dict_that_fails_is_told(own: Any, kind: type[Exception]) -> None:
    """The sender does not wait, and the next receive may have another template."""
    sending, receiving = await gloo_groups(2)
    async with (
        Transport(sending, timeout=20) as sender,
        Transport(receiving, 20, torch.device("cpu"), own) as receiver,
    ):
        started = time.monotonic()
        sent, got = await both(sender, receiver, weights())
        assert time.monotonic() - started < 10
        assert type(got) is kind
        assert isinstance(sent, PeerFailedError)
        assert kind.__name__ in sent.reason
        into = weights(0.0)
        assert_same(await moved(sender, receiver, weights(), into=into), into)


async def test_who_is_no_rank_is_refused() -> None:
    """At once, and with its number."""
    async with transports() as (transport, _):
        for rank in (2, -1):
            with pytest.raises(ValueError, match=f"^{rank} is no rank"):
                await transport.send_checkpoint([rank], 1, {})
            with pytest.raises(ValueError, match=f"^{rank} is no rank"):
                await transport.recv_checkpoint(rank, "", 1)
        with pytest.raises(ValueError, match="twice"):
            await transport.send_checkpoint([1, 1], 1, {})


async def test_the_metadata_of_an_http_transport_is_refused() -> None:
    """Rather than waited for."""
    async with transports() as (_, receiver):
        with pytest.raises(LocalProtocolError, match="HTTPTransport"):
            await receiver.recv_checkpoint(0, "http://127.0.0.1:1/", 1)


@proves("cell PGTransport.send_checkpoint: timeout")
@LEFT
async def test_a_deadline_breaks_the_group() -> None:
    """Whatever is called afterwards says so, and what to do."""
    async with transports() as (sender, _):
        with pytest.raises(TransferTimeoutError, match=r"timed out .* rank 1"):
            await sender.send_checkpoint([1], 1, sample(), 4 * SOON)
        assert repr(sender) == "<PGTransport ranks=2 broken>"
        for call in (
            sender.send_checkpoint([1], 1, sample()),
            sender.recv_checkpoint(1, "", 1),
        ):
            with pytest.raises(ProcessGroupError, match="make a new group") as caught:
                await call
            assert caught.value.rank == 1


@proves("cell PGTransport.send_checkpoint: timeout")
@LEFT
async def test_what_had_no_time_breaks_nothing() -> None:
    """A deadline that has passed before, or while it was staged, moved nothing."""
    async with transports() as (sender, receiver):
        with pytest.raises(TransferTimeoutError):
            await sender.send_checkpoint([1], 1, sample(), 0)
        with pytest.raises(TransferTimeoutError):
            await receiver.recv_checkpoint(0, "", 1, 0)
        assert_same(await moved(sender, receiver, sample()), sample())


@proves("cell PGTransport.send_checkpoint: cancel")
@LEFT
@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_a_cancel_anywhere_ends_both_ends_at_once(who: str) -> None:
    """P18: either nothing happened, or both know that the group is broken."""
    for turns in TURNS:
        async with transports(timeout=10) as (sender, receiver):
            send = sender.send_checkpoint([1], 1, sample())
            receive = receiver.recv_checkpoint(0, "", 1)
            cut, other = (send, receive) if who == "sender" else (receive, send)
            staying = asyncio.create_task(other)
            started = time.monotonic()
            await cancelled_after(turns, cut)
            await asyncio.sleep(0.05)
            if "broken" not in repr(sender if who == "sender" else receiver):
                staying.cancel()  # it waits for what has not begun, or has ended
            await asyncio.wait({staying})
            assert time.monotonic() - started < 5
            assert staying.cancelled() or isinstance(
                staying.exception(), (ProcessGroupError, type(None))
            )


@LEFT
async def test_who_is_waited_for_is_told_of_a_cancel() -> None:
    """It does not wait for its deadline either."""
    async with transports(timeout=20) as (sender, receiver):
        receiving = asyncio.create_task(receiver.recv_checkpoint(0, "", 1))
        await asyncio.sleep(0.1)
        receiving.cancel()
        await asyncio.wait({receiving})
        with pytest.raises(ProcessGroupError, match="gave up: it was cut short"):
            await sender.send_checkpoint([1], 1, sample())


@proves("cell PGTransport.shutdown: success")
@LEFT
async def test_shutdown_ends_calls_at_once() -> None:
    """A call under way does not keep it waiting."""
    async with transports() as (sender, _):
        waiting = [
            asyncio.create_task(sender.send_checkpoint([1], 1, sample(), 2)),
            asyncio.create_task(sender.recv_checkpoint(1, "", 1, 2)),
        ]
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await sender.shutdown()
        assert time.monotonic() - started < 1.5
        for task in waiting:
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            sender.metadata()


@proves("invariant 6")
@LEFT
async def test_the_threads_left_behind_end_with_the_deadline() -> None:
    """They are all that stays of a broken transport."""
    before = set(threading.enumerate())
    async with transports() as (sender, _):
        with pytest.raises(TransferTimeoutError):
            await sender.send_checkpoint([1], 1, sample(), SOON)
    async with asyncio.timeout(2):
        for thread in set(threading.enumerate()) - before:
            assert thread.daemon
            while thread.is_alive():  # noqa: ASYNC110 - joining it would block
                await asyncio.sleep(0.01)


@proves("cell PGTransport.disallow_checkpoint: success")
async def test_disallow_waits_for_a_send_that_is_under_way() -> None:
    """Once it returns, no byte of the state dict is read."""
    async with transports() as (sender, receiver):
        await sender.disallow_checkpoint()
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, sample()))
        await asyncio.sleep(0.05)
        disallowing = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.05)
        assert not disallowing.done()
        await receiver.recv_checkpoint(0, "", 1)
        await disallowing
        await sending


async def test_events_name_the_ranks() -> None:
    """One on either side, with bytes and seconds."""
    seen: list[TransferEvent] = []
    remove = add_hook(seen.append)
    async with transports() as (sender, receiver):
        await moved(sender, receiver, sample())
    remove()
    peers = {event.stop: event.peer for event in seen}
    assert peers == {"serve": "ranks 1", "recv": "rank 0"}
    assert all(event.nbytes and event.seconds for event in seen)


@LEFT
@pytest.mark.parametrize(
    "said",
    [b"\x00" * 1024, bytes(Frame(Kind.DONE, 1).encode())],
    ids=["no frame", "no offer"],
)
async def test_a_peer_that_talks_nonsense_is_no_peer(said: bytes) -> None:
    """Nobody knows what would come next, so the group is broken."""
    from aiockpt.pg.messages import _FORWARD

    theirs, ours = await gloo_groups(2)
    async with Transport(ours, timeout=2) as receiver:
        frame = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        work = theirs.send([frame], 1, _FORWARD)  # gloo forgets what nobody keeps
        with pytest.raises(RemoteProtocolError):
            await receiver.recv_checkpoint(0, "", 1)
        with pytest.raises(ProcessGroupError):
            await receiver.recv_checkpoint(0, "", 1)
    del work
