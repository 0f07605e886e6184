"""What several senders hold together is received on any other mesh, or in one process.

These are ranks of a fake group in this process. Real ranks publish and receive in
`tests.support.mesh_ranks`, and test_any_mesh tells what came of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import aiockpt
from aiockpt.errors import AiockptError, LocalProtocolError, RankValuesError
from aiockpt.testing import assert_same
from tests.support.joined import (
    STEP,
    WHOLE,
    cut,
    grid,
    joined,
    received,
    shards,
)
from tests.support.mesh_ranks import (
    as_rank,
    check,
    distributed,
    own,
    zeroed,
)
from tests.support.transports import told, transport

WIDE = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)  # 4 MiB

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_blocking")]


def four(rank: int) -> dict[str, Any]:
    """Return what one of four ranks publishes: shards, and what differs by rank."""
    return {"w": cut(4), "b": WHOLE, "n": 1, "mine": own(rank)}


def shared(_: int) -> dict[str, Any]:
    """Return the same without what differs."""
    return {"w": cut(4), "b": WHOLE, "n": 1}


SHARED = {"w": WHOLE, "b": WHOLE.clone(), "n": 1}
"""The full tensors of `shared`."""


def wide(_: int) -> dict[str, Any]:
    """Return shards of several chunks each."""
    return {"w": cut(4, whole=WIDE)}


async def halves(metadata: str, **options: Any) -> None:
    """Receive `wide` as each of two ranks, which have nothing."""
    for rank in range(2):
        with as_rank(rank, 2):
            into = {"w": cut(2, whole=0 * WIDE)}
            await received(metadata, into=into, **options)
            check(into, {"w": WIDE})


@pytest.mark.asyncio
async def test_a_sender_that_was_not_joined() -> None:
    """The error names the path and how many elements are missing."""
    async with shards(shared) as senders:
        metadata, into = joined(senders[:3]), zeroed(SHARED)
        with pytest.raises(AiockptError, match=r"\bw\b.*\b6\b"):
            await received(metadata)
        with pytest.raises(AiockptError, match=r"\bw\b.*\b6\b") as caught:
            await received(metadata, into=into)
        assert_same(into, zeroed(SHARED))
        assert "the template was not modified" in caught.value.__notes__
        with as_rank(0, 2):  # it needs the others only
            into = {**zeroed(SHARED), "w": cut(2, whole=0 * WHOLE)}
            check(await received(metadata, into=into), SHARED)


@pytest.mark.asyncio
async def test_as_many_ranks_without_a_template() -> None:
    """Each gets what the rank of its number has published."""
    async with shards(four) as senders:
        for rank in range(4):
            with as_rank(rank, 4):
                found = await received(joined(senders))
                assert type(found["w"]) is DTensor
                check(found, {**SHARED, "mine": own(rank)})


@pytest.mark.asyncio
async def test_values_that_differ_by_rank() -> None:
    """Their paths are listed, the template is unchanged, and each way out works."""
    async with shards(four) as senders:
        metadata = joined(senders)
        with as_rank(1, 2):
            into = {**zeroed(SHARED), "w": cut(2, whole=0 * WHOLE), "mine": own(8)}
            with pytest.raises(RankValuesError, match="rank_values=") as caught:
                await received(metadata, into=into)
            assert [*caught.value.paths] == ["mine.rank", "mine.rng"]
            assert "the template was not modified" in caught.value.__notes__
            assert not into["w"].to_local().any()
            await received(metadata, into=into, rank_values="keep")
            check(into, {**SHARED, "mine": own(8)})
            await received(metadata, into=into, rank_values=3)
            check(into, {**SHARED, "mine": own(3)})


@pytest.mark.asyncio
async def test_what_a_rank_wants() -> None:
    """It says so by its template, or asks for full tensors."""
    async with shards(shared) as senders:
        with as_rank(1, 2):
            with pytest.raises(AiockptError, match=r"\bw\b.*full=True"):
                await received(joined(senders))
            assert_same(await received(joined(senders), full=True), SHARED)


@pytest.mark.asyncio
async def test_a_step_of_replicas_is_prepared() -> None:
    """Discarded, it leaves nothing; applied, it fills everything."""
    async with (
        shards(shared) as one,
        shards(shared) as other,
        transport() as receiver,
    ):
        metadata = [joined(one), joined(other)]
        with as_rank(1, 2):
            into = {**zeroed(SHARED), "w": cut(2, Shard(1), whole=0 * WHOLE)}
            (await receiver.prepare(metadata, STEP, into=into)).discard()
            prepared = await receiver.prepare(metadata, into=into)
            assert not into["w"].to_local().any()
            for each in (*one, *other):
                await each.disallow_checkpoint()
            assert prepared.apply() is into
            check(into, SHARED)


@pytest.mark.asyncio
async def test_what_does_not_fit() -> None:
    """A receive brings everything, to memory of the template."""
    async with shards(shared) as senders:
        into = {**zeroed(SHARED), "more": torch.zeros(2)}
        with pytest.raises(AiockptError, match="more"):
            await received(joined(senders), into=into)
        misfits = [{"w": 0 * WHOLE, "n": 0}, {**zeroed(SHARED), "b": WHOLE.to("meta")}]
        for misfit in misfits:
            with pytest.raises(AiockptError, match=r"\bb\b"):
                await received(joined(senders), into=misfit)


@pytest.mark.asyncio
async def test_a_function_that_selects() -> None:
    """It is asked once for each path, though four senders have it."""
    asked: Counter[str] = Counter()

    def select(name: str) -> bool:
        asked[name] += 1
        return name == "w"

    async with shards(four) as senders:
        assert_same(await received(joined(senders), select=select), {"w": WHOLE})
    assert {*asked} >= {"w", "b", "n", "mine.rank", "mine.rng"}
    assert {*asked.values()} == {1}, asked


@pytest.mark.asyncio
async def test_a_few_bytes_are_few() -> None:
    """Senders send the chunks that are needed, and no others."""
    whole = WIDE[:256]

    def state_of(_: int) -> Any:
        return {name: cut(4, whole=whole) for name in "abcdefgh"}

    async with shards(state_of) as senders:
        found = await received(joined(senders), select=["c"])
        assert_same(found, {"c": whole})
        sent = [each.statistics().bytes_sent for each in senders]
    assert max(sent) < 2 * whole.nbytes / 4, sent


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["template", "another"])
async def test_chunks_that_are_there(how: str) -> None:
    """One changed row of the receiver costs a chunk, and the result is right."""
    async with shards(wide) as senders, told() as events:
        with as_rank(1, 2):
            held = {"w": cut(2, whole=WIDE)}
            held["w"].to_local()[3] = 0
            into = held if how == "template" else {"w": cut(2, whole=0 * WIDE)}
            have = True if how == "template" else held
            await received(joined(senders), into=into, have=have)
            check(into, {"w": WIDE})
    (event,) = (each for each in events if each.stop == "recv")
    assert event.nbytes + event.reused == WIDE.nbytes // 2
    assert 0 < event.nbytes <= 2 * (64 << 10)


@pytest.mark.asyncio
async def test_calls_that_do_not_take_joined_metadata() -> None:
    """The error says so before anybody is asked for anything."""
    async with shards(shared) as senders:
        async with transport(swarm=True) as member:
            with pytest.raises(LocalProtocolError, match="swarm"):
                await member.recv_checkpoint(metadata=joined(senders), step=STEP)
        with pytest.raises((LocalProtocolError, ValueError), match="share"):
            await received(joined(senders), share=True)
        with pytest.raises(LocalProtocolError, match="4 and 2 senders"):
            await received([joined(senders), joined(senders[:2])])
        for wrong in ("all", -1, 1.5):
            with pytest.raises((TypeError, ValueError), match="rank_values"):
                await received(joined(senders), rank_values=wrong)
        assert not any(each.statistics().requests for each in senders)
        with pytest.raises((AiockptError, ValueError), match="9"):
            await received(joined(senders), rank_values=9)


@pytest.mark.asyncio
async def test_each_sender_sends_its_part() -> None:
    """Two receivers of halves fetch each byte once, a quarter from each sender.

    Progress ends at what was asked for, and the event names each sender.
    """
    seen: list[aiockpt.Progress] = []
    async with shards(wide) as senders, told() as events:
        await halves(joined(senders), progress=seen.append)
        addresses = [each.address() for each in senders]
        sent = [each.statistics().bytes_sent for each in senders]
    assert sum(sent) <= 1.02 * WIDE.nbytes
    for count in sent:
        assert 0.22 <= count / sum(sent) <= 0.28
    last = seen[-1]
    assert WIDE.nbytes <= 2 * last.bytes_total <= 1.05 * WIDE.nbytes
    assert last.bytes_done == last.bytes_total
    assert last.chunks_done == last.chunks_total > 0
    _, event = (each for each in events if each.stop == "recv")
    assert (event.step, event.nbytes) == (STEP, last.bytes_total)
    assert all(each in event.peer for each in addresses)


@pytest.mark.asyncio
async def test_replicas_share_the_work() -> None:
    """Where two senders hold a shard, both send some of it."""

    def state_of(_: int) -> Any:
        return {"w": distributed(WIDE, grid(), Replicate(), Shard(0))}

    async with shards(state_of) as senders:
        await halves(joined(senders), direct=True)
        sent = [each.statistics().bytes_sent for each in senders]
    assert sum(sent) <= 1.02 * WIDE.nbytes
    assert min(sent) > 0
