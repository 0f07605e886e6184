"""What several senders hold together is received on any other mesh, or in one process.

Real ranks publish and receive in `tests.support.joined_ranks`. What needs no collective
is asked of ranks of a fake group in this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import aiockpt
from aiockpt.errors import (
    AiockptError,
    LocalProtocolError,
    MissingKeysError,
    RankValuesError,
    TemplateMismatchError,
)
from aiockpt.testing import assert_same
from tests.support import joined_ranks
from tests.support.joined import (
    STEP,
    WHOLE,
    cut,
    flat,
    grid,
    joined,
    publish,
    received,
    shards,
)
from tests.support.joined_ranks import CASES
from tests.support.mesh_ranks import (
    Case,
    as_rank,
    check,
    distributed,
    own,
    part_of,
    zeroed,
)
from tests.support.ranks import kill_all
from tests.support.transports import told, transport

SECONDS = 150
WIDE = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)  # 4 MiB

pytestmark = pytest.mark.timeout(2 * SECONDS)

PLAIN = pytest.mark.parametrize("rank", range(2))


# ------------------------------------------------------------------ jobs of real ranks


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with what the jobs have said; all workers share them."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = shared / "joined-meshes"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            run_the_jobs(place)
            (place / "done").touch()
    return place


def run_the_jobs(place: Path) -> None:
    """Run the job that publishes, and those that receive."""
    leader = subprocess.Popen(
        [sys.executable, joined_ranks.__file__, str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, complained = leader.communicate(timeout=SECONDS)
    finally:
        kill_all(leader.pid)
        leader.communicate()
    assert leader.returncode == 0, complained


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_mesh_receives_every_other(answers: Path, case: Case) -> None:
    """Each local tensor is what torch cuts out of the full one, bit by bit."""
    for rank in range(max(case.world, 1)):
        name = f"received-{case.world}-{rank}.json"
        said = json.loads((answers / name).read_text())
        assert said[case.name] == "", f"rank {rank}: {said[case.name]}"


# ---------------------------------------------------------------- ranks in one process


def four(rank: int) -> dict[str, Any]:
    """Return what one of four ranks publishes: shards, and what differs by rank."""
    return {"w": cut(4), "b": WHOLE, "n": 1, "mine": own(rank)}


def shared(_: int) -> dict[str, Any]:
    """Return the same without what differs."""
    return {"w": cut(4), "b": WHOLE, "n": 1}


def template(world: int, *placements: Any) -> dict[str, Any]:
    """Return a template of `shared`, as one of so many ranks."""
    w = cut(world, *placements, whole=0 * WHOLE)
    return {"w": w, "b": 0 * WHOLE, "n": 0}


def is_untouched(into: dict[str, Any]) -> bool:
    """Say whether a template is as `template` has made it."""
    w = into["w"].to_local() if isinstance(into["w"], DTensor) else into["w"]
    return not w.any() and not into["b"].any() and into["n"] == 0


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestShards:
    """Parts of any size come from the senders that have them."""

    @pytest.mark.parametrize("rows", [8, 7, 3, 1, 0])
    async def test_uneven_and_empty(self, rows: int) -> None:
        """Four ranks have split so many rows; some may have none."""
        whole = torch.arange(3.0 * rows).view(rows, 3)
        expected = {"w": whole, "n": 1}
        async with shards(lambda _: {"w": cut(4, whole=whole), "n": 1}) as senders:
            metadata = joined(senders)
            assert_same(await received(metadata), expected)
            for world in (2, 3, 4):
                for rank in range(world):
                    for placement in (Shard(0), Shard(1), Replicate()):
                        with as_rank(rank, world):
                            w = cut(world, placement, whole=0 * whole)
                            into = {"w": w, "n": 0}
                            found = await received(metadata, into=into)
                            assert found is into
                            check(into, expected)

    async def test_replicated(self) -> None:
        """Any holder will do, also where it holds a part only."""

        def state_of(_: int) -> Any:
            halves = distributed(WHOLE, grid(), Replicate(), Shard(0))
            return {"r": cut(4, Replicate()), "h": halves}

        whole = {"r": WHOLE, "h": WHOLE.clone()}
        async with shards(state_of) as senders:
            assert_same(await received(joined(senders)), whole)
            for rank in range(2):
                with as_rank(rank, 2):
                    into = {
                        "r": cut(2, whole=0 * WHOLE),
                        "h": cut(2, Shard(1), whole=0 * WHOLE),
                    }
                    check(await received(joined(senders), into=into), whole)

    async def test_columns_of_rows(self) -> None:
        """A part has pieces of every chunk of every sender."""
        async with shards(lambda _: {"w": cut(4, whole=WIDE)}) as senders:
            for rank in range(3):
                with as_rank(rank, 3):
                    into = {"w": cut(3, Shard(1), whole=0 * WIDE)}
                    for direct in (False, True):
                        await received(joined(senders), into=into, direct=direct)
                        check(into, {"w": WIDE})
                        into["w"].to_local().zero_()

    async def test_memory_of_any_kind(self) -> None:
        """Strided, shifted, a parameter; the rest of the memory stays as it is."""
        async with shards(lambda _: {"w": cut(4)}) as senders, transport() as receiver:
            for rank in range(2):
                with as_rank(rank, 2):
                    around = torch.full((100,), 7.0)
                    columns = torch.full((4, 6), 7.0)
                    turned = torch.zeros(3, 4).t()
                    for local in (around[5:17].view(4, 3), turned, columns[:, ::2]):
                        made = DTensor.from_local(
                            local, flat(2), [Shard(0)], run_check=False
                        )
                        parameter = torch.nn.Parameter(made)
                        version = parameter._version
                        into = {"w": parameter}
                        metadata = joined(senders)
                        await receiver.recv_checkpoint(0, metadata, STEP, into=into)
                        assert into["w"] is parameter
                        assert parameter._version > version
                        assert torch.equal(local, WHOLE.chunk(2)[rank])
                    assert around[:5].eq(7).all()
                    assert around[17:].eq(7).all()
                    assert columns[:, 1::2].eq(7).all()

    async def test_two_senders_of_stages(self) -> None:
        """Dicts are united by key; each stage has keys of its own."""

        def state_of(rank: int) -> Any:
            stage = rank // 2
            mesh = DeviceMesh("cpu", [2 * stage, 2 * stage + 1], _init_backend=False)
            w = distributed(WHOLE + stage, mesh, Shard(0))
            return {"layers": {f"{stage}": {"w": w}}, "step": 3}

        whole = {"layers": {"0": {"w": WHOLE}, "1": {"w": WHOLE + 1}}, "step": 3}
        async with shards(state_of) as senders:
            assert_same(await received(joined(senders)), whole)
            into = zeroed(whole)
            assert_same(await received(joined(senders), into=into), whole)

    @pytest.mark.parametrize("lost", range(4))
    async def test_a_sender_that_was_not_joined(self, lost: int) -> None:
        """The error names the path and how many elements are missing."""
        async with shards(shared) as senders:
            metadata = joined([each for each in senders if each is not senders[lost]])
            into = {"w": 0 * WHOLE, "b": 0 * WHOLE, "n": 0}
            with pytest.raises(AiockptError, match=r"\bw\b.*\b6\b"):
                await received(metadata)
            with pytest.raises(AiockptError, match=r"\bw\b.*\b6\b") as caught:
                await received(metadata, into=into)
            assert is_untouched(into)
            assert "the template was not modified" in caught.value.__notes__
            with as_rank(1 - lost // 2, 2):  # it needs the others only
                found = await received(metadata, into=template(2))
                check(found, {"w": WHOLE, "b": WHOLE, "n": 1})

    @pytest.mark.parametrize(
        "what",
        [
            lambda: cut(4, whole=WHOLE[:7]),
            lambda: cut(4, whole=WHOLE.double()),
            lambda: cut(4, Replicate()),
        ],
        ids=["shape", "dtype", "placement"],
    )
    async def test_senders_that_contradict_one_another(self, what: Any) -> None:
        """Nobody is trusted; the error names the path before anything changes."""

        def state_of(rank: int) -> Any:
            return {"w": what() if rank == 3 else cut(4), "b": WHOLE, "n": 1}

        async with shards(state_of) as senders:
            for rank in range(2):
                with as_rank(rank, 2):
                    into = template(2)
                    with pytest.raises(AiockptError, match=r"\bw\b"):
                        await received(joined(senders), into=into)
                    assert is_untouched(into)


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestRankValues:
    """The receive chooses no value silently that differs by rank."""

    async def test_another_number_of_ranks(self) -> None:
        """The paths are listed, the template is unchanged, and each way out works."""
        async with shards(four) as senders:
            metadata = joined(senders)
            with as_rank(1, 2):
                into = {**template(2), "mine": zeroed(own(0))}
                with pytest.raises(RankValuesError, match="rank_values=") as caught:
                    await received(metadata, into=into)
                assert [*caught.value.paths] == ["mine.rank", "mine.rng"]
                assert "the template was not modified" in caught.value.__notes__
                assert is_untouched(into)
                assert_same(into["mine"], zeroed(own(0)))
                mine = own(8)
                kept = {**template(2), "mine": mine}
                await received(metadata, into=kept, rank_values="keep")
                assert_same(mine, own(8))
                check(kept["w"], WHOLE)
                await received(metadata, into=into, rank_values=3)
                assert_same(into["mine"], own(3))
                check(into["w"], WHOLE)

    async def test_one_process(self) -> None:
        """It gets full tensors, and must choose too."""
        whole = shared_whole()
        async with shards(four) as senders:
            with pytest.raises(RankValuesError, match="rank_values=0") as caught:
                await received(joined(senders))
            assert [*caught.value.paths] == ["mine.rank", "mine.rng"]
            for rank in (0, 3):
                found = await received(joined(senders), rank_values=rank)
                assert_same(found, {**whole, "mine": own(rank)})
            some = {"select": ["w", "b", "n"]}
            assert_same(await received(joined(senders), **some), whole)

    @pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
    async def test_as_many_ranks_get_their_own(self, placement: Any) -> None:
        """They do so on another mesh, too, where shards come from other senders."""
        async with shards(four) as senders:
            for rank in range(4):
                with as_rank(rank, 4):
                    into = {**template(4, placement), "mine": zeroed(own(0))}
                    assert await received(joined(senders), into=into) is into
                    assert_same(into["mine"], own(rank))
                    assert torch.equal(into["w"].to_local(), part_of(WHOLE, into["w"]))

    async def test_as_many_ranks_without_a_template(self) -> None:
        """Each gets what the rank of its number has published."""
        async with shards(four) as senders:
            for rank in range(4):
                with as_rank(rank, 4):
                    found = await received(joined(senders))
                    assert type(found["w"]) is DTensor
                    check(found, {**shared_whole(), "mine": own(rank)})

    async def test_large_tensors_are_compared(self) -> None:
        """The last bit of a plain tensor counts, wherever its bytes lie."""
        big = torch.arange(100_000.0)

        def state_of(rank: int) -> Any:
            plain = big.clone()
            plain[-1] += rank == 2
            return {f"a{rank}": torch.zeros(100 * rank), "p": plain, "q": big}

        async with shards(state_of) as senders:
            with pytest.raises(RankValuesError) as caught:
                await received(joined(senders))
            assert [*caught.value.paths] == ["p"]
            found = await received(joined(senders), rank_values=2)
            assert_same(found["p"], state_of(2)["p"])
            assert_same((await received(joined(senders), select=["q"]))["q"], big)

    async def test_lists_of_other_lengths(self) -> None:
        """They are values that differ."""
        async with shards(lambda rank: {"a": [1] * (1 + rank), "b": 2}) as senders:
            with pytest.raises(RankValuesError) as caught:
                await received(joined(senders))
            assert [*caught.value.paths] == ["a"]
            found = await received(joined(senders), rank_values=1)
            assert_same(found, {"a": [1, 1], "b": 2})

    async def test_two_stages_have_a_tensor_of_one_name(self) -> None:
        """None of them is taken silently, and no rank gets a mixture."""

        def state_of(rank: int) -> Any:
            stage = rank // 2
            mesh = DeviceMesh("cpu", [2 * stage, 2 * stage + 1], _init_backend=False)
            return {"w": distributed(WHOLE + 100 * stage, mesh, Shard(0))}

        async with shards(state_of) as senders:
            with pytest.raises(RankValuesError) as caught:
                await received(joined(senders))
            assert [*caught.value.paths] == ["w"]
            found = await received(joined(senders), rank_values=3)
            assert_same(found, {"w": WHOLE + 100})


def shared_whole() -> dict[str, Any]:
    """Return the full tensors of `shared`."""
    return {"w": WHOLE.clone(), "b": WHOLE.clone(), "n": 1}


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestTemplates:
    """What does not fit is refused before anything changes."""

    async def test_full_tensors_in_a_group(self) -> None:
        """`full=True` asks for them, on any number of ranks."""
        async with shards(shared) as senders:
            for world in (2, 4):
                with as_rank(1, world):
                    found = await received(joined(senders), full=True)
                    assert_same(found, shared_whole())

    async def test_nothing_says_what_a_rank_wants(self) -> None:
        """The senders' mesh is not this rank's: the error names the way out."""
        async with shards(shared) as senders:
            with as_rank(1, 2), pytest.raises(AiockptError, match="full=True") as error:
                await received(joined(senders))
            assert re.search(r"\bw\b", str(error.value))

    async def test_a_meta_template_is_refused(self) -> None:
        """All memory of a receive is the template's."""
        async with shards(shared) as senders:
            with as_rank(1, 2):
                meta = cut(2, whole=torch.empty(8, 3, device="meta"))
                into: dict[str, Any] = {"w": meta, "b": 0 * WHOLE, "n": 0}
                with pytest.raises(AiockptError, match=r"\bw\b"):
                    await received(joined(senders), into=into)
                assert not into["b"].any()
                assert into["w"] is meta

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: cut(2, whole=torch.zeros(8, 3).half()),
            lambda: cut(2, whole=torch.zeros(8, 4)),
            lambda: torch.zeros(4, 3),
            lambda: [torch.zeros(8, 3)],
        ],
        ids=["dtype", "shape", "a local tensor", "a list"],
    )
    async def test_what_does_not_fit_is_refused(self, wrong: Any) -> None:
        """Nothing is cast, and the error names the path."""
        async with shards(shared) as senders:
            with as_rank(1, 2):
                into = {**template(2), "w": wrong()}
                with pytest.raises(TemplateMismatchError, match=r"\bw\b") as caught:
                    await received(joined(senders), into=into)
                assert not into["b"].any()
                assert "the template was not modified" in caught.value.__notes__

    async def test_keys_that_do_not_fit(self) -> None:
        """A receive brings everything, as from one sender."""
        async with shards(shared) as senders:
            into = {**zeroed(shared_whole()), "more": torch.zeros(2)}
            with pytest.raises(AiockptError, match="more"):
                await received(joined(senders), into=into)
            with pytest.raises(AiockptError, match=r"\bb\b"):
                await received(joined(senders), into={"w": 0 * WHOLE, "n": 0})

    async def test_partial_tensors(self) -> None:
        """Their ranks have no parts of them: only their own mesh receives them."""

        def state_of(rank: int) -> Any:
            mine = DTensor.from_local(
                WHOLE + rank, flat(4), [Partial()], run_check=False
            )
            return {"p": mine}

        async with shards(state_of) as senders:
            with as_rank(1, 2):
                into = {"p": cut(2, whole=0 * WHOLE)}
                with pytest.raises(AiockptError, match=r"\bp\b.*redistribute"):
                    await received(joined(senders), into=into)
                assert not into["p"].to_local().any()
            with pytest.raises(AiockptError, match=r"\bp\b.*redistribute"):
                await received(joined(senders))
            with as_rank(2, 4):
                into = state_of(0)
                await received(joined(senders), into=into)
                assert torch.equal(into["p"].to_local(), WHOLE + 2)

    async def test_ties(self) -> None:
        """Two names of one tensor stay so, and fill one tensor once."""

        def state_of(_: int) -> Any:
            w = cut(4)
            return {"a": w, "b": [w]}

        async with shards(state_of) as senders:
            found = await received(joined(senders))
            assert found["a"] is found["b"][0]
            assert_same(found["a"], WHOLE)
            with as_rank(1, 2):
                w = cut(2, whole=0 * WHOLE)
                into: dict[str, Any] = {"a": w, "b": [w]}
                await received(joined(senders), into=into)
                assert into["a"] is into["b"][0] is w
                check(w, WHOLE)


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestSelections:
    """`select=` works on the paths of all senders together."""

    async def test_paths(self) -> None:
        """Only what is named comes; a name that nobody has is missing."""
        async with shards(four) as senders:
            metadata = joined(senders)
            found = await received(metadata, select=["w", "n"])
            assert_same(found, {"w": WHOLE, "n": 1})
            with pytest.raises(MissingKeysError, match="other"):
                await received(metadata, select=["w", "other"])
            with as_rank(1, 2):
                into = template(2)
                await received(metadata, into=into, select=["w"])
                check(into["w"], WHOLE)
                assert not into["b"].any()
                assert into["n"] == 0

    async def test_a_function(self) -> None:
        """It is asked once for each path, though four senders have it."""
        asked: Counter[str] = Counter()

        def select(name: str) -> bool:
            asked[name] += 1
            return name == "w"

        async with shards(four) as senders:
            assert_same(await received(joined(senders), select=select), {"w": WHOLE})
        assert {*asked} >= {"w", "b", "n", "mine.rank", "mine.rng"}
        assert {*asked.values()} == {1}, asked

    async def test_a_few_bytes_are_few(self) -> None:
        """Senders send the chunks that are needed, and no others."""
        whole = torch.arange(1 << 18, dtype=torch.float32).view(-1, 64)  # 1 MiB

        def state_of(_: int) -> Any:
            return {name: cut(4, whole=whole) for name in "abcdefgh"}

        async with shards(state_of) as senders:
            found = await received(joined(senders), select=["c"])
            assert_same(found, {"c": whole})
            sent = [each.statistics().bytes_sent for each in senders]
        assert max(sent) < 2 * whole.nbytes / 4, sent


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestHave:
    """What a receiver holds already is not fetched, as far as whole chunks go."""

    @pytest.mark.parametrize("how", ["template", "another"])
    async def test_chunks_that_are_there(self, how: str) -> None:
        """One changed row of the receiver costs a chunk, and the result is right."""
        async with (
            shards(lambda _: {"w": cut(4, whole=WIDE)}) as senders,
            told() as events,
        ):
            for rank in range(2):
                with as_rank(rank, 2):
                    held = {"w": cut(2, whole=WIDE)}
                    held["w"].to_local()[3] = 0
                    into = held if how == "template" else {"w": cut(2, whole=0 * WIDE)}
                    have = True if how == "template" else held
                    await received(joined(senders), into=into, have=have)
                    check(into, {"w": WIDE})
        found = [each for each in events if each.stop == "recv"]
        for each in found:
            assert each.nbytes + each.reused == WIDE.nbytes // 2
            assert 0 < each.nbytes <= 2 * (64 << 10)
        assert len(found) == 2

    async def test_chunks_that_are_not_whole(self) -> None:
        """Columns hold no whole chunk of rows: everything is fetched."""
        async with (
            shards(lambda _: {"w": cut(4, whole=WIDE)}) as senders,
            told() as events,
        ):
            with as_rank(1, 2):
                into = {"w": cut(2, Shard(1), whole=WIDE)}
                await received(joined(senders), into=into, have=True)
                check(into, {"w": WIDE})
        (event,) = (each for each in events if each.stop == "recv")
        assert event.reused == 0


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestPrepare:
    """The template stays as it is until the step is applied."""

    @PLAIN
    async def test_apply_and_discard(self, rank: int) -> None:
        """A step that is discarded leaves nothing; an applied one fills everything."""
        async with shards(shared) as senders, transport() as receiver:
            with as_rank(rank, 2):
                into = template(2, Shard(1))
                first = await receiver.prepare(joined(senders), STEP, into=into)
                assert first.step == STEP
                assert is_untouched(into)
                first.discard()
                assert is_untouched(into)
                second = await receiver.prepare(joined(senders), into=into)
                for each in senders:
                    await each.disallow_checkpoint()
                assert second.apply() is into
                check(into, shared_whole())

    async def test_followers_prepare(self) -> None:
        """Each step is applied, or skipped, as a whole."""
        async with shards(shared) as senders, transport() as receiver:
            into = zeroed(shared_whole())
            steps = receiver.follow(joined(senders), into=into, prepare=True, have=True)
            async with aclosing(steps):
                assert (await anext(steps)).step == STEP
                assert is_untouched(into)
                await publish(senders, shared, STEP + 1)
                prepared = await anext(steps)
                assert prepared.step == STEP + 1
                prepared.apply()
            assert_same(into, shared_whole())


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
class TestCalls:
    """What a joined string means to each call, and what the calls tell."""

    async def test_calls_that_do_not_take_it(self) -> None:
        """The error says so before anybody is asked for anything."""
        async with shards(shared) as senders:
            async with transport(swarm=True) as member:
                with pytest.raises(LocalProtocolError, match="swarm"):
                    await member.recv_checkpoint(metadata=joined(senders), step=STEP)
            with pytest.raises((LocalProtocolError, ValueError), match="share"):
                await received(joined(senders), share=True)
            assert not any(each.statistics().requests for each in senders)

    async def test_the_newest_step(self) -> None:
        """Without a step, the highest one that any sender has is received."""
        async with shards(shared) as senders, transport() as receiver:
            metadata = joined(senders)
            assert_same(await received(metadata, step=None), shared_whole())
            await publish(senders, lambda _: {"w": cut(4), "n": 2}, 9)
            found = await received(metadata, step=None)
            assert_same(found, {"w": WHOLE, "n": 2})
            assert await anext(receiver.steps(metadata)) == 9
            async with aclosing(receiver.follow(metadata, after=STEP)) as steps:
                step, found = await anext(steps)
            assert step == 9
            assert_same(found, {"w": WHOLE, "n": 2})

    async def test_what_is_told(self) -> None:
        """Progress ends at what was asked for; the event names each sender."""
        seen: list[aiockpt.Progress] = []
        async with (
            shards(lambda _: {"w": cut(4, whole=WIDE)}) as senders,
            told() as events,
        ):
            with as_rank(0, 2):
                into = {"w": cut(2, whole=0 * WIDE)}
                await received(joined(senders), into=into, progress=seen.append)
            addresses = [each.address() for each in senders]
        done = [each.bytes_done for each in seen]
        assert done == sorted(done)
        last = seen[-1]
        assert last.bytes_done == last.bytes_total >= WIDE.nbytes // 2
        assert last.bytes_total <= 1.05 * WIDE.nbytes / 2
        assert last.chunks_done == last.chunks_total > 0
        (event,) = (each for each in events if each.stop == "recv")
        assert event.step == STEP
        assert event.nbytes == last.bytes_total
        assert all(each in event.peer for each in addresses)

    async def test_each_sender_sends_its_part(self) -> None:
        """Two receivers of halves fetch each byte once, a quarter from each sender."""
        async with shards(lambda _: {"w": cut(4, whole=WIDE)}) as senders:
            for rank in range(2):
                with as_rank(rank, 2):
                    into = {"w": cut(2, whole=0 * WIDE)}
                    await received(joined(senders), into=into)
                    check(into, {"w": WIDE})
            sent = [each.statistics().bytes_sent for each in senders]
        assert sum(sent) <= 1.02 * WIDE.nbytes
        for each in sent:
            assert 0.22 <= each / sum(sent) <= 0.28

    async def test_replicas_share_the_work(self) -> None:
        """Where two senders hold a shard, both send some of it."""

        def state_of(_: int) -> Any:
            return {"w": distributed(WIDE, grid(), Replicate(), Shard(0))}

        async with shards(state_of) as senders:
            for rank in range(2):
                with as_rank(rank, 2):
                    into = {"w": cut(2, whole=0 * WIDE)}
                    await received(joined(senders), into=into)
                    check(into, {"w": WIDE})
            assert_same(await received(joined(senders)), {"w": WIDE})
            sent = [each.statistics().bytes_sent for each in senders]
        assert sum(sent) <= 2 * 1.02 * WIDE.nbytes
        assert min(sent) > 0

    async def test_a_list_of_joined_strings(self) -> None:
        """Its items are replicas of one another."""
        async with shards(shared) as one, shards(shared) as other:
            metadata = [joined(one), joined(other)]
            assert_same(await received(metadata), shared_whole())
            for rank in range(2):
                with as_rank(rank, 2):
                    into = template(2)
                    check(await received(metadata, into=into), shared_whole())
            with pytest.raises(LocalProtocolError, match="4 and 2 senders"):
                await received([joined(one), joined(other[:2])])

    async def test_one_sender_joined_is_that_sender(self) -> None:
        """The string is the plain one, and brings the same."""
        async with transport() as sender:
            await sender.send_checkpoint([], STEP, {"w": WHOLE, "n": 1})
            assert joined([sender]) == sender.metadata()
            found = await received(joined([sender]))
            assert_same(found, {"w": WHOLE, "n": 1})

    @pytest.mark.parametrize(
        "options",
        [{"rank_values": "all"}, {"rank_values": -1}, {"rank_values": 1.5}],
        ids=str,
    )
    async def test_values_that_no_option_has(self, options: dict[str, Any]) -> None:
        """They are refused as `load` refuses them."""
        async with shards(shared) as senders:
            with pytest.raises((TypeError, ValueError), match="rank_values"):
                await received(joined(senders), **options)

    async def test_a_rank_that_nobody_was(self) -> None:
        """The error says which ranks there are."""
        async with shards(four) as senders:
            with pytest.raises((AiockptError, ValueError), match="9"):
                await received(joined(senders), rank_values=9)
