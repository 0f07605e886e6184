"""A checkpoint is received while it is staged, and only what was sealed counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiockpt import (
    Limits,
    PeerFailedError,
    StagingError,
    StepNotFoundError,
    TransferTimeoutError,
)
from aiockpt.http import choosing
from aiockpt.http.security import Security
from aiockpt.observe import TransferEvent, add_hook
from aiockpt.testing import CutAfter, FlipBit, assert_same
from aiockpt.wire.manifest import Manifest, decode_header
from aiockpt.wire.relabel import UNSEALED
from aiockpt.wire.unsealed import UNSEALED_HEADER
from holding import Copies
from serving import Answer, Peer, settle
from transports import (
    MIB,
    Halfway,
    Transport,
    pair,
    port_of,
    proxied,
    receive,
    through,
    transport,
)

pytestmark = [pytest.mark.asyncio]

CHUNK = 64 << 10
HELD = 10 * CHUNK
"""Of the data segment the copies are held from here on."""
SOME = 3 * CHUNK
"""As much as somebody who follows gets at least before that."""


def state(fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict of 16 chunks and a bit, every element another one."""
    numbers = torch.arange(MIB // 8, dtype=torch.float64) + fill
    return {"w": numbers, "b": torch.full((9,), fill, dtype=torch.float64), "n": fill}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Return what holds copies."""
    made = Copies(monkeypatch, after=HELD)
    yield made
    made.go()


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cores enough to stage and to send at once."""
    monkeypatch.setattr("aiockpt.staging.usable_cores", lambda: 8)


@pytest.fixture
def events() -> Iterator[list[TransferEvent]]:
    """Return what is told from now on."""
    told: list[TransferEvent] = []
    remove = add_hook(told.append)
    yield told
    remove()


def streamed(events: list[TransferEvent]) -> list[bool]:
    """Return, for each receive that has ended well, whether it was an early one."""
    return ["while it was staged" in e.detail for e in events if e.stop == "recv"]


def sending(sender: Transport, step: int = 1, fill: float = 1.0) -> asyncio.Task[None]:
    """Start a send."""
    return asyncio.create_task(sender.send_checkpoint([1], step, state(fill)))


async def begun(sender: Transport, count: int = 1) -> None:
    """Wait until ``count`` receivers follow."""
    await settle(lambda: sender.statistics().bytes_sent >= count * SOME)


class Early:
    """A receive that has got what there is of a checkpoint in the making."""

    def __init__(self, sender: Transport, task: asyncio.Task[Any]) -> None:
        self.sender, self.task = sender, task

    @classmethod
    async def begin(
        cls, sender: Transport, receiver: Transport, step: int = 1, **options: Any
    ) -> Early:
        """Begin, and wait until a byte is there."""
        halfway = Halfway(0.01)
        call = receive(sender, receiver, step, progress=halfway, **options)
        task = asyncio.create_task(call)
        reached = asyncio.create_task(halfway.reached.wait())
        await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception() or "it was too quick"
        return cls(sender, task)


def template() -> dict[str, Any]:
    """Return something to receive into."""
    return {
        "w": torch.zeros(MIB // 8, dtype=torch.float64),
        "b": torch.zeros(9, dtype=torch.float64),
        "n": 0.0,
    }


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "fresh": dict,
    "into": lambda: {"into": template()},
    "direct": lambda: {"into": template(), "direct": True},
}


class TestFollowing:
    """A receive follows the staging."""

    @pytest.mark.parametrize("way", WAYS)
    async def test_the_first_byte_does_not_wait_for_the_last_copy(
        self, copies: Copies, events: list[TransferEvent], way: str
    ) -> None:
        """And what is returned was sealed."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver, **WAYS[way]())
            assert not send.done()
            assert sender.statistics().step is None
            copies.go()
            await send
            assert_same(await early.task, state())
        assert streamed(events) == [True]
        assert not [each for each in events if each.stop == "retry"]

    async def test_a_receiver_that_waited_for_the_step_follows(
        self, copies: Copies, events: list[TransferEvent]
    ) -> None:
        """It need not come after the send has begun."""
        async with pair() as (sender, receiver):
            early = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            send = sending(sender)
            await begun(sender)
            copies.go()
            await send
            assert_same(await early, state())
        assert streamed(events) == [True]

    async def test_several_receivers_follow(
        self, copies: Copies, events: list[TransferEvent]
    ) -> None:
        """One may come late, when all is there."""
        async with pair() as (sender, receiver), transport() as another:
            send = sending(sender)
            tasks = [
                (await Early.begin(sender, each)).task for each in (receiver, another)
            ]
            await begun(sender, 2)
            copies.go()
            await send
            assert_same(await receive(sender, receiver), state())
            for task in tasks:
                assert_same(await task, state())
        assert sorted(streamed(events)) == [False, True, True]

    async def test_the_state_dict_may_change_once_it_was_sent(
        self, copies: Copies
    ) -> None:
        """However much of it is still on its way."""
        async with pair() as (sender, receiver):
            live = state()
            send = asyncio.create_task(sender.send_checkpoint([1], 1, live))
            early = await Early.begin(sender, receiver)
            copies.go()
            await send
            live["w"].fill_(-1)
            assert_same(await early.task, state())

    async def test_an_empty_checkpoint_is_received(self) -> None:
        """It has no chunk to follow."""
        async with pair() as (sender, receiver):
            waiting = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            await sender.send_checkpoint([1], 1, {"a": 1})
            assert await waiting == {"a": 1}

    async def test_manifests_are_authenticated(
        self, copies: Copies, events: list[TransferEvent]
    ) -> None:
        """The unsealed one, and the sealed one."""
        async with pair(security=Security(manifest_key=b"k" * 32)) as (
            sender,
            receiver,
        ):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            copies.go()
            await send
            assert_same(await early.task, state())
        assert streamed(events) == [True]

    async def test_staging_may_take_longer_than_the_stall_timeout(
        self, copies: Copies
    ) -> None:
        """The receiver asks again and again, and the sender lives."""
        async with pair(stall_timeout=0.2) as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            await begun(sender)
            asked = sender.statistics().requests
            await settle(lambda: sender.statistics().requests > asked + 9)
            copies.go()
            await send
            assert_same(await early.task, state())

    async def test_the_next_checkpoint_is_followed_while_this_one_is_served(
        self, copies: Copies, events: list[TransferEvent]
    ) -> None:
        """And who asks for this one gets it."""
        copies.held = False
        async with pair() as (sender, receiver), transport() as another:
            await sender.send_checkpoint([1], 1, state())
            copies.held = True
            send = sending(sender, 2, 2.0)
            early = await Early.begin(sender, receiver, 2)
            assert_same(await receive(sender, another, 1), state())
            copies.go()
            await send
            assert_same(await early.task, state(2.0))
        assert streamed(events) == [False, True]


class TestWaiting:
    """Some cannot use what has no digests."""

    @pytest.mark.parametrize(
        "options",
        [{"select": ["w"]}, {"have": state(2.0)}, {"share": True}],
        ids=["select", "have", "share"],
    )
    async def test_what_needs_digests_waits_for_them(
        self, copies: Copies, events: list[TransferEvent], options: dict[str, Any]
    ) -> None:
        """What to fetch depends on them."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            await settle(lambda: _announced(sender))
            waiting = asyncio.create_task(receive(sender, receiver, **options))
            await settle(lambda: sender.statistics().waiting > 0)
            copies.go()
            await send
            found = await waiting
            assert_same(found["w"], state()["w"])
        assert streamed(events) == [False]

    async def test_several_sources_agree_by_their_digests(self, copies: Copies) -> None:
        """One of them is still staging."""
        copies.held = False
        async with pair() as (sender, receiver), transport() as other:
            await other.send_checkpoint([1], 1, state())
            copies.held = True
            send = sending(sender)
            sources = [sender.metadata(), other.metadata()]
            waiting = asyncio.create_task(receiver.recv_checkpoint(0, sources, 1))
            copies.go()
            await send
            assert_same(await waiting, state())

    @pytest.mark.parametrize("options", [{"zero_copy": True}, {"same_host": True}])
    async def test_some_senders_let_nobody_follow(
        self, copies: Copies, events: list[TransferEvent], options: dict[str, Any]
    ) -> None:
        """Their memory is the trainer's, or is lent as a whole."""
        async with transport(**options) as sender, transport() as receiver:
            waiting = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            send = sending(sender)
            copies.go()
            await send
            assert_same(await waiting, state())
        assert streamed(events) == [False]

    async def test_nobody_follows_where_staging_needs_all_cores(
        self,
        copies: Copies,
        events: list[TransferEvent],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The send, for which training waits, comes first there."""
        monkeypatch.setattr("aiockpt.staging.usable_cores", lambda: 2)
        async with pair() as (sender, receiver):
            waiting = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            send = sending(sender)
            copies.go()
            await send
            assert_same(await waiting, state())
        assert streamed(events) == [False]

    async def test_a_server_that_knows_nothing_of_it_answers_as_ever(
        self,
        copies: Copies,
        events: list[TransferEvent],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It ignores the header."""
        monkeypatch.setattr(choosing, "UNSEALED_HEADER", "X-Unknown")
        async with pair() as (sender, receiver):
            waiting = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            send = sending(sender)
            copies.go()
            await send
            assert_same(await waiting, state())
        assert streamed(events) == [False]

    async def test_a_cache_that_makes_other_requests_only_costs_time(
        self,
        copies: Copies,
        events: list[TransferEvent],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What does not come early comes later."""
        monkeypatch.setattr(choosing, "_stop_of", lambda *_: None)
        async with pair() as (sender, receiver):
            waiting = asyncio.create_task(receive(sender, receiver))
            send = sending(sender)
            await settle(lambda: sender.statistics().refused > 0)
            copies.go()
            await send
            assert_same(await waiting, state())


class TestFailures:
    """Whatever goes wrong is told at once, and nothing half is returned."""

    @pytest.mark.parametrize("way", ["fresh", "into"])
    async def test_a_staging_that_fails_is_told_to_who_follows(
        self, copies: Copies, way: str
    ) -> None:
        """And the template is as it was."""
        options = WAYS[way]()
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver, **options)
            copies.go(OSError("no such device"))
            with pytest.raises(StagingError):
                await send
            with pytest.raises(PeerFailedError, match="no such device"):
                await early.task
        assert_same(options.get("into"), template() if options else None)

    async def test_a_cancelled_send_is_told(self, copies: Copies) -> None:
        """So is one whose deadline passes."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            send.cancel()
            copies.go()
            with pytest.raises(asyncio.CancelledError):
                await send
            with pytest.raises(PeerFailedError, match="cut short"):
                await early.task

    async def test_who_was_told_does_not_count_twice(self, copies: Copies) -> None:
        """A receiver of the next attempt, which is early, waits for that."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            copies.go(OSError("once"))
            with pytest.raises(StagingError):
                await send
            with pytest.raises(PeerFailedError):
                await early.task
            again = asyncio.create_task(receive(sender, receiver))
            await settle(lambda: sender.statistics().waiting > 0)
            copies.go()
            await sending(sender)
            assert_same(await again, state())

    async def test_a_withdrawal_is_told_at_once(self, copies: Copies) -> None:
        """It waits for no copy."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            await begun(sender)
            await sender.disallow_checkpoint()
            with pytest.raises(StepNotFoundError):
                await early.task
            assert not send.done()
            copies.go()
            with pytest.raises(StepNotFoundError):
                await send

    async def test_a_withdrawal_afterwards_is_told_too(self, copies: Copies) -> None:
        """Sealed or not."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            copies.go()
            await send
            await sender.disallow_checkpoint()
            try:
                found = await early.task
            except StepNotFoundError:
                found = state()
            assert_same(found, state())

    async def test_a_receiver_that_is_cancelled_disturbs_nobody(
        self, copies: Copies
    ) -> None:
        """Neither the send nor another receiver."""
        async with pair() as (sender, receiver), transport() as another:
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            stays = await Early.begin(sender, another)
            early.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await early.task
            copies.go()
            await send
            assert_same(await stays.task, state())
            assert_same(await receive(sender, receiver), state())

    async def test_the_deadline_of_the_receive_holds(self, copies: Copies) -> None:
        """Whatever the sender does."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver, timeout=1)
            with pytest.raises(TransferTimeoutError):
                await early.task
            copies.go()
            await send

    async def test_a_sender_that_shuts_down_is_noticed(self, copies: Copies) -> None:
        """Long before a deadline."""
        async with pair() as (sender, receiver):
            send = sending(sender)
            early = await Early.begin(sender, receiver)
            await begun(sender)
            closing = asyncio.create_task(sender.shutdown())
            with pytest.raises(StepNotFoundError):
                await early.task
            copies.go()
            await closing
            with pytest.raises(Exception, match="closed"):
                await send

    async def test_a_broken_connection_is_resumed(self, copies: Copies) -> None:
        """Behind the staging as well as afterwards."""
        async with (
            pair() as (sender, receiver),
            proxied(
                sender, faults=[CutAfter(n * CHUNK // 2) for n in range(2, 6)]
            ) as proxy,
        ):
            send = sending(sender)
            call = receiver.recv_checkpoint(0, through(proxy, sender), 1)
            early = asyncio.create_task(call)
            await begun(sender)
            copies.go()
            await send
            assert_same(await early, state())

    async def test_what_was_damaged_is_fetched_again(
        self, copies: Copies, events: list[TransferEvent]
    ) -> None:
        """The seal tells, at the end."""
        async with (
            pair() as (sender, receiver),
            proxied(sender, otherwise=FlipBit(3 * CHUNK)) as proxy,
        ):
            send = sending(sender)
            call = receiver.recv_checkpoint(0, through(proxy, sender), 1)
            early = asyncio.create_task(call)
            await begun(sender)
            copies.go()
            await send
            assert_same(await early, state())
        assert any("digest" in e.detail for e in events if e.stop == "retry")


def _announced(sender: Transport) -> bool:
    shelf = sender._endpoint.early
    return shelf is not None and shelf.early.pending() is not None


@asynccontextmanager
async def asking(sender: Transport) -> AsyncIterator[Callable[..., Any]]:
    """Give what asks for something under step 1, over one connection."""
    async with Peer(port_of(sender), token=sender._credentials.token) as peer:

        async def ask(what: str, unsealed: str = "", **headers: str) -> Answer:
            if unsealed:
                headers[UNSEALED_HEADER] = unsealed
            return await peer.ask(f"/checkpoint/1/{what}", **headers)

        yield ask


def decoded(header: bytes) -> Manifest:
    """Return the manifest of a header."""
    found = decode_header(header, limits=Limits())
    assert isinstance(found, Manifest)
    return found


class TestWire:
    """What is said."""

    async def test_who_says_nothing_waits_until_it_is_sealed(
        self, copies: Copies
    ) -> None:
        """As curl does, and a receiver of an earlier version."""
        async with transport() as sender, asking(sender) as ask:
            send = sending(sender)
            await settle(lambda: _announced(sender))
            for what in ("metadata", "full", "0"):
                assert (await ask(what, Prefer="wait=0")).status == 404
            copies.go()
            await send
            answer = await ask("metadata")
            assert answer.status == 200
            assert UNSEALED_HEADER not in answer.headers
            assert UNSEALED not in decoded(answer.body).digests

    async def test_the_unsealed_header_differs_in_the_digests_alone(
        self, copies: Copies
    ) -> None:
        """And is not to be stored."""
        async with transport() as sender, asking(sender) as ask:
            send = sending(sender)
            early = await ask("metadata", "accept")
            tag = early.headers[UNSEALED_HEADER]
            assert early.headers["ETag"] == f'"{tag}"'
            assert early.headers["Cache-Control"] == "no-store, no-transform"
            assert early.headers["Vary"] == "*"
            unsealed = decoded(early.body)
            assert {*unsealed.digests} == {UNSEALED}
            assert (await ask("metadata", tag, Prefer="wait=0")).status == 204
            copies.go()
            await send
            answer = await ask("metadata", tag)
            sealed = decoded(answer.body)
            assert answer.headers["ETag"] == f'"{sealed.snapshot_id}"'
            assert len(answer.body) == len(early.body)
            assert sealed.entries == unsealed.entries
            assert sealed.tree == unsealed.tree

    async def test_ranges_are_served_as_far_as_it_is_staged(
        self, copies: Copies
    ) -> None:
        """Those that begin in the header are not: it will be another one."""
        async with transport() as sender, asking(sender) as ask:
            send = sending(sender)
            early = await ask("metadata", "accept")
            tag, head = early.headers[UNSEALED_HEADER], len(early.body)
            there, behind = f"bytes={head}-{head + 99}", f"bytes={head + HELD}-"
            answer = await ask("full", tag, Range=there)
            assert answer.status == 206
            assert answer.headers["ETag"] == f'"{tag}"'
            assert len(answer.body) == 100
            assert (await ask("full", tag, Range=behind, Prefer="wait=0")).status == 204
            for odd in ({}, {"Range": "bytes=0-9"}, {"Range": "bytes=9-5"}):
                assert (await ask("full", tag, **odd)).status == 412
            assert (await ask("0", tag, Range="bytes=0-9")).status == 412
            other = "unsealed-" + 32 * "0"
            assert (await ask("full", other, Range=there)).status == 412
            copies.go()
            await send
            assert (await ask("full", tag, Range=behind)).status == 206
            await sender.disallow_checkpoint()
            assert (await ask("full", tag, Range=there)).status == 404
