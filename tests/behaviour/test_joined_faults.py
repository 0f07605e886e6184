"""One of several senders dies, restarts, is late, is slow or lies.

A proxy in front of each sender does to the receiver what a process does that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import IntegrityError, Progress, StepNotFoundError
from aiockpt.errors import (
    AiockptError,
    RankValuesError,
    TransferTimeoutError,
    TransportError,
)
from aiockpt.testing import CutAfter, Drip, Fault, FaultProxy, assert_same
from tests.support.joined import (
    KINDS,
    STEP,
    WHOLE,
    cut,
    joined,
    numbers,
    proxies,
    publish,
    shards,
    states,
    through,
)
from tests.support.mesh_ranks import as_rank, check, zeroed
from tests.support.servers import settle
from tests.support.transports import (
    MIB,
    TOKEN,
    Halfway,
    HoldBack,
    Transport,
    arenas,
    port_of,
    soon,
    transport,
)

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_blocking"),
]

MIB_SENT = 4
VICTIM = 1


@cache
def parts_of(kind: str, add: int) -> list[Any]:
    """Return what the ranks publish; nobody keeps a change of it."""
    return states(lambda _: {"w": KINDS[kind](numbers(MIB_SENT) + add), "n": 1})


def state_of(kind: str, *, add: int = 0) -> Callable[[int], Any]:
    """Return what each rank publishes."""
    return parts_of(kind, add).__getitem__


def whole(*, add: int = 0) -> dict[str, Any]:
    """Return what all ranks have published together."""
    return {"w": numbers(MIB_SENT) + add, "n": 1}


def impatient(**options: Any) -> Transport:
    """Return a receiver that gives a silent sender up soon."""
    return transport(**{"reconnect_timeout": 0.3, "stall_timeout": 2, **options})


class Dies(Fault):
    """The sender behind a proxy is gone once it has sent so many bytes.

    One that is ``silent`` still accepts connections, and says nothing.
    """

    def __init__(self, proxy: FaultProxy, count: int, *, silent: bool = False) -> None:
        self._proxy, self._left, self._silent = proxy, count, silent
        self._cutting: asyncio.Task[None] | None = None

    async def forward(self, pipe: Any, data: bytes, at: int) -> None:
        """Send what comes before; then all connections break, and no new one comes."""
        before, self._left = self._left, self._left - len(data)
        await pipe.send(data[: max(before, 0)])
        if self._left < 0:
            if self._cutting is None and not self._silent:
                self._proxy.refuse()
                self._cutting = asyncio.create_task(self._proxy.cut_all())
            await pipe.stall()  # until it is cut


MOMENTS = {
    "before it answers": 0,
    "in its manifest": 300,
    "in its first chunks": 100 << 10,
    "in its last chunks": 900 << 10,
}
"""When the sender dies: after so many bytes."""

moments = pytest.mark.parametrize("count", MOMENTS.values(), ids=MOMENTS)


@asynccontextmanager
async def behind(
    kind: str, **options: Any
) -> AsyncIterator[tuple[list[Transport], list[FaultProxy], str]]:
    """Give senders, the proxies in front of them, and the metadata of these."""
    async with (
        shards(state_of(kind), **options) as senders,
        proxies(senders) as lines,
    ):
        yield senders, lines, through(lines, senders)


def says(error: BaseException, proxy: FaultProxy) -> bool:
    """Tell whether an error names a sender, in its message or its notes."""
    said = [str(error), *getattr(error, "__notes__", [])]
    return any(f"127.0.0.1:{proxy.port}" in each for each in said)


def is_zero(into: dict[str, Any]) -> bool:
    """Tell whether nothing has come into a template."""
    return not into["w"].any() and into["n"] == 0


class TestDeaths:
    """Without a replica the receive fails and names the sender; else it succeeds."""

    @moments
    async def test_nobody_else_has_the_shard(self, count: int) -> None:
        """The error names the sender, and the template is as it was."""
        async with behind("fsdp") as (_, lines, metadata), impatient() as receiver:
            lines[VICTIM].otherwise = Dies(lines[VICTIM], count)
            into, before = zeroed(whole()), arenas()
            with pytest.raises(TransportError) as caught:
                await receiver.recv_checkpoint(0, metadata, STEP, into=into)
            assert says(caught.value, lines[VICTIM])
            assert "the template was not modified" in caught.value.__notes__
            assert is_zero(into)
            del caught
            await settle(lambda: arenas() <= before)

    async def test_the_deadline_is_kept(self) -> None:
        """A receiver that would wait for the sender ends with its deadline."""
        async with (
            behind("fsdp") as (_, lines, metadata),
            transport(reconnect_timeout=60) as receiver,
        ):
            lines[VICTIM].otherwise = Dies(lines[VICTIM], 100 << 10)
            into = zeroed(whole())
            with pytest.raises(TransferTimeoutError, match="timed out") as caught:
                await receiver.recv_checkpoint(0, metadata, STEP, 3.0, into=into)
            assert says(caught.value, lines[VICTIM])
            assert is_zero(into)

    async def test_into_the_memory_of_the_template(self) -> None:
        """With `direct`, a note says that the template was modified."""
        async with behind("fsdp") as (_, lines, metadata), impatient() as receiver:
            lines[VICTIM].otherwise = Dies(lines[VICTIM], 500 << 10)
            options: dict[str, Any] = {"into": zeroed(whole()), "direct": True}
            with pytest.raises(TransportError) as caught:
                await receiver.recv_checkpoint(0, metadata, STEP, **options)
            assert says(caught.value, lines[VICTIM])
            assert "the template was modified" in caught.value.__notes__

    @moments
    async def test_another_rank_holds_the_shard(self, count: int) -> None:
        """Of HSDP, the other replica takes over."""
        async with behind("hsdp") as (_, lines, metadata), impatient() as receiver:
            lines[VICTIM].otherwise = Dies(lines[VICTIM], count)
            into = zeroed(whole())
            found = await receiver.recv_checkpoint(0, metadata, STEP, into=into)
            assert found is into
            assert_same(into, whole())

    async def test_a_replica_of_the_job(self) -> None:
        """Of a list of joined strings, the sender of the other one takes over."""
        async with (
            behind("fsdp") as (_, lines, one),
            behind("fsdp") as (_, others, other),
            impatient() as receiver,
        ):
            for line in (lines[VICTIM], others[VICTIM + 1]):
                line.otherwise = Dies(line, 100 << 10)
            found = await receiver.recv_checkpoint(0, [one, other], STEP)
            assert_same(found, whole())

    async def test_all_that_hold_a_shard_die(self) -> None:
        """Then the error names each of them once."""
        async with behind("hsdp") as (_, lines, metadata), impatient() as receiver:
            for victim in (1, 3):
                lines[victim].otherwise = Dies(lines[victim], 300)
            into = zeroed(whole())
            with pytest.raises(TransportError) as caught:
                await receiver.recv_checkpoint(0, metadata, STEP, into=into)
            said = [str(caught.value), *caught.value.__notes__]
            for victim in (1, 3):
                assert sum(f":{lines[victim].port}" in each for each in said) == 1
            assert is_zero(into)

    async def test_the_newest_step_without_a_sender(self) -> None:
        """A receive without a step needs no answer of a sender that others replace."""
        async with shards(state_of("hsdp")) as senders, impatient() as receiver:
            metadata = joined(senders)
            await senders[3].shutdown()
            assert_same(await receiver.recv_checkpoint(0, metadata), whole())
            found = await receiver.fingerprint(metadata)
            aiockpt.fingerprint(whole()).require(found)

    async def test_a_fingerprint_while_the_others_publish(self) -> None:
        """They keep the step until the lost sender is given up, and not longer."""
        async with (
            shards(state_of("hsdp")) as senders,
            impatient(reconnect_timeout=1) as receiver,
        ):
            metadata, next_states = joined(senders), states(state_of("hsdp", add=1))
            await senders[VICTIM].shutdown()
            task = asyncio.create_task(receiver.fingerprint(metadata, STEP))
            left = [at for at in range(4) if at != VICTIM]
            await settle(lambda: all(senders[at].statistics().requests for at in left))
            for later in (1, 2):
                for at in left:
                    await senders[at].send_checkpoint([], STEP + later, next_states[at])
            aiockpt.fingerprint(whole()).require(await task)
            for at in left:
                assert senders[at].statistics().superseded == 0

    async def test_a_stage_of_its_own(self) -> None:
        """What only the lost sender had is not left out silently."""
        async with shards(lambda rank: {f"layer{rank}": WHOLE}) as senders:
            metadata = joined(senders)
            lost = senders[3].address()
            await senders[3].shutdown()
            calls: list[dict[str, Any]] = [
                {},
                {"rank_values": 0},
                {"select": lambda path: True},
                {"into": {f"layer{rank}": 0 * WHOLE for rank in range(4)}},
                {"select": ["layer3"]},
            ]
            for options in calls:
                async with impatient() as receiver:
                    with pytest.raises(TransportError) as caught:
                        await receiver.recv_checkpoint(0, metadata, STEP, **options)
                assert lost in str(caught.value)
            async with impatient() as receiver:
                with pytest.raises(TransportError, match=lost):
                    await receiver.fingerprint(metadata, STEP)
                select = ["layer0", "layer2"]
                found = await receiver.recv_checkpoint(0, metadata, STEP, select=select)
            assert_same(found, {"layer0": WHOLE, "layer2": WHOLE.clone()})

    async def test_a_rank_that_needs_nothing_of_it(self) -> None:
        """Its manifest is needed, its chunks are not."""
        async with behind("fsdp") as (_, lines, metadata), impatient() as receiver:
            lines[3].otherwise = Dies(lines[3], 64 << 10)
            with as_rank(0, 2):
                into = {"w": cut(2, whole=0 * numbers(MIB_SENT)), "n": 0}
                await receiver.recv_checkpoint(0, metadata, STEP, into=into)
                check(into, whole())

    @pytest.mark.parametrize("kind", KINDS)
    async def test_it_falls_silent(self, kind: str) -> None:
        """A sender that stands still is like one that is gone."""
        async with (
            behind(kind) as (_, lines, metadata),
            impatient() as receiver,
        ):
            lines[VICTIM].otherwise = Dies(lines[VICTIM], 200 << 10, silent=True)
            call = receiver.recv_checkpoint(0, metadata, STEP)
            if kind == "hsdp":
                assert_same(await call, whole())
            else:
                with pytest.raises(TransportError) as caught:
                    await call
                assert says(caught.value, lines[VICTIM])

    async def test_broken_connections_are_made_again(self) -> None:
        """A sender whose connections break, and which is there, goes on."""
        async with behind("fsdp") as (_, lines, metadata), transport() as receiver:
            for each in lines:
                each.faults = [CutAfter(200 << 10, reset=True) for _ in range(3)]
            found = await receiver.recv_checkpoint(0, metadata, STEP)
            assert_same(found, whole())


@asynccontextmanager
async def restarted(
    senders: Sequence[Transport], lines: Sequence[FaultProxy], state: Any
) -> AsyncIterator[None]:
    """Replace the sender behind a proxy by one with a state."""
    async with transport(token=TOKEN) as successor:
        await successor.send_checkpoint([], STEP, state)
        lines[VICTIM].target = ("127.0.0.1", port_of(successor))
        lines[VICTIM].otherwise = Fault()
        await senders[VICTIM].shutdown(wait=False)
        await lines[VICTIM].cut_all()
        yield


class TestRestarts:
    """Snapshots are pinned: a part of another one is taken by no receive."""

    @asynccontextmanager
    async def interrupted(
        self, state: Any, **options: Any
    ) -> AsyncIterator[asyncio.Task[Any]]:
        """Restart a sender in the middle of a receive, which goes on."""
        halfway = Halfway(0.25)
        slow = Drip(MIB, burst=16 << 10)
        async with (
            behind("fsdp", token=TOKEN) as (senders, lines, metadata),
            transport(token=TOKEN, reconnect_timeout=5) as receiver,
        ):
            lines[VICTIM].otherwise = slow
            task = asyncio.create_task(
                receiver.recv_checkpoint(
                    metadata=metadata, progress=halfway, **{"step": STEP, **options}
                )
            )
            await halfway.reached.wait()
            async with restarted(senders, lines, state):
                yield task

    async def test_the_same_snapshot(self) -> None:
        """It has the same identity, so the receive goes on with it."""
        state = states(state_of("fsdp"))[VICTIM]
        async with self.interrupted(state) as task:
            assert_same(await task, whole())

    @pytest.mark.parametrize("step", [STEP, None])
    async def test_another_snapshot_of_the_step(self, step: int | None) -> None:
        """What the caller gets is of one snapshot of each sender, or an error."""
        state = states(state_of("fsdp", add=1_000_000_000))[VICTIM]
        async with self.interrupted(state, step=step) as task:
            try:
                found = await task
            except AiockptError as error:
                assert "127.0.0.1" in str(error)  # noqa: PT017 - it may succeed, too
                return
        rows = len(found["w"]) // 4
        part = slice(VICTIM * rows, (VICTIM + 1) * rows)
        added = found["w"] - numbers(MIB_SENT)
        assert added[part].eq(1_000_000_000).all(), "a part of another snapshot"
        added[part] = 0
        assert not added.any()


class TestSteps:
    """Senders do not publish in one moment."""

    @pytest.mark.parametrize(("late", "step"), [(0, STEP), (3, None)])
    async def test_a_late_sender_is_awaited(self, late: int, step: int | None) -> None:
        """The others have the step already, and it has an older one."""
        parts = states(state_of("fsdp"))
        older = states(state_of("fsdp", add=5))
        async with shards() as senders, transport() as receiver:
            for rank, sender in enumerate(senders):
                await sender.send_checkpoint([], STEP - 1, older[rank])
                if rank != late:
                    await sender.send_checkpoint([], STEP, parts[rank])
            call = receiver.recv_checkpoint(metadata=joined(senders), step=step)
            task = asyncio.create_task(call)
            await asyncio.sleep(0.3)
            assert not task.done()
            await senders[late].send_checkpoint([], STEP, parts[late])
            assert_same(await task, whole())

    async def test_what_a_late_sender_has_counts(self) -> None:
        """Although the others have all elements: its value differs from theirs."""

        def part(rank: int) -> dict[str, Any]:
            return {"w": KINDS["hsdp"](numbers(1)), "n": 5 if rank == 3 else 1}

        parts = states(part)
        async with shards(part, step=STEP - 1) as senders, transport() as receiver:
            for sender, state in zip(senders[:3], parts, strict=False):
                await sender.send_checkpoint([], STEP, state)
            task = asyncio.create_task(receiver.recv_checkpoint(0, joined(senders)))
            await asyncio.sleep(0.5)
            assert not task.done()
            await senders[3].send_checkpoint([], STEP, parts[3])
            with pytest.raises(RankValuesError):
                await task

    async def test_nobody_has_published(self) -> None:
        """All of them are awaited, until the deadline at most."""
        async with shards() as senders, transport() as receiver:
            with pytest.raises(AiockptError):
                await receiver.recv_checkpoint(0, joined(senders), STEP, 0.5)
            call = receiver.recv_checkpoint(0, joined(senders), STEP)
            task = asyncio.create_task(call)
            await asyncio.sleep(0.1)
            await publish(senders, state_of("fsdp"))
            assert_same(await task, whole())

    async def test_one_sender_has_gone_on(self) -> None:
        """The step is gone there: the error says what is served instead."""
        async with shards(state_of("fsdp")) as senders, transport() as receiver:
            newer = states(state_of("fsdp", add=1))
            await senders[VICTIM].send_checkpoint([], STEP + 1, newer[VICTIM])
            with pytest.raises(StepNotFoundError) as caught:
                await receiver.recv_checkpoint(0, joined(senders), STEP)
            assert caught.value.serving == STEP + 1

    async def test_all_publish_on_during_the_receive(self) -> None:
        """What is leased stays: the receive brings the step that it began."""
        async with behind("fsdp") as (senders, lines, metadata), transport() as ours:
            for each in lines:
                each.otherwise = Drip(2 * MIB, burst=16 << 10)
            begun = Halfway(0.01)
            call = ours.recv_checkpoint(0, metadata, STEP, progress=begun)
            task = asyncio.create_task(call)
            await begun.reached.wait()
            for later in (1, 2):
                await publish(senders, state_of("fsdp", add=later), STEP + later)
            assert_same(await task, whole())
            await settle(lambda: all(at.statistics().readers == 0 for at in senders))


class TestWithoutTheStep:
    """A sender has been started again, and serves nothing yet."""

    @asynccontextmanager
    async def emptied(self, kind: str) -> AsyncIterator[tuple[Transport, str]]:
        """Give a sender in the place of the last one, and the metadata of all."""
        async with shards(state_of(kind)) as senders, transport() as fresh:
            yield fresh, joined([*senders[:3], fresh])

    @pytest.mark.parametrize("step", [STEP, None])
    async def test_others_have_its_shard(self, step: int | None) -> None:
        """The receive does without it after the reconnect timeout."""
        async with self.emptied("hsdp") as (_, metadata), impatient() as receiver:
            assert_same(await receiver.recv_checkpoint(0, metadata, step), whole())

    async def test_a_deadline_before_the_reconnect_timeout(self) -> None:
        """It leaves time to receive what the others have."""
        async with self.emptied("hsdp") as (_, metadata), transport() as receiver:
            assert_same(await receiver.recv_checkpoint(0, metadata, STEP, 6), whole())

    async def test_a_fingerprint(self) -> None:
        """It leaves the sender out as a receive does, and waits if it is needed."""
        ours = aiockpt.fingerprint(whole())
        async with self.emptied("hsdp") as (_, metadata), impatient() as receiver:
            ours.require(await receiver.fingerprint(metadata, STEP))
        async with self.emptied("fsdp") as (fresh, metadata), impatient() as receiver:
            with pytest.raises(TransferTimeoutError, match=fresh.address()):
                await receiver.fingerprint(metadata, STEP, timeout=2)
            task = asyncio.create_task(receiver.fingerprint(metadata, STEP))
            await asyncio.sleep(0.5)
            assert not task.done()
            await fresh.send_checkpoint([], STEP, states(state_of("fsdp"))[3])
            ours.require(await task)

    async def test_one_of_two_suffices(self) -> None:
        """The other one is not waited for any longer."""
        async with (
            shards(state_of("hsdp")) as senders,
            transport() as one,
            transport() as other,
            impatient() as receiver,
        ):
            metadata = joined([senders[0], one, senders[2], other])
            task = asyncio.create_task(receiver.recv_checkpoint(0, metadata, STEP))
            await asyncio.sleep(0.8)
            assert not task.done()
            await other.send_checkpoint([], STEP, states(state_of("hsdp"))[3])
            assert_same(await task, whole())

    async def test_another_sender_is_dead(self) -> None:
        """The error of the deadline names it, too: no wait brings it back."""
        async with (
            shards(state_of("fsdp")) as senders,
            transport() as fresh,
            impatient() as receiver,
        ):
            metadata, dead = joined([*senders[:3], fresh]), senders[VICTIM].address()
            await senders[VICTIM].shutdown()
            with pytest.raises(TransferTimeoutError) as caught:
                await receiver.recv_checkpoint(0, metadata, STEP, 3)
            assert f"published at {fresh.address()}" in str(caught.value)
            assert any(dead in note for note in caught.value.__notes__)

    async def test_a_follower_goes_on(self) -> None:
        """Its receives do not wait for it, either."""
        async with (
            self.emptied("hsdp") as (_, metadata),
            impatient() as receiver,
            aclosing(receiver.follow(metadata)) as steps,
        ):
            step, state = await soon(steps)
            assert step == STEP
            assert_same(state, whole())

    @pytest.mark.parametrize("step", [STEP, None])
    async def test_nobody_else_has_its_shard(self, step: int | None) -> None:
        """It is awaited, until the deadline, whose error names it."""
        async with (
            self.emptied("fsdp") as (fresh, metadata),
            transport() as patient,
            impatient() as receiver,
        ):
            for each in (patient, receiver):
                with pytest.raises(TransferTimeoutError) as told:
                    await each.recv_checkpoint(0, metadata, step, 2.0)
                assert f"published at {fresh.address()}" in str(told.value)
            call = receiver.recv_checkpoint(0, metadata, step)
            task = asyncio.create_task(call)
            await asyncio.sleep(0.5)
            assert not task.done()
            await fresh.send_checkpoint([], STEP, states(state_of("fsdp"))[3])
            assert_same(await task, whole())

    @pytest.mark.parametrize("rank_values", ["error", 3])
    async def test_it_is_needed_all_the_same(self, rank_values: Any) -> None:
        """Its replica is lost, or the values of its rank are asked for."""
        async with shards(state_of("hsdp")) as senders, transport() as fresh:
            metadata = joined([*senders[:3], fresh])
            if rank_values == "error":
                await senders[1].shutdown()
            async with impatient() as receiver:
                call = receiver.recv_checkpoint(
                    0, metadata, STEP, rank_values=rank_values
                )
                task = asyncio.create_task(call)
                await asyncio.sleep(0.8)
                assert not task.done()
                await fresh.send_checkpoint([], STEP, states(state_of("hsdp"))[3])
                assert_same(await task, whole())


class TestWrongBytes:
    """A chunk that is not what the manifest says never gets into a result."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_nobody_else_has_the_chunk(self, *, direct: bool) -> None:
        """The error names the sender."""
        parts = states(state_of("fsdp"))
        async with shards(zero_copy=True) as senders, transport() as receiver:
            for sender, part in zip(senders, parts, strict=True):
                await sender.send_checkpoint([], STEP, part)
            local = parts[VICTIM]["w"].to_local().numpy()
            local[-1, -1] ^= 1  # which nobody can see
            into = zeroed(whole())
            options: dict[str, Any] = {"into": into, "direct": direct}
            with pytest.raises(IntegrityError) as caught:
                await receiver.recv_checkpoint(0, joined(senders), STEP, **options)
            said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
            assert any(senders[VICTIM].address() in each for each in said), said
            if not direct:
                assert is_zero(into)
                assert "the template was not modified" in said
            local[-1, -1] ^= 1
            found = await receiver.recv_checkpoint(0, joined(senders), STEP, **options)
            assert_same(found, whole())

    async def test_another_rank_has_it(self) -> None:
        """Of HSDP, the bytes of the other replica are taken."""
        parts = states(state_of("hsdp"))
        for victim in (0, 1):
            async with shards(zero_copy=True) as senders, transport() as receiver:
                for sender, part in zip(senders, parts, strict=True):
                    await sender.send_checkpoint([], STEP, part)
                local = parts[victim]["w"].to_local().numpy()
                local[5, 5] ^= 1
                found = await receiver.recv_checkpoint(0, joined(senders), STEP)
                local[5, 5] ^= 1
                assert_same(found, whole())


class TestSlowness:
    """Senders that are not slow are not held up by one that is."""

    async def test_one_slow_sender(self) -> None:
        """The others do not wait for it."""
        async with behind("fsdp") as (_, lines, metadata), transport() as receiver:
            lines[VICTIM].otherwise = slow = HoldBack(free=100 << 10)
            others = Halfway(0.7)
            call = receiver.recv_checkpoint(0, metadata, STEP, progress=others)
            task = asyncio.create_task(call)
            await others.reached.wait()
            slow.gate.set()
            assert_same(await task, whole())

    async def test_a_replica_relieves_it(self) -> None:
        """Of HSDP, most of the shard comes from the other one."""
        async with behind("hsdp") as (_, lines, metadata), transport() as receiver:
            lines[1].otherwise = Drip(MIB / 8, burst=8 << 10)
            assert_same(await receiver.recv_checkpoint(0, metadata, STEP), whole())
            slow, quick = (lines[at].statistics().bytes_down for at in (1, 3))
            assert slow < quick


class TestCancellations:
    """A receive that is cancelled leaves nothing behind, here or at any sender."""

    STOPS = ("fetch_manifest", "allocate", "fetch_chunk", "rebuild", "load")

    async def is_over(self, senders: Sequence[Transport], before: int) -> None:
        """Wait until no sender is read, and no memory is left."""
        await settle(
            lambda: all(
                each.statistics().readers == each.statistics().waiting == 0
                for each in senders
            )
        )
        await settle(lambda: arenas() <= before)

    @pytest.mark.parametrize("how", ["anew", "into", "direct", "prepare"])
    async def test_at_each_stop(self, how: str) -> None:
        """A template is as it was, or filled, unless `direct` let bytes into it."""
        async with shards(state_of("fsdp")) as senders, transport() as receiver:
            metadata = joined(senders)
            for stop in self.STOPS:
                before = arenas()
                await self.cancelled_at(stop, how, metadata, receiver)
                await self.is_over(senders, before)
            again = await receiver.recv_checkpoint(0, metadata, STEP)
            assert_same(again, whole())

    async def cancelled_at(
        self, stop: str, how: str, metadata: str, receiver: Transport
    ) -> None:
        """Cancel a receive when it tells of a stop; look at its template."""
        into = None if how == "anew" else zeroed(whole())
        running: list[asyncio.Task[Any]] = []

        def note(progress: Progress) -> None:
            if progress.stop == stop and running:
                running[0].cancel()

        options: dict[str, Any] = {"into": into, "progress": note}
        if how == "prepare":
            call: Any = receiver.prepare(metadata, STEP, **options)
        else:
            options["direct"] = how == "direct"
            call = receiver.recv_checkpoint(0, metadata, STEP, **options)
        running.append(task := asyncio.create_task(call))
        await asyncio.wait({task})
        if not task.cancelled():  # it had nothing to wait for any more
            assert stop in ("rebuild", "load") or how == "prepare"
            if how == "prepare":
                task.result().discard()
        running.clear()  # its callback knows the list
        if how in ("into", "prepare"):
            assert into is not None
            assert is_zero(into) or how == "into"
            if not is_zero(into):
                assert_same(into, whole())

    async def test_after_any_number_of_turns(self) -> None:
        """An await between two stops is no worse."""
        async with shards(state_of("fsdp")) as senders, transport() as receiver:
            metadata, before = joined(senders), arenas()
            for turns in (*range(0, 40, 2), *range(40, 400, 40)):
                into = zeroed(whole())
                call = receiver.recv_checkpoint(0, metadata, STEP, into=into)
                task = asyncio.create_task(call)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                assert is_zero(into) or torch.equal(into["w"], numbers(MIB_SENT))
                del task, call
            await self.is_over(senders, before)

    async def test_while_a_late_sender_is_awaited(self) -> None:
        """The leases on the others end as well."""
        parts = states(state_of("fsdp"))
        async with shards() as senders, transport() as receiver:
            for sender, part in list(zip(senders, parts, strict=True))[:3]:
                await sender.send_checkpoint([], STEP, part)
            before = arenas()
            call = receiver.recv_checkpoint(0, joined(senders), STEP)
            task = asyncio.create_task(call)
            await settle(lambda: senders[3].statistics().waiting == 1)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            del task, call
            await self.is_over(senders, before)

    async def test_a_shutdown(self) -> None:
        """It ends a receive as it ends one from a single sender."""
        async with behind("fsdp") as (senders, lines, metadata):
            for each in lines:
                each.otherwise = Drip(MIB, burst=16 << 10)
            before = arenas()
            async with transport() as receiver:
                begun = Halfway(0.01)
                call = receiver.recv_checkpoint(0, metadata, STEP, progress=begun)
                task = asyncio.create_task(call)
                del call
                await begun.reached.wait()
                await receiver.shutdown(wait=False)
                await asyncio.wait({task})
                assert isinstance(task.exception(), AiockptError)
                del task
            for each in lines:
                await each.cut_all()
            await self.is_over(senders, before)


async def first_of(receiver: Transport, metadata: str) -> Any:
    """Return what a follower yields first."""
    async with aclosing(receiver.follow(metadata)) as steps:
        return await soon(steps)


CALLS: dict[str, tuple[int, Callable[[Transport, str], Any]]] = {
    "anew": (4, lambda by, metadata: by.recv_checkpoint(0, metadata, STEP)),
    "latest": (5, lambda by, metadata: by.recv_checkpoint(0, metadata)),
    "into": (
        4,
        lambda by, metadata: by.recv_checkpoint(
            0, metadata, STEP, into=zeroed(whole())
        ),
    ),
    "select": (
        4,
        lambda by, metadata: by.recv_checkpoint(0, metadata, STEP, select=["w"]),
    ),
    "have": (
        2,
        lambda by, metadata: by.recv_checkpoint(0, metadata, STEP, have=whole()),
    ),
    "prepare": (
        4,
        lambda by, metadata: by.prepare(metadata, STEP, into=zeroed(whole())),
    ),
    "steps": (1, lambda by, metadata: anext(by.steps(metadata))),
    "steps after": (2, lambda by, metadata: anext(by.steps(metadata, 3))),
    "follow": (5, first_of),
}
"""What a receiver asks a single sender for, and by how many requests at most."""


@pytest.mark.parametrize(("most", "call"), CALLS.values(), ids=CALLS)
async def test_a_single_sender_gets_no_more_requests(most: int, call: Any) -> None:
    """A joined string of one costs what the plain string costs, and has cost."""
    found = []
    async with transport(chunk_bytes=MIB) as sender:
        await sender.send_checkpoint([], STEP, whole())
        for metadata in (sender.metadata(), joined([sender])):
            before = sender.statistics().requests
            async with transport(connections=1) as receiver:
                await call(receiver, metadata)
            found.append(sender.statistics().requests - before)
    assert found[0] == found[1] <= most
