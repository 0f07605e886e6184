"""PGTransport: what it refuses, whom it tells, and when the group is broken."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt import (
    IntegrityError,
    Limits,
    Progress,
    StepNotFoundError,
    TemplateMismatchError,
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
from aiockpt.testing import assert_same
from tests.support.groups import (
    Transport,
    Watched,
    Wrapped,
    both,
    flipped,
    gloo_groups,
    moved,
    of_data,
    transports,
)
from tests.support.proofs import proves
from tests.support.servers import settle
from tests.support.transports import told, weights

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking", "only_waits_left"),
]

# Nothing ends a wait for gloo but its deadline, which such tests put soon.
LEFT = pytest.mark.allow_leaks("threads", "fds")
SOON = 0.3
PROMPT = 20.0  # less than the deadline
MESSAGE_BYTES = 16 << 20
BAD: dict[str, Any] = {"layers": [torch.ones(2), object()]}


@asynccontextmanager
async def watched(
    count: int = 2,
) -> AsyncIterator[tuple[list[Watched], list[Transport]]]:
    """Make transports, and the groups that tell whether a call has begun."""
    groups = [*map(Watched, await gloo_groups(count))]
    async with transports(groups=groups) as made:
        yield groups, made


class Bomb:
    """An object whose pickle would do something when it is loaded."""

    def __reduce__(self) -> Any:
        return (print, ("executed",))


def raises() -> dict[str, Any]:
    """Fail as a caller's own code does."""
    raise KeyError("not trained yet")


async def test_a_senseless_call_is_refused_at_once() -> None:
    """Nothing is said to the other rank, which another call still finds."""
    async with transports() as (sender, receiver):
        for step in ("5", 5.0, None):
            with pytest.raises(TypeError):
                await sender.send_checkpoint([1], step, {})  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await receiver.recv_checkpoint(0, "", step)  # type: ignore[arg-type]
        for rank in (0, 2, -1):
            own = f"^rank {rank} is {'this process' if rank == 0 else 'not in'}"
            with pytest.raises(ValueError, match=own):
                await sender.send_checkpoint([rank], 1, {})
            with pytest.raises(ValueError, match=own):
                await sender.recv_checkpoint(rank, "", 1)
        with pytest.raises(ValueError, match="twice"):
            await sender.send_checkpoint([1, 1], 1, {})
        for metadata, select in (("http://[::1]:1/", None), ("", ["w0"])):
            with pytest.raises(LocalProtocolError, match="HTTPTransport"):
                await receiver.recv_checkpoint(0, metadata, 1, select=select)
        assert_same(await moved(sender, receiver, weights()), weights())


@pytest.mark.parametrize("timeout", [float("inf"), 1e18])
async def test_what_is_unusual_is_no_error(timeout: float) -> None:
    """Steps like integers, an endless deadline, nothing to send, no receiver."""
    async with transports(timeout=timeout) as (sender, receiver):
        for step in (True, torch.tensor(10**12)):
            assert await moved(sender, receiver, {}, step) == {}  # type: ignore[arg-type]
        await sender.send_checkpoint([], 1, weights())


DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "another step": ({"wanted": 5}, StepNotFoundError),
    "misfit": ({"into": {"w0": torch.ones(3)}}, TemplateMismatchError),
    "incomplete": ({"into": {}}, TemplateMismatchError),
    "template": ({"into": {"w0": object()}}, TemplateMismatchError),
    "meta": ({"into": {"w0": torch.ones(4, device="meta")}}, UnsupportedLeafError),
    "header": ({"limits": Limits(max_header_bytes=64)}, LimitExceededError),
    "bytes": ({"limits": Limits(max_bytes=10)}, LimitExceededError),
    "own raises": ({"state_dict": raises}, KeyError),
    "own is deep": ({"state_dict": lambda: {"w0": DEEP}}, LimitExceededError),
}


@proves(
    "cell PGTransport.send_checkpoint: error",
    "cell PGTransport.recv_checkpoint: error",
    "cell PGTransport.recv_checkpoint, into=: error",
)
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_is_told_before_anything_moves(case: str) -> None:
    """The sender learns why, does not wait, and the group is as good as before."""
    given, kind = REFUSED[case]
    call = {key: value for key, value in given.items() if key in ("wanted", "into")}
    made = {key: value for key, value in given.items() if key not in call}
    groups = await gloo_groups(2)
    groups[0] = counted = Watched(groups[0])
    async with transports(groups=groups, receiver=made) as (first, second):
        async with asyncio.timeout(PROMPT):
            sent, got = await both(first, second, weights(), 7, **call)
        assert type(got) is kind
        assert isinstance(sent, PeerFailedError)
        assert sent.rank == 1
        assert kind.__name__ in sent.reason or "step 5" in sent.reason
        if isinstance(got, StepNotFoundError):
            assert (got.step, got.serving) == (5, 7)
            assert len(counted.messages) == 2  # the offer and the last word
        if "into" in call:
            assert got.__notes__ == ["the template was not modified"]
        assert sum(counted.messages) < 8 << 10, "no byte of the data segment"
        if not made:
            assert_same(await moved(first, second, weights()), weights())
        elif "state_dict" in made:
            into = weights(0.0)
            assert_same(await moved(first, second, weights(), into=into), into)


@LEFT
async def test_a_refusal_that_nobody_hears_is_raised_all_the_same() -> None:
    """What is raised is what is wrong with the template, not that no sender came."""
    async with transports() as (_, receiver):
        into: dict[str, Any] = {"w": torch.ones(1)}
        into["into"] = into  # nothing fits into what has no end
        with pytest.raises(LimitExceededError) as caught:
            await receiver.recv_checkpoint(0, "", 1, SOON, into=into)
        assert caught.value.__notes__ == [
            "the sender could not be told in time",
            "the template was not modified",
        ]
        with pytest.raises(ProcessGroupError):
            await receiver.recv_checkpoint(0, "", 1)


async def refused(sender: Transport, ranks: list[int], step: int = 1) -> None:
    """Send what cannot be sent: the error is that of the state, and comes at once."""
    async with asyncio.timeout(PROMPT):
        with pytest.raises(UnsupportedLeafError) as caught:
            await sender.send_checkpoint(ranks, step, BAD)
    assert caught.value.path == "layers[1]"
    assert "broken" not in repr(sender)


@proves("cell PGTransport.send_checkpoint: error")
async def test_a_state_that_cannot_be_sent_is_told() -> None:
    """Receivers that wait are told, and those that come later."""
    async with transports(3) as (sender, waiting, late):
        receiving = asyncio.create_task(waiting.recv_checkpoint(0, "", 5))
        await asyncio.sleep(0.05)
        await refused(sender, [1, 2], 5)
        gc.collect()
        async with asyncio.timeout(PROMPT):
            for call in (receiving, late.recv_checkpoint(0, "", 4)):
                with pytest.raises(
                    PeerFailedError, match=r"UnsupportedLeaf.*layers"
                ) as e:
                    await call
                assert e.value.rank == 0
        for step in range(6, 30):  # a receiver of a later step does not hear of these
            await refused(sender, [1, 2], step)
        _, *got = await asyncio.gather(
            sender.send_checkpoint([1, 2], 30, weights()),
            *(each.recv_checkpoint(0, "", 30) for each in (waiting, late)),
        )
        assert_same(got, [weights(), weights()])


async def test_the_word_of_a_transport_outlives_it() -> None:
    """A refusal stays in the group, where another transport delivers it."""
    groups = await gloo_groups(2)
    async with Transport(groups[0]) as sender:
        await refused(sender, [1])
    del sender
    gc.collect()
    async with transports(groups=groups) as (sender, receiver):
        with pytest.raises(PeerFailedError, match="layers"):
            await receiver.recv_checkpoint(0, "", 1)
        assert_same(await moved(sender, receiver, weights()), weights())


@LEFT
async def test_the_wait_for_a_turn_ends_with_the_deadline() -> None:
    """The error is that of the state, which nobody could be told."""
    async with watched() as (groups, (sender, _)):
        waiting = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        await settle(lambda: groups[0].posted)
        with pytest.raises(UnsupportedLeafError) as caught:
            await sender.send_checkpoint([1], 2, BAD, SOON)
        assert "could not be told" in "".join(caught.value.__notes__)
        waiting.cancel()
        await asyncio.wait({waiting})


@proves("invariant 2")
async def test_nothing_is_executed(capsys: pytest.CaptureFixture) -> None:
    """An object that only a pickle could carry is refused, by the receiver at last."""
    for allowed in (False, True):
        options: Any = {"allow_pickle": allowed, "receiver": {"allow_pickle": False}}
        async with transports(**options) as (sender, receiver):
            sent, got = await both(sender, receiver, {"x": Bomb()})
            assert isinstance(got, RemoteProtocolError if allowed else PeerFailedError)
            assert isinstance(
                sent, PeerFailedError if allowed else UnsupportedLeafError
            )
            assert_same(await moved(sender, receiver, weights()), weights())
        assert "executed" not in capsys.readouterr().out


@proves(
    "cell PGTransport.recv_checkpoint, into=: error",
    "cell PGTransport.recv_checkpoint, into=, direct=True: error",
    "invariant 1",
)
async def test_a_flipped_bit_is_noticed() -> None:
    """The template is untouched, both ends hear of it, and the group goes on."""
    ours, theirs = await gloo_groups(2)
    group = Watched(ours, flipped)
    async with transports(groups=[group, theirs]) as (sender, receiver):
        into = weights(2.0)
        sent, got = await both(sender, receiver, weights(), into=into)
        assert isinstance(got, IntegrityError)
        assert isinstance(sent, PeerFailedError)
        assert_same(into, weights(2.0))
        _, got = await both(sender, receiver, weights(), into=into, direct=True)
        assert isinstance(got, IntegrityError)
        assert got.__notes__ == ["the template was modified"]
        group.watch = None
        assert_same(await moved(sender, receiver, weights()), weights())


async def test_a_state_that_changes_between_two_messages_is_noticed() -> None:
    """Each message matches its digest, but they are not of one step."""
    state = {name: torch.zeros(MESSAGE_BYTES // 4) for name in "abc"}
    left: list[int] = []

    @of_data
    def change(message: torch.Tensor) -> None:
        left.append(message.nbytes)
        if len(left) == 2:
            state["c"].add_(1)

    ours, theirs = await gloo_groups(2)
    groups = [Watched(ours, change), theirs]
    async with transports(groups=groups) as (sender, receiver):
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        sent, got = await both(sender, receiver, state, into=into)
        assert isinstance(got, IntegrityError)
        assert isinstance(sent, PeerFailedError)
        assert not any(tensor.any() for tensor in into.values())
        assert_same(await moved(sender, receiver, state), state)


async def test_values_cost_what_they_must() -> None:
    """A view travels without its storage, a tie once, and small tensors together."""
    storage, weight = torch.zeros(4 << 20), torch.zeros(1 << 18)
    views = {f"v{n}": storage[n * 1000 : n * 1000 + 10] for n in range(16)}
    tied = {"a": weight, "b": weight, "c": weight[7:]}
    small = {f"t{n}": torch.full((1024,), float(n)) for n in range(2000)}
    for state, nbytes, count in (
        (views, 64 << 10, 10),
        (tied, weight.nbytes + (64 << 10), 10),
        (small, 16 << 20, 30),
    ):
        ours, theirs = await gloo_groups(2)
        counted = Watched(ours)
        async with transports(groups=[counted, theirs]) as (sender, receiver):
            assert_same(await moved(sender, receiver, state), state)
        assert sum(counted.messages) < nbytes
        assert len(counted.messages) < count


async def test_a_large_tensor_is_sent_from_its_memory_and_verified_meanwhile() -> None:
    """A chunk is verified before the last of a few messages is sent."""
    seen, deadline = threading.Event(), 20.0
    left: list[int] = []
    told: list[bool] = []

    @of_data
    def hold_the_last_one(message: torch.Tensor) -> None:
        left.append(message.data_ptr())
        if len(left) == 4:
            told.append(seen.wait(deadline))

    def on_progress(progress: Progress) -> None:
        if progress.chunks_done:
            seen.set()

    state = {"w": torch.ones(4 * MESSAGE_BYTES, dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    options: dict[str, Any] = {"timeout": 3 * deadline, "chunk_bytes": MESSAGE_BYTES}
    ours, theirs = await gloo_groups(2)
    options["groups"] = [Watched(ours, hold_the_last_one), theirs]
    async with transports(**options) as (sender, receiver):
        await moved(
            sender, receiver, state, into=into, direct=True, progress=on_progress
        )
    assert told == [True]
    assert left[0] == state["w"].data_ptr()
    assert torch.equal(into["w"], state["w"])


async def test_both_directions_at_once() -> None:
    """Two ranks may send to each other at the same time, and again behind that."""
    async with transports() as (left, right):
        calls = [
            *(left.send_checkpoint([1], step, weights(step)) for step in (1, 2)),
            *(right.send_checkpoint([0], step, weights(-step)) for step in (1, 2)),
            *(right.recv_checkpoint(0, "", step) for step in (1, 2)),
            *(left.recv_checkpoint(1, "", step) for step in (1, 2)),
        ]
        got = await asyncio.gather(*calls)
        for state, seed in zip(got[4:], (1, 2, -1, -2), strict=True):
            assert_same(state, weights(seed))


async def test_a_late_receiver_holds_up_no_other() -> None:
    """The other receiver gets this step and later ones meanwhile."""
    async with transports(3) as (sender, first, second):
        sends = [
            asyncio.create_task(sender.send_checkpoint(ranks, step, weights(step)))
            for step, ranks in ((1, [2, 1]), (2, [1]), (3, [1, 2]))
        ]
        for step in (1, 2, 3):
            assert_same(await first.recv_checkpoint(0, "", step), weights(step))
        await sends[1]
        assert not sends[0].done()
        assert not sends[2].done()
        for step in (1, 3):
            assert_same(await second.recv_checkpoint(0, "", step), weights(step))
        await asyncio.gather(*sends)


async def test_receives_from_one_rank_keep_the_order_of_their_calls() -> None:
    """The first template may take longer to describe than the second."""
    state = {f"w{n}": torch.full((4,), float(n)) for n in range(3000)}
    into = {name: torch.zeros(4) for name in state}
    async with transports() as (sender, receiver):
        _, _, first, second = await asyncio.gather(
            sender.send_checkpoint([1], 1, state),
            sender.send_checkpoint([1], 2, state),
            receiver.recv_checkpoint(0, "", 1, into=into),
            receiver.recv_checkpoint(0, "", 2),
        )
    assert_same(first, state)
    assert_same(second, state)


@proves("cell PGTransport.send_checkpoint: timeout", "fault 36")
@LEFT
async def test_a_deadline_breaks_the_group_unless_nothing_has_moved() -> None:
    """Each later call says so, and what to do."""
    async with transports(timeout=SOON) as (sender, receiver):
        with pytest.raises(TransferTimeoutError):
            await sender.send_checkpoint([1], 1, weights(), 0)
        with pytest.raises(TransferTimeoutError):
            await receiver.recv_checkpoint(0, "", 1, 0)
        assert repr(sender) == "<PGTransport ranks=2>"
        async with asyncio.timeout(
            PROMPT
        ):  # the constructor's, where a call gives none
            with pytest.raises(TransferTimeoutError, match=r"timed out .* rank 1"):
                await sender.send_checkpoint([1], 1, weights())
        assert repr(sender) == "<PGTransport ranks=2 broken>"
        for call in (
            sender.send_checkpoint([1], 1, weights()),
            sender.recv_checkpoint(1, "", 1),
        ):
            with pytest.raises(ProcessGroupError, match="make a new group") as caught:
                await call
            assert caught.value.rank == 1


@LEFT
async def test_a_deadline_is_for_all_waits_together() -> None:
    """A sender that is slow at every message does not stretch it."""
    go = threading.Event()

    @of_data
    def slow(_: torch.Tensor) -> None:
        go.wait(0.25)

    state = {f"w{n}": torch.zeros(1 << 18) for n in range(120)}  # thirty seconds
    ours, theirs = await gloo_groups(2)
    async with transports(groups=[Watched(ours, slow), theirs]) as (sender, receiver):
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, state))
        async with asyncio.timeout(PROMPT):
            with pytest.raises(TransferTimeoutError):
                await receiver.recv_checkpoint(0, "", 1, 0.6)
        go.set()
        with pytest.raises(ProcessGroupError):
            await sending  # it is told, and does not wait for its own


@LEFT
@pytest.mark.parametrize("broken", ["sender", "receiver"])
@pytest.mark.parametrize("first", ["well", "broken"])
async def test_a_pair_is_told_that_another_rank_was_lost(
    broken: str, first: str
) -> None:
    """Both ends of a connection that works hear at once; neither waits in vain."""
    async with watched(3) as (groups, (sender, receiver, _)):

        async def send() -> None:
            await sender.send_checkpoint([1], 1, weights())

        async def receive() -> None:
            await receiver.recv_checkpoint(0, "", 1)

        if broken == "sender":
            lost, fails, waits = sender.send_checkpoint([2], 1, {}), send, receive
        else:
            lost, fails, waits = receiver.recv_checkpoint(2, "", 1), receive, send
        cut = asyncio.ensure_future(lost)
        await settle(lambda: groups[0].posted or groups[1].posted)
        cut.cancel()
        await asyncio.wait({cut})
        async with asyncio.timeout(PROMPT):
            waiting = asyncio.create_task(waits() if first == "well" else fails())
            await asyncio.sleep(0.1)
            with pytest.raises(ProcessGroupError):
                await (fails() if first == "well" else waits())
            with pytest.raises(ProcessGroupError):
                await waiting
            with pytest.raises(ProcessGroupError, match=r"gave up: .* was cut short"):
                await waits()


@LEFT
@pytest.mark.parametrize("broken", ["sender", "receiver"])
async def test_a_pair_is_told_though_the_broken_end_makes_no_call(broken: str) -> None:
    """It may have left for a new group by then; the other end waits already."""
    async with watched(4) as (groups, (sender, receiver, *_)):
        if broken == "sender":
            lost = sender.send_checkpoint([2], 1, {})
            waits: Any = receiver.recv_checkpoint(0, "", 1)
        else:
            lost = receiver.recv_checkpoint(2, "", 1)
            waits = sender.send_checkpoint([1], 1, weights())
        waiting, cut = asyncio.ensure_future(waits), asyncio.ensure_future(lost)
        await settle(lambda: groups[0].posted and groups[1].posted)
        cut.cancel()
        async with asyncio.timeout(PROMPT):
            with pytest.raises(ProcessGroupError, match=r"gave up: .* was cut short"):
                await waiting


@LEFT
async def test_a_conversation_ends_well_beside_one_that_breaks_the_group() -> None:
    """It was under way; the peer is told after its end, before it begins another."""
    async with watched(3) as (groups, (sender, receiver, _)):
        receiving = asyncio.create_task(receiver.recv_checkpoint(0, "", 1))
        cut = asyncio.ensure_future(receiver.recv_checkpoint(2, "", 1))
        await settle(lambda: groups[1].posted >= 2)
        cut.cancel()
        await asyncio.wait({cut})
        async with asyncio.timeout(PROMPT):
            await sender.send_checkpoint([1], 1, weights())
            assert_same(await receiving, weights())
            with pytest.raises(ProcessGroupError, match=r"gave up: .* was cut short"):
                await sender.send_checkpoint([1], 2, weights())


@LEFT
async def test_a_cancel_while_a_sender_is_refused_gives_the_turn_back() -> None:
    """The receive that waits for it hears at once that the group is broken."""
    sparse = {"w": torch.ones(4).to_sparse()}
    async with watched() as (groups, (_, receiver)):
        refusing = asyncio.create_task(receiver.recv_checkpoint(0, "", 1, into=sparse))
        waiting = asyncio.create_task(receiver.recv_checkpoint(0, "", 2))
        await settle(lambda: groups[1].posted)  # it waits to tell the sender
        refusing.cancel()
        with pytest.raises(asyncio.CancelledError) as kept:  # with all of its frames
            await refusing
        async with asyncio.timeout(PROMPT):
            with pytest.raises(ProcessGroupError):
                await waiting
    del kept


@proves("cell PGTransport.shutdown: success")
@LEFT
async def test_shutdown_ends_calls_at_once() -> None:
    """A call under way does not keep it waiting."""
    async with watched() as (groups, (sender, _)):
        waiting = [
            asyncio.create_task(sender.send_checkpoint([1], 1, weights())),
            asyncio.create_task(sender.recv_checkpoint(1, "", 1)),
        ]
        await settle(lambda: groups[0].posted >= 2)
        async with asyncio.timeout(PROMPT):
            await sender.shutdown()
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
            await sender.send_checkpoint([1], 1, weights(), SOON)
    left = set(threading.enumerate()) - before
    assert all(thread.daemon for thread in left)
    await settle(lambda: not any(thread.is_alive() for thread in left))


@proves("cell PGTransport.disallow_checkpoint: success")
async def test_disallow_waits_for_a_send_that_is_under_way() -> None:
    """Once it returns, no byte of the state dict is read."""
    async with transports() as (sender, receiver):
        await sender.disallow_checkpoint()
        sending = asyncio.create_task(sender.send_checkpoint([1], 1, weights()))
        await asyncio.sleep(0.05)
        disallowing = asyncio.create_task(sender.disallow_checkpoint())
        await asyncio.sleep(0.05)
        assert not disallowing.done()
        await receiver.recv_checkpoint(0, "", 1)
        await disallowing
        await sending


async def test_events_have_the_ranks() -> None:
    """There is one at either end, with bytes and seconds."""
    async with told() as seen, transports() as (sender, receiver):
        await moved(sender, receiver, weights())
    peers = {event.stop: event.peer for event in seen}
    assert peers == {"serve": "ranks 1", "recv": "rank 0"}
    assert all(event.nbytes and event.seconds for event in seen)


@LEFT
@pytest.mark.parametrize("nonsense", [True, False], ids=["zeros", "its last word"])
async def test_a_peer_that_talks_nonsense_breaks_the_group(*, nonsense: bool) -> None:
    """The group is broken, because the next message cannot be known."""
    said: list[torch.Tensor] = []

    def lie(message: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(message) if nonsense else said[-1]

    ours, theirs = await gloo_groups(2)
    group = Watched(ours, lambda message: said.append(message.clone()))
    async with transports(groups=[group, theirs], timeout=2) as (sender, receiver):
        await moved(sender, receiver, {})
        assert said[0].nbytes == said[-1].nbytes
        group.watch = lie
        sent, got = await both(sender, receiver, {})
        assert isinstance(sent, ProcessGroupError | TransferTimeoutError)
        assert isinstance(got, RemoteProtocolError)
        with pytest.raises(ProcessGroupError):
            await receiver.recv_checkpoint(0, "", 1)


async def configured(groups: list[Wrapped]) -> None:
    """Make them the ranks of a new group."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    size = len(groups)
    each = [group.configure(store, rank, size) for rank, group in enumerate(groups)]
    await asyncio.gather(*each)


@LEFT
async def test_a_group_need_not_know_its_rank_nor_be_ready() -> None:
    """Groups of torchft do neither; a new quorum takes a new transport."""
    groups = [Wrapped() for _ in range(3)]
    async with transports(groups=groups) as (ours, *others):
        for _ in range(2):
            assert repr(ours) == "<PGTransport without a group>"
            for call in (
                ours.send_checkpoint([1], 1, {}),
                ours.recv_checkpoint(1, "", 1),
            ):
                with pytest.raises(ProcessGroupError, match="not initialized"):
                    await call
            await configured(groups)
            assert {group.rank() for group in groups} == {0}
            state, into = weights(1.0), weights(0.0)
            _, *got = await asyncio.gather(
                ours.send_checkpoint([1, 2], 1, state),
                *(each.recv_checkpoint(0, each.metadata(), 1) for each in others),
            )
            assert_same(got, [weights(1.0), weights(1.0)])
            await asyncio.gather(
                others[-1].send_checkpoint([0], 2, state),
                ours.recv_checkpoint(2, "", 2, into=into),
            )
            assert_same(into, state)
            for group in groups:
                group.abort()
        await configured(groups)
        with pytest.raises(TransferTimeoutError):
            await ours.send_checkpoint([1], 1, weights(), SOON)
        await configured(groups)
        with pytest.raises(ProcessGroupError, match="make a new group"):
            await ours.send_checkpoint([1], 1, weights())
        async with transports(groups=groups) as (again, receiver, _):
            assert_same(await moved(again, receiver, weights()), weights())
