"""A checkpoint of any mesh loads on any other one, or in one process.

Real ranks save, publish, load and receive in `tests.support.mesh_ranks`. What needs no
collective is asked of ranks of a fake group in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import aiockpt
from aiockpt import errors
from aiockpt.checkpointers import (
    CheckpointReader,
    LoadStatistics,
    RankInfo,
)
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    DeviceMeshError,
    IntegrityError,
    MissingKeysError,
    StateDictError,
    WorldSizeMismatchError,
)
from aiockpt.testing import assert_same as assert_all_same
from tests.support import mesh_ranks
from tests.support.matrix import EXHAUSTIVE
from tests.support.mesh_ranks import (
    CASES,
    DCP,
    FEW,
    SAVED,
    Case,
    as_rank,
    assembled,
    check,
    distributed,
    known,
    own,
    zeroed,
)
from tests.support.ranks import JOB_S, begun, check_ends
from tests.support.saving import flip
from tests.support.transports import told

pytestmark = pytest.mark.timeout(2 * JOB_S)


# ------------------------------------------------------------------ jobs of real ranks


class Point(NamedTuple):
    """A registered named tuple."""

    x: float
    weight: Any


@dataclass
class Settings:
    """A registered dataclass."""

    name: str
    weight: Any
    nested: dict[str, Any]


for each in (Point, Settings):
    aiockpt.register_leaf(each, tag=f"any mesh.{each.__name__}")


@pytest.fixture(scope="session")
def saved(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """Return the directory of the jobs, which all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = shared / "any-mesh"
    place.mkdir(exist_ok=True)
    rare = EXHAUSTIVE or "nightly" in pytestconfig.option.markexpr
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            check_ends(begun(mesh_ranks.__file__, place, "all" if rare else "few"))
            (place / "done").touch()
    return place


def marked(case: Case) -> Any:
    """Return a parameter, which is left to the night if it is rare."""
    marks = () if case in FEW else (pytest.mark.nightly,)
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [*map(marked, CASES)])
def test_every_mesh_gets_what_every_other_has(saved: Path, case: Case) -> None:
    """Each local tensor is what torch cuts out of the full one, bit by bit."""
    for rank in range(max(case.world, 1)):
        said = json.loads((saved / f"{case.world}-{rank}.json").read_text())
        assert said[case.name] == "", f"rank {rank}: {said[case.name]}"


class TestOneProcess:
    """A process without a process group gets full tensors."""

    @pytest.mark.parametrize("kind", [*SAVED, *DCP])
    def test_with_a_template(self, saved: Path, kind: str) -> None:
        """The plain tensors of a template are filled in place."""
        whole = known(saved / kind)
        template = zeroed(whole)
        if kind in DCP:  # which does not save a ShardedTensor
            template.pop("sharded", None)
        homes = {name: each.data_ptr() for name, each in template["cut"].items()}
        found = aiockpt.load(saved / kind, into=template)
        assert found is template
        check(found, whole)
        assert homes == {name: each.data_ptr() for name, each in found["cut"].items()}

    @pytest.mark.parametrize("kind", SAVED)
    def test_without_a_template(self, saved: Path, kind: str) -> None:
        """Everything comes, but what differs by rank must be chosen."""
        whole = known(saved / kind)
        if kind != "one":
            with pytest.raises(errors.RankValuesError, match="rank_values=0") as caught:
                aiockpt.load(saved / kind)
            assert [*caught.value.paths] == ["mine.rank", "mine.rng"]
        for rank in (0, 3) if kind != "one" else (0,):
            found = aiockpt.load(saved / kind, rank_values=rank)
            assert {*found} == {*whole, "mine"}
            check(found, {**whole, "mine": own(rank)})
            assert not [each for each in leaves(found) if isinstance(each, DTensor)]


def assert_same(found: Any, expected: Any) -> None:
    """Compare states of which no two tensors share memory."""
    assert_all_same(found, apart(expected))


def apart(value: Any) -> Any:
    """Return a state whose tensors have memory of their own."""
    if isinstance(value, dict):
        return type(value)((key, apart(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(apart, value))
    return value.clone() if type(value) is torch.Tensor else value


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in the containers of a state."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


# ---------------------------------------------------------------- ranks in one process

WHOLE = torch.arange(24.0).view(8, 3)
TIED = torch.arange(4.0)


def flat(world: int) -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh("cpu", (world,))


def cut(world: int, *placements: Any, whole: torch.Tensor = WHOLE) -> DTensor:
    """Return a DTensor over all ranks, split by rows if nothing is said."""
    return distributed(whole, flat(world), *(placements or (Shard(0),)))


def rows(local: torch.Tensor, world: int) -> DTensor:
    """Return a DTensor with these rows here, whatever should be here."""
    facts: dict[str, Any] = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
    return DTensor.from_local(local, flat(world), [Shard(0)], run_check=False, **facts)


def rows_of(tensor: Any, rank: int, world: int) -> torch.Tensor:
    """Return a rank's rows."""
    return tensor.chunk(world)[rank]


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Return what four ranks have saved: shards, and what differs by rank."""
    return assembled(
        tmp_path / "step-1",
        4,
        lambda rank: {"w": cut(4), "b": WHOLE, "n": 1, "mine": own(rank)},
    )


def by_ranks(path: Path, *states: Any) -> Path:
    """Save plain states, one for each rank."""
    return assembled(path, len(states), lambda rank: states[rank])


class TestRankValues:
    """The load chooses no value silently that differs by rank."""

    DIFFERENT: ClassVar[dict[str, tuple[Any, Any, list[str]]]] = {
        "zeros": ({"a": 0.0}, {"a": -0.0}, ["a"]),
        "an int and a float": ({"a": 1}, {"a": 1.0}, ["a"]),
        "long bytes": ({"a": b"x" * 5000}, {"a": b"x" * 4999 + b"y"}, ["a"]),
        "arrays": ({"a": np.arange(9000)}, {"a": np.arange(9000)[::-1]}, ["a"]),
        "one bit": ({"a": torch.zeros(40)}, {"a": torch.zeros(40).neg()}, ["a"]),
        "containers": ({"a": {"b": 1}}, {"a": [1]}, ["a"]),
        "lengths": ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}, ["a.b"]),
        "deep": ({"a": [{"b": {0: 1}}]}, {"a": [{"b": {0: 2}}]}, ["a[0].b.0"]),
        "a leaf": (
            {"a": Point(1.5, torch.ones(2))},
            {"a": Point(1.5, torch.zeros(2))},
            ["a"],
        ),
        "many": (
            {"a": {f"{n}": 0 for n in range(30)}},
            {"a": {f"{n}": 1 for n in range(30)}},
            [f"a.{n}" for n in range(30)],
        ),
    }

    @pytest.mark.parametrize("what", DIFFERENT)
    def test_what_differs_is_listed(self, tmp_path: Path, what: str) -> None:
        """The error lists its paths before a byte is read into anything."""
        one, other, paths = self.DIFFERENT[what]
        # The third is like the first: not the neighbours alone are compared.
        path = by_ranks(tmp_path / "s", {**one, "z": 5}, {**other, "z": 5}, one)
        with pytest.raises(errors.RankValuesError, match="rank_values=0") as caught:
            aiockpt.load(path)
        assert [*caught.value.paths] == paths
        assert paths[0] in str(caught.value)
        for rank, state in enumerate((one, other)):
            found = aiockpt.load(path, rank_values=rank)
            assert_same(found, {**state, "z": 5})

    def test_a_template_stays_as_it_is(self, four: Path) -> None:
        """The template is unchanged until the caller chooses a value."""
        seen: list[int] = []
        with as_rank(1, 2):
            template = {"w": cut(2, whole=0 * WHOLE), "n": 0, "mine": zeroed(own(0))}
            before = {**template, "mine": {**template["mine"]}}
            with pytest.raises(errors.RankValuesError) as caught:
                aiockpt.load(four, into=template, on_bytes=seen.append)
            assert [*caught.value.paths] == ["mine.rank", "mine.rng"]
            assert_same(template, before)
            assert not template["w"].to_local().any()
            assert "the template was not modified" in caught.value.__notes__
            into: dict[str, Any] = {"w": template["w"]}
            assert aiockpt.load(four, into=into) is into
            assert torch.equal(into["w"].to_local(), WHOLE[4:])
            into = {**template, "mine": (mine := own(8))}
            aiockpt.load(four, into=into, rank_values="keep")
            assert into["mine"] is mine
            assert_same(mine, own(8))
            aiockpt.load(four, into=template, rank_values=3)
            assert_same(template["mine"], own(3))
            assert template["n"] == 1

    def test_as_many_ranks_get_their_own(self, four: Path) -> None:
        """They do so on another mesh, too, where shards come from other files."""
        for rank in range(4):
            with as_rank(rank, 4):
                for placement in (Shard(0), Shard(1)):
                    zero = cut(4, placement, whole=0 * WHOLE)
                    into = {"w": zero, "mine": zeroed(own(0))}
                    assert aiockpt.load(four, into=into) is into
                    assert_same(into["mine"], own(rank))
                    expected = mesh_ranks.part_of(WHOLE, zero)
                    assert torch.equal(zero.to_local(), expected)
        for rank in range(4):  # by number, without a group
            reader = CheckpointReader(RankInfo(rank, 4))
            into = {"w": torch.zeros(8, 3), "mine": zeroed(own(0))}
            reader.read(four, into=into)
            assert_same(into, {"w": WHOLE, "mine": own(rank)})

    def test_what_only_another_rank_has(self, tmp_path: Path) -> None:
        """As many ranks take it only if the template or `select` asks for it."""
        path = by_ranks(tmp_path / "s", {"a": 0}, {"a": 1, "b": 5})
        load = CheckpointReader(RankInfo(0, 2)).read
        assert load(path)[0] == {"a": 0}
        assert load(path, into={"a": 9, "b": 9})[0] == {"a": 0, "b": 5}
        assert load(path, select=["b"])[0] == {"b": 5}

    def test_nobody_decides_by_a_variable(
        self, four: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only a group, or `rank_info=`, says how many ranks load."""
        for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(errors.RankValuesError):
            aiockpt.load(four)
        found = aiockpt.load(four, rank_info=RankInfo(2, 4))
        assert_same(found["mine"], own(2))
        assert_same(found["w"], WHOLE)

    @pytest.mark.parametrize("value", ["first", True, -1, 1.5, None, [0]])
    def test_what_is_no_choice(self, four: Path, value: Any) -> None:
        """A choice is one of two words, or a rank."""
        with pytest.raises((TypeError, ValueError), match="rank_values") as caught:
            aiockpt.load(four, rank_values=value)
        assert not isinstance(caught.value, errors.RankValuesError)

    @pytest.mark.parametrize(
        ("value", "said"), [(4, "rank 4"), ("keep", "cannot be kept")]
    )
    def test_a_choice_of_nothing(self, four: Path, value: Any, said: str) -> None:
        """A rank that saved nothing, or a template's values without a template."""
        with pytest.raises(AiockptError, match=said):
            aiockpt.load(four, rank_values=value)

    @pytest.mark.asyncio
    async def test_every_verb_takes_the_choice(self, four: Path) -> None:
        """Every verb that loads has the option by one name."""
        options: dict[str, Any] = {"rank_values": 2, "full": True}
        expected = {"w": WHOLE, "b": WHOLE, "n": 1, "mine": own(2)}
        with aiockpt.make_sync_checkpointer() as sync:
            assert_same(sync.load(four, **options), expected)
        thread = aiockpt.CheckpointerConfig(use_process=False)
        with aiockpt.make_background_checkpointer(thread) as background:
            assert_same(background.load(four, **options), expected)
        async with aiockpt.make_async_checkpointer(thread) as made:
            assert_same(await made.load(four, **options), expected)
        found, missing = CheckpointReader().read(four, **options)
        assert_same(found, expected)
        assert missing == []

    def test_memory_is_no_difference(self, tmp_path: Path) -> None:
        """Equal elements are equal, dense or not, in whatever order they lie."""
        around = torch.zeros(8, 9)
        around[:, ::3] = WHOLE
        for number, other in enumerate((around[:, ::3], WHOLE.t().contiguous().t())):
            path = by_ranks(tmp_path / f"{number}", {"a": WHOLE}, {"a": other})
            assert torch.equal(aiockpt.load(path)["a"], WHOLE)
            into = {"a": torch.zeros(8, 3)}
            aiockpt.load(path, into=into)
            assert_same(into, {"a": WHOLE})

    def test_a_tensor_of_another_shape(self, tmp_path: Path) -> None:
        """A generator's state may have another length; that is a difference."""
        for name, other in (
            ("shape", torch.ones(5)),
            ("dtype", torch.ones(4).double()),
        ):
            path = by_ranks(
                tmp_path / name, {"r": {"a": torch.ones(4)}}, {"r": {"a": other}}
            )
            with pytest.raises(StateDictError, match=r"r\.a"):
                aiockpt.load(path)
            assert_same(aiockpt.load(path, rank_values=1), {"r": {"a": other}})


class TestTreesThatDiffer:
    """Ranks need not save the same paths."""

    def test_stages_of_a_pipeline(self, tmp_path: Path) -> None:
        """Each has its own layers, by the ranks of its own mesh."""

        def state_of(rank: int) -> Any:
            stage = rank // 2
            names = ("stage", "data")
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            layer = distributed(WHOLE + stage, both["data"], Shard(0))
            return {
                "layers": {f"{stage}.w": layer},
                "shared": distributed(WHOLE, flat(4), Shard(1)),
                "step": 3,
            }

        path = assembled(tmp_path / "s", 4, state_of)
        layers = {"0.w": WHOLE, "1.w": WHOLE + 1}
        whole = {"layers": layers, "shared": WHOLE, "step": 3}
        assert_same(aiockpt.load(path), whole)
        for rank in range(4):
            with as_rank(rank, 4):
                # The stages have changed places.
                stage = 1 - rank // 2
                into: dict[str, Any] = {
                    "layers": {f"{stage}.w": cut(4, whole=0 * WHOLE)},
                    "step": 0,
                }
                aiockpt.load(path, into=into)
                (found,) = into["layers"].values()
                expected = rows_of(WHOLE + stage, rank, 4)
                assert torch.equal(found.to_local(), expected)
                assert into["step"] == 3

    def test_dicts_are_united(self, tmp_path: Path) -> None:
        """The keys are in the order in which they are met."""
        path = by_ranks(
            tmp_path / "s",
            {"a": {"x": 1}, "m": {"t": torch.ones(2)}},
            {"b": 2, "a": {"y": torch.zeros(3), "x": 1}},
            {"m": {}, "a": {"y": torch.zeros(3)}},
        )
        expected = {
            "a": {"x": 1, "y": torch.zeros(3)},
            "m": {"t": torch.ones(2)},
            "b": 2,
        }
        assert_same(aiockpt.load(path), expected)
        into = {"m": {"t": torch.zeros(2)}, "b": 0}
        assert_same(aiockpt.load(path, into=into), {"m": {"t": torch.ones(2)}, "b": 2})

    def test_those_that_have_it_must_agree(self, tmp_path: Path) -> None:
        """A rank that lacks it does not hide a difference of the others."""
        path = by_ranks(tmp_path / "s", {"a": 1}, {}, {"a": 2})
        with pytest.raises(errors.RankValuesError) as caught:
            aiockpt.load(path)
        assert [*caught.value.paths] == ["a"]
        assert aiockpt.load(path, rank_values=2) == {"a": 2}

    def test_a_state_that_is_no_dict(self, tmp_path: Path) -> None:
        """It has no path, and still an error."""
        path = by_ranks(tmp_path / "s", [1, 2], [1, 2])
        assert aiockpt.load(path) == [1, 2]
        path = by_ranks(tmp_path / "t", [1, 2], [1, 3])
        with pytest.raises(errors.RankValuesError) as caught:
            aiockpt.load(path)
        assert [*caught.value.paths] == ["[1]"]

    @staticmethod
    def stages(path: Path, other: torch.Tensor, *placements: Any) -> Path:
        """Save one path on the mesh of ranks 0 and 1, and on that of 2 and 3."""

        def state_of(rank: int) -> Any:
            names = ("stage", "data")
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            cuts = placements if rank // 2 else (Shard(0),)
            whole = other if rank // 2 else WHOLE
            return {"a": {"w": distributed(whole, both["data"], *cuts)}, "n": 1}

        return assembled(path, 4, state_of)

    def test_two_meshes_with_one_path(self, tmp_path: Path) -> None:
        """They are no replicas of each other; so none is chosen, and none is mixed."""
        path = self.stages(tmp_path / "s", WHOLE + 100, Shard(0))
        with pytest.raises(errors.RankValuesError) as caught:
            aiockpt.load(path)
        assert [*caught.value.paths] == ["a.w"]
        for rank in range(4):
            expected = WHOLE + 100 * (rank // 2)
            found = aiockpt.load(path, rank_values=rank)
            assert_same(found, {"a": {"w": expected}, "n": 1})
            with as_rank(rank, 4):  # its own, on whatever mesh
                into = {"a": {"w": cut(4, Shard(1), whole=0 * WHOLE)}}
                aiockpt.load(path, into=into)
                check(into, {"a": {"w": expected}})
        for rank in range(2):
            with as_rank(rank, 2):
                mine = cut(2, whole=0 * WHOLE)
                into = {"a": {"w": mine}}
                with pytest.raises(errors.RankValuesError):
                    aiockpt.load(path, into=into)
                aiockpt.load(path, into=into, rank_values="keep")
                assert into["a"]["w"] is mine
                assert not mine.to_local().any()
                aiockpt.load(path, into=into, rank_values=2)
                check(into, {"a": {"w": WHOLE + 100}})
        assert aiockpt.load(path, select=["n"]) == {"n": 1}

    def test_two_meshes_that_agree(self, tmp_path: Path) -> None:
        """Two meshes may hold one tensor, as stages do with tied embeddings."""
        path = self.stages(tmp_path / "s", WHOLE, Shard(0))
        assert_same(aiockpt.load(path), {"a": {"w": WHOLE}, "n": 1})
        for rank in range(3):
            with as_rank(rank, 3):
                into = {"a": {"w": cut(3, whole=0 * WHOLE)}}
                aiockpt.load(path, into=into)
                check(into, {"a": {"w": WHOLE}})

    def test_two_meshes_that_split_in_two_ways(self, tmp_path: Path) -> None:
        """The load refuses them, since they cannot be compared."""
        path = self.stages(tmp_path / "s", WHOLE, Shard(1))
        with pytest.raises(StateDictError, match=r"a\.w"):
            aiockpt.load(path)
        found = aiockpt.load(path, rank_values=3)
        assert_same(found, {"a": {"w": WHOLE}, "n": 1})

    def test_each_rank_has_a_mesh_of_its_own(self, tmp_path: Path) -> None:
        """Such tensors are as local as plain ones."""

        def state_of(rank: int) -> Any:
            alone = DeviceMesh("cpu", [rank], _init_backend=False)
            whole = WHOLE + rank
            made = DTensor.from_local(whole, alone, [Shard(0)], run_check=False)
            return {"w": made}

        path = assembled(tmp_path / "s", 3, state_of)
        with pytest.raises(errors.RankValuesError):
            aiockpt.load(path)
        assert_same(aiockpt.load(path, rank_values=1), {"w": WHOLE + 1})

    def test_one_rank_has_a_shard_and_another_all(self, tmp_path: Path) -> None:
        """The load refuses them, since it cannot know which is right."""

        def state_of(rank: int) -> Any:
            return {"a": {"w": cut(2) if rank else WHOLE}}

        path = assembled(tmp_path / "s", 2, state_of)
        with pytest.raises(StateDictError, match=r"a\.w"):
            aiockpt.load(path)


class TestTemplates:
    """A rank's template says what it wants."""

    def test_large_tensors(self, tmp_path: Path) -> None:
        """They have many chunks, of which a rank needs some, or parts of all."""
        whole = torch.arange(700 * 900, dtype=torch.int32).view(700, 900)

        def state_of(rank: int) -> Any:
            # What comes first has another size in each file.
            first = {f"{rank}": torch.zeros(1000 * rank)}
            return {"first": first, "w": cut(4, whole=whole), "v": cut(4, whole=whole)}

        path = assembled(tmp_path / "s", 4, state_of)
        needed = whole.nbytes
        assert_same(aiockpt.load(path, select=["w"]), {"w": whole})
        for placement in (Shard(0), Shard(1)):
            for rank in range(3):
                with as_rank(rank, 3):
                    into = {"w": cut(3, placement, whole=0 * whole)}
                    seen: list[int] = []
                    aiockpt.load(path, into=into, on_bytes=seen.append)
                    expected = mesh_ranks.part_of(whole, into["w"])
                    assert torch.equal(into["w"].to_local(), expected)
                    if placement == Shard(0):
                        # A third of it, and what else is in the first and last chunks.
                        assert needed / 3 - 4000 < sum(seen) < needed / 3 + (300 << 10)

    def test_another_order_of_ranks(self, four: Path) -> None:
        """A mesh of as many ranks in another order holds other parts."""
        for rank in range(4):
            with as_rank(rank, 4):
                turned = DeviceMesh("cpu", [2, 3, 1, 0], _init_backend=False)
                own_part = WHOLE.chunk(4)[[2, 3, 1, 0].index(rank)]
                local = torch.zeros(2, 3)
                made = DTensor.from_local(local, turned, [Shard(0)], run_check=False)
                aiockpt.load(four, into={"w": made})
                assert torch.equal(local, own_part)

    def test_containers_of_shards(self, tmp_path: Path) -> None:
        """Tuples, named or not, ordered dicts, and keys that are no text."""

        def state_of(rank: int, world: int = 3, factor: int = 1) -> Any:
            made = [cut(world, whole=factor * (WHOLE + n)) for n in range(4)]
            return {
                "a": (made[0], [made[1]]),
                7: OrderedDict(x={(1, "k"): made[2]}),
                "b": {None: {True: [Point(0.5 * factor, made[3])]}},
                "e": torch.Size([1]),
            }

        path = assembled(tmp_path / "s", 3, state_of)
        full = {
            "a": (WHOLE, [WHOLE + 1]),
            7: OrderedDict(x={(1, "k"): WHOLE + 2}),
            "b": {None: {True: [Point(0.5, WHOLE + 3)]}},
            "e": torch.Size([1]),
        }
        assert_all_same(aiockpt.load(path), full)
        with as_rank(1, 2):
            into = state_of(9, 2, 0)
            own_ones = (*(each for each in leaves(into) if isinstance(each, DTensor)),)
            found = aiockpt.load(path, into=into)
            check(found, full)
            filled = [each for each in leaves(found) if isinstance(each, DTensor)]
            assert len(own_ones) == len(filled) == 4
            assert all(map(is_, filled, own_ones))

    def test_conjugated_and_negated(self, tmp_path: Path) -> None:
        """Elements are what they are, however the memory says it."""
        whole = torch.arange(24.0).view(8, 3) * (1 + 2j)

        def state_of(rank: int) -> Any:
            local = rows_of(whole, rank, 2).clone()
            return {
                "conj": rows(local.conj(), 2),
                "neg": rows(torch._neg_view(local.real.clone()), 2),
                "plain": rows(local.clone(), 2),
            }

        path = assembled(tmp_path / "s", 2, state_of)
        found = aiockpt.load(path)
        assert torch.equal(found["conj"], whole.conj())
        assert torch.equal(found["neg"], -whole.real)
        assert torch.equal(found["plain"], whole)
        for rank in range(3):
            with as_rank(rank, 3):
                size = rows_of(whole, rank, 3).shape
                lazy = torch.zeros(size, dtype=whole.dtype).conj()
                plain = torch.zeros(size, dtype=whole.dtype)
                neg = torch.zeros(size)
                into = {
                    "plain": rows(lazy, 3),
                    "conj": rows(plain, 3),
                    "neg": rows(neg, 3),
                }
                aiockpt.load(path, into=into)
                mine = rows_of(whole, rank, 3)
                assert torch.equal(lazy.resolve_conj(), mine)
                assert torch.equal(plain, mine.conj().resolve_conj())
                assert torch.equal(neg, -mine.real)

    @pytest.mark.parametrize(
        "otherwise",
        [
            lambda local: local.conj().resolve_conj().conj(),
            lambda local: torch.zeros(4, 9, dtype=local.dtype)[:, ::3].copy_(local),
        ],
        ids=["conjugated", "with gaps"],
    )
    def test_memory_that_differs_by_rank(self, tmp_path: Path, otherwise: Any) -> None:
        """Each local tensor says for itself how its elements lie in memory."""
        whole = WHOLE * (1 + 2j)

        def state_of(rank: int) -> Any:
            local = rows_of(whole, rank, 2).clone()
            local = otherwise(local) if rank else local
            return {"w": DTensor.from_local(local, flat(2), [Shard(0)])}

        path = assembled(tmp_path / "s", 2, state_of)
        assert torch.equal(aiockpt.load(path)["w"].resolve_conj(), whole)
        with as_rank(1, 3):
            into = {"w": cut(3, Shard(1), whole=0 * whole)}
            aiockpt.load(path, into=into)
            check(into, {"w": whole})

    def test_limits_are_kept(self, four: Path, tmp_path: Path) -> None:
        """A limit of memory holds for what is put together, too."""
        reader = CheckpointReader(limits=aiockpt.Limits(max_bytes=100))
        with pytest.raises(AiockptError, match="limit of 100"):
            reader.read(four, select=["w"])

    def test_memory_of_any_kind(self, four: Path) -> None:
        """Strided, shifted, a parameter; the rest of the memory stays as it is."""
        for rank in range(2):
            with as_rank(rank, 2):
                around = torch.full((100,), 7.0)
                inside = around[5:17].view(4, 3)
                turned = torch.zeros(3, 4).t()
                columns = torch.full((4, 6), 7.0)
                for local in (inside, turned, columns[:, ::2]):
                    made = DTensor.from_local(
                        local, flat(2), [Shard(0)], run_check=False
                    )
                    parameter = torch.nn.Parameter(made)
                    squares = parameter * parameter
                    into = {"w": parameter}
                    aiockpt.load(four, into=into)
                    assert into["w"] is parameter
                    with pytest.raises(RuntimeError, match="modified by an inplace"):
                        squares.backward(squares.detach())
                    assert torch.equal(local, rows_of(WHOLE, rank, 2))
                assert around.eq(7).sum() >= 100 - 12
                assert around[:5].eq(7).all()
                assert around[17:].eq(7).all()
                assert columns[:, 1::2].eq(7).all()

    def test_a_rank_outside_of_the_mesh(self, tmp_path: Path) -> None:
        """A rank outside of the mesh saves nothing, or loads nothing."""

        def state_of(rank: int) -> Any:
            pair = DeviceMesh("cpu", [1, 2], _init_backend=False)
            local = WHOLE.chunk(2)[rank - 1] if pair.get_coordinate() else WHOLE[:0]
            facts: dict[str, Any] = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
            made = DTensor.from_local(local, pair, [Shard(0)], run_check=False, **facts)
            return {"w": made, "n": 1}

        path = assembled(tmp_path / "s", 4, state_of)
        assert_same(aiockpt.load(path), {"w": WHOLE, "n": 1})
        with as_rank(0, 2):
            into: dict[str, Any] = {"w": cut(2, Shard(1), whole=0 * WHOLE), "n": 0}
            aiockpt.load(path, into=into)
            assert torch.equal(into["w"].to_local(), WHOLE[:, :2])

    def test_full_tensors_in_a_group(self, four: Path) -> None:
        """`full=True` asks for them, on any number of ranks."""
        for world in (2, 4):
            with as_rank(1, world):
                found = aiockpt.load(four, full=True, select=["w", "b", "n"])
                assert_same(found, {"w": WHOLE, "b": WHOLE, "n": 1})
                into = {"w": None, "n": 0}
                aiockpt.load(four, into=into, full=True)
                assert_same(into, {"w": WHOLE, "n": 1})

    def test_nothing_says_what_a_rank_wants(self, four: Path) -> None:
        """The saver's mesh is not this rank's: the error names the way out."""
        with as_rank(1, 2):
            seen: list[int] = []
            for options in ({"select": ["b", "w"]}, {"into": {"b": None, "w": None}}):
                given: dict[str, Any] = options
                with pytest.raises(AiockptError, match="full=True") as caught:
                    aiockpt.load(four, on_bytes=seen.append, **given)
                assert re.search(r"\bw\b", str(caught.value))
            assert not seen
        with as_rank(1, 4):
            (found,) = aiockpt.load(four, select=["w"]).values()
            assert type(found) is DTensor
            assert torch.equal(found.to_local(), WHOLE[2:4])

    def test_one_ranks_file(self, four: Path) -> None:
        """`rank=` gives what that rank held, as local tensors."""
        for rank in range(4):
            expected = {"w": WHOLE[2 * rank : 2 * rank + 2], "b": WHOLE, "n": 1}
            found = aiockpt.load(four, rank=rank)
            assert_same(found, {**expected, "mine": own(rank)})
            into = {"w": torch.zeros(2, 3), "mine": zeroed(own(0))}
            aiockpt.load(four, into=into, rank=rank)
            assert_same(into, {"w": expected["w"], "mine": own(rank)})
        with as_rank(0, 2):
            found = aiockpt.load(four, rank=3, select=["w"])
            assert_same(found, {"w": WHOLE[6:]})
        with pytest.raises(CheckpointNotFoundError, match="none of them was rank 4"):
            aiockpt.load(four, rank=4)
        with pytest.raises(ValueError, match="full=True"):
            aiockpt.load(four, rank=1, full=True)
        # Nothing is lost where one of several files is named; both ways out work.
        file = four / "checkpoint_1.safetensors"
        with pytest.raises(AiockptError, match=r"\bw: .*load the directory .*rank="):
            aiockpt.load(file)
        assert_same(aiockpt.load(file, rank=1)["w"], WHOLE[2:4])

    def test_a_meta_template(self, four: Path) -> None:
        """It gets a new local tensor, and keeps its mesh and its placements."""
        with as_rank(1, 2):
            meta = cut(2, Shard(1), whole=torch.empty(8, 3, device="meta"))
            assert meta.to_local().is_meta
            found = aiockpt.load(four, into={"w": meta, "b": WHOLE.to("meta")})
            assert type(found["w"]) is DTensor
            assert (found["w"].device_mesh, found["w"].placements) == (
                meta.device_mesh,
                meta.placements,
            )
            assert_same(found["w"].to_local(), WHOLE[:, 2:].contiguous())
            assert_same(found["b"], WHOLE)
        found = aiockpt.load(four, into={"w": WHOLE.to("meta")})
        assert_same(found, {"w": WHOLE})

    def test_selected_by_name(self, four: Path) -> None:
        """A name that no file has is missing."""
        assert_same(aiockpt.load(four, select=["w", "n"]), {"w": WHOLE, "n": 1})
        with pytest.raises(MissingKeysError, match="other"):
            aiockpt.load(four, select=["w", "other"])
        into = {"w": torch.zeros(8, 3), "n": 0}
        aiockpt.load(four, into=into, select=["n"])
        assert_same(into, {"w": torch.zeros(8, 3), "n": 1})

    def test_selected_by_a_function(self, tmp_path: Path) -> None:
        """It is asked for each path of the united tree, once."""
        states: list[dict[str, Any]] = [
            {"a": {"x": 1, "y": torch.ones(2)}, "c": [torch.zeros(1), 5]},
            {"b": {"z": torch.ones(3)}, "c": [torch.zeros(1), 5], "d": np.arange(9000)},
            {"a": {"x": 1}, "d": np.arange(9000)},
        ]
        path = assembled(tmp_path / "s", 3, lambda rank: {**states[rank], "w": cut(3)})
        asked: Counter[str] = Counter()

        def select(name: str) -> bool:
            asked[name] += 1
            return name in ("a.y", "b.z", "c[1]", "w")

        found = aiockpt.load(path, select=select)
        assert_same(found["a"]["y"], torch.ones(2))
        assert_same(found["b"]["z"], torch.ones(3))
        assert_same(found["w"], WHOLE)
        assert {*asked} == {"a.x", "a.y", "b.z", "c[0]", "c[1]", "d", "w"}
        assert {*asked.values()} == {1}, asked

    def test_another_device(self, four: Path) -> None:
        """`map_location` names the device of full tensors."""
        found = aiockpt.load(four, select=["w", "b"], map_location="meta")
        assert {each.device.type for each in found.values()} == {"meta"}
        assert {each.shape for each in found.values()} == {WHOLE.shape}
        found = aiockpt.load(four, select=["w"], map_location="cpu")
        assert_same(found, {"w": WHOLE})
        with pytest.raises(StateDictError, match="map_location"):
            aiockpt.load(four, select=["w"], map_location="cuda:99")

    def test_a_mapping_of_whole_entries(self, tmp_path: Path) -> None:
        """Every wanted tensor is in one file as it is wanted, so it can be mapped."""

        def state_of(rank: int) -> Any:
            mesh = init_device_mesh("cpu", (2, 2))
            shard = distributed(WHOLE, mesh, Replicate(), Shard(0))
            same = distributed(WHOLE, mesh, Replicate(), Replicate())
            none = distributed(WHOLE[:0], mesh, Shard(0), Shard(1))
            return {"w": shard, "same": same, "plain": WHOLE, "none": none}

        path = assembled(tmp_path / "s", 4, state_of)
        expected = {"same": WHOLE, "plain": WHOLE, "none": WHOLE[:0]}
        found = aiockpt.load(path, mmap=True, select=[*expected])
        assert_same(found, expected)
        found["same"].add_(1)  # the file stays as it is
        assert_same(aiockpt.load(path, select=["same"]), {"same": WHOLE})
        for rank in range(2):
            with as_rank(rank, 2):
                into: dict[str, Any] = {"w": cut(2, whole=0 * WHOLE)}
                into["same"] = torch.zeros(8, 3)
                aiockpt.load(path, into=into, mmap=True)
                assert torch.equal(into["w"].to_local(), rows_of(WHOLE, rank, 2))
                assert torch.equal(into["same"], WHOLE)

    def test_a_mapping_of_parts(self, four: Path) -> None:
        """The error names the first tensor that is in pieces, and mmap."""
        with pytest.raises(AiockptError, match=r"\bw\b.*mmap|mmap.*\bw\b"):
            aiockpt.load(four, mmap=True, select=["b", "w", "n"])
        assert_same(aiockpt.load(four, mmap=True, select=["b"]), {"b": WHOLE})

    def test_a_registered_leaf_of_shards(self, tmp_path: Path) -> None:
        """It is made anew: of full tensors on another mesh, of its own on its own."""

        def state_of(rank: int, world: int = 3, whole: torch.Tensor = WHOLE) -> Any:
            columns = {"k": [cut(world, Shard(1), whole=whole)], "n": 1}
            return {"a": [Settings("x", cut(world, whole=whole), columns)], "n": 1}

        path = assembled(tmp_path / "s", 3, state_of)
        expected = Settings("x", WHOLE, {"k": [WHOLE.clone()], "n": 1})
        zeros = 0 * WHOLE
        into = {"a": [Settings("", zeros, {"k": [zeros], "n": 0})], "n": 0}
        for found in (aiockpt.load(path), aiockpt.load(path, into=into)):
            assert_same(found, {"a": [expected], "n": 1})
        for verb in (aiockpt.load, CheckpointReader().read):
            with as_rank(1, 2):
                into = {"n": 0, **state_of(1, 2, zeros)}
                with pytest.raises(DeviceMeshError, match="full=True") as caught:
                    verb(path, into=into)
                assert caught.value.path == "a[0].weight"
                assert "put a tensor there" not in str(caught.value)
                assert "the template was not modified" in caught.value.__notes__
        with as_rank(1, 2):
            assert_same(aiockpt.load(path, into=into, full=True)["a"], [expected])
            assert aiockpt.load(path, select=["n"]) == {"n": 1}
        with as_rank(1, 3):
            (own_one,) = aiockpt.load(path, into=state_of(1, 3, zeros))["a"]
            assert torch.equal(own_one.weight.to_local(), rows_of(WHOLE, 1, 3))

    def test_what_differs_in_a_registered_leaf_of_shards(self, tmp_path: Path) -> None:
        """The error names its path, and the choice counts for all of the leaf."""
        path = assembled(
            tmp_path / "s", 2, lambda rank: [Settings(f"{rank}", cut(2), {})]
        )
        with pytest.raises(errors.RankValuesError) as caught:
            aiockpt.load(path)
        assert [*caught.value.paths] == ["[0].name"]
        (found,) = aiockpt.load(path, rank_values=1)
        assert_same(found, Settings("1", WHOLE, {}))

    def test_shards_deep_in_registered_leaves(self, tmp_path: Path) -> None:
        """They become full tensors in a leaf of a tuple, and in one of a leaf."""

        def state_of(rank: int, world: int = 2) -> Any:
            inner = Settings("i", cut(world), {"n": 1})
            return {"t": (inner, 1), "l": Settings("o", WHOLE + 1, {"k": inner})}

        inner = Settings("i", WHOLE, {"n": 1})
        expected = {"t": (inner, 1), "l": Settings("o", WHOLE + 1, {"k": inner})}
        path = assembled(tmp_path / "s", 2, state_of)
        assert_same(aiockpt.load(path), expected)
        found = aiockpt.load(path, rank=1)["t"][0]
        assert torch.equal(found.weight, rows_of(WHOLE, 1, 2))
        with as_rank(1, 2):
            assert_same(aiockpt.load(path, full=True), expected)
        alone = assembled(tmp_path / "one", 1, lambda rank: state_of(rank, 1))
        assert_same(aiockpt.load(alone), expected)

    @pytest.mark.parametrize("second", [torch.zeros(1), 7])
    def test_a_longer_tuple_is_taken_whole(self, tmp_path: Path, second: Any) -> None:
        """No item of a tuple that is longer than the template's is chosen."""
        path = assembled(tmp_path / "s", 2, lambda rank: {"x": (cut(2), second + rank)})
        into = {"x": (0 * WHOLE,)}
        with pytest.raises(errors.RankValuesError) as caught:
            aiockpt.load(path, into=into)
        assert [*caught.value.paths] == ["x[1]"]
        with pytest.raises(errors.RankValuesError, match="cannot be kept"):
            aiockpt.load(path, into=into, rank_values="keep")
        found = aiockpt.load(path, into=into, rank_values=1)
        assert_same(found, {"x": (WHOLE, second + 1)})

    def test_ties(self, tmp_path: Path) -> None:
        """Tied tensors stay tied; a tie that only the template has is refused."""

        def state_of(rank: int) -> Any:
            tied = cut(3)
            return {"a": tied, "b": [tied], "c": cut(3, whole=WHOLE + 1)}

        path = assembled(tmp_path / "s", 3, state_of)
        found = aiockpt.load(path)
        assert_same(found["a"], WHOLE)
        assert found["b"][0].data_ptr() == found["a"].data_ptr()
        assert found["c"].data_ptr() != found["a"].data_ptr()
        with as_rank(0, 2):
            tied = cut(2, whole=0 * WHOLE)
            into = {"a": tied, "b": [tied]}
            aiockpt.load(path, into=into)
            assert torch.equal(tied.to_local(), WHOLE[:4])
            apart: dict[str, Any] = {
                "a": cut(2, whole=0 * WHOLE),
                "b": [cut(2, whole=0 * WHOLE)],
            }
            aiockpt.load(path, into=apart)
            assert torch.equal(apart["a"].to_local(), WHOLE[:4])
            assert torch.equal(apart["b"][0].to_local(), WHOLE[:4])
            wrong = {"a": tied, "c": tied}
            tied.to_local().zero_()
            with pytest.raises(StateDictError):
                aiockpt.load(path, into=wrong)
            assert not tied.to_local().any()

    @pytest.mark.parametrize("operation", ["sum", "avg", "max"])
    def test_terms_of_a_sum(self, tmp_path: Path, operation: str) -> None:
        """They are no parts of a tensor; on their own mesh they are theirs."""

        def state_of(rank: int, world: int = 2) -> Any:
            local = WHOLE + rank
            term = DTensor.from_local(local, flat(world), [Partial(operation)])
            return {"grad": term, "w": cut(world)}

        path = assembled(tmp_path / "s", 2, state_of)
        with pytest.raises(AiockptError, match="redistribute") as caught:
            aiockpt.load(path)
        assert "grad" in str(caught.value)
        assert_same(aiockpt.load(path, select=["w"]), {"w": WHOLE})
        with as_rank(1, 3):
            into = {**state_of(9, 3), "w": cut(3, whole=0 * WHOLE)}
            with pytest.raises(AiockptError, match="redistribute"):
                aiockpt.load(path, into=into)
            assert not into["w"].to_local().any()
        with as_rank(1, 2):
            into = state_of(9)
            aiockpt.load(path, into=into)
            assert torch.equal(into["grad"].to_local(), WHOLE + 1)

    def test_what_does_not_fit(self, four: Path) -> None:
        """Another shape or dtype is an error that names the path; nothing is cast."""
        with as_rank(1, 2):
            other = torch.zeros(8, 4), torch.zeros(8, 3).double(), torch.zeros(7, 3)
            for whole in other:
                fine = torch.zeros(8, 3)
                into = {"b": fine, "w": cut(2, whole=whole)}
                with pytest.raises(errors.TemplateMismatchError, match=r"\bw\b"):
                    aiockpt.load(four, into=into)
                assert not fine.any()
            for whole in other:
                with pytest.raises(errors.TemplateMismatchError, match=r"\bw\b"):
                    aiockpt.load(four, into={"w": whole})
            with pytest.raises(MissingKeysError, match="more"):
                aiockpt.load(four, into={"w": cut(2), "more": cut(2)})
            with aiockpt.make_sync_checkpointer() as lax:
                own_one = cut(2, whole=0 * WHOLE)
                found = lax.load(four, into={"w": own_one, "more": 5})
                assert found == {"w": own_one, "more": 5}
                assert torch.equal(own_one.to_local(), WHOLE[4:])

    def test_plain_tensors_fill_shards(self, tmp_path: Path) -> None:
        """Plain tensors of one file, of equal files, and of other tools fill shards."""
        one = by_ranks(tmp_path / "one", {"w": WHOLE})
        two = by_ranks(tmp_path / "two", {"w": WHOLE}, {"w": WHOLE})
        save_file({"w": WHOLE}, tmp_path / "x.safetensors")
        shards = tmp_path / "hf"
        shards.mkdir()
        places = {
            "w": "m-00001-of-00002.safetensors",
            "v": "m-00002-of-00002.safetensors",
        }
        for name, file in places.items():
            save_file({name: WHOLE}, shards / file)
        index = {"metadata": {"total_size": 192}, "weight_map": places}
        (shards / "m.safetensors.index.json").write_text(json.dumps(index))
        torch.save({"w": WHOLE}, tmp_path / "x.pt")
        for path in (one, two, tmp_path / "x.safetensors", shards, tmp_path / "x.pt"):
            for rank in range(3):
                with as_rank(rank, 3):
                    for placement in (Shard(0), Shard(1), Replicate()):
                        into = {"w": cut(3, placement, whole=0 * WHOLE)}
                        aiockpt.load(path, into=into)
                        expected = mesh_ranks.part_of(WHOLE, into["w"])
                        assert torch.equal(into["w"].to_local(), expected)

    @pytest.mark.asyncio
    async def test_slices_of_foreign_files(self, tmp_path: Path) -> None:
        """The load reads nothing else of another tool's file."""
        save_file({"w": WHOLE, "other": WHOLE + 1}, tmp_path / "m.safetensors")
        async with told() as events:
            with as_rank(1, 2):
                into = {"w": cut(2, whole=0 * WHOLE)}
                aiockpt.load(tmp_path, into=into)
                assert torch.equal(into["w"].to_local(), WHOLE[4:])
        (event,) = events
        assert event.nbytes == event.needed == WHOLE.nbytes // 2
        assert (event.files, event.ranges) == (1, 1)

    def test_bytes_are_told(self, four: Path) -> None:
        """An exception of `on_bytes` ends the load."""
        seen: list[int] = []
        aiockpt.load(four, select=["w"], on_bytes=seen.append)
        assert sum(seen) >= WHOLE.nbytes

        def enough(nbytes: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            aiockpt.load(four, select=["w"], on_bytes=enough)

    def test_a_missing_key_is_found_before_a_byte_is_read(self, tmp_path: Path) -> None:
        """Tensors that the ranks must agree about are compared after the keys."""
        whole = torch.arange(300_000.0)
        seen: list[int] = []
        # At another offset, so that the digests of the chunks do not tell.
        states = [{"pad": torch.zeros(n), "w": whole} for n in (400_000, 500_000)]
        path = by_ranks(tmp_path / "s", *states)
        into = {"w": 0 * whole, "more": torch.zeros(3)}
        with pytest.raises(MissingKeysError, match="more"):
            aiockpt.load(path, into=into, on_bytes=seen.append)
        assert not seen
        aiockpt.load(path, into={"w": into["w"]}, on_bytes=seen.append)
        assert sum(seen) >= 2 * whole.nbytes
        assert_same(into["w"], whole)

    def test_nothing_is_verified_if_nobody_wants_it(self, four: Path) -> None:
        """`verify="none"` compares no digest, as on the same mesh."""
        assert_same(aiockpt.load(four, select=["w"], verify="none"), {"w": WHOLE})


class TestDamage:
    """The load names what is lost or wrong before it writes anything."""

    @staticmethod
    def refused(kind: Any, words: str, path: Path, rank: int = 1) -> str:
        """Load into a template of a rank of two, which stays as it is."""
        seen: list[int] = []
        with as_rank(rank, 2):
            into: dict[str, Any] = {"b": torch.zeros(8, 3)}
            into["w"] = cut(2, whole=0 * WHOLE)
            with pytest.raises(kind, match=words) as caught:
                aiockpt.load(path, into=into, on_bytes=seen.append)
            assert not into["w"].to_local().any()
            assert not into["b"].any()
        assert not seen
        return str(caught.value)

    @pytest.mark.parametrize("rank", range(4))
    def test_a_lost_file(self, four: Path, rank: int) -> None:
        """It is missed, wherever what it had would have gone."""
        (four / f"checkpoint_{rank}.safetensors").unlink()
        self.refused(CheckpointNotFoundError, "missing", four)
        with pytest.raises(CheckpointNotFoundError, match="missing"):
            aiockpt.load(four, rank_values=0)

    def test_a_file_of_another_checkpoint(self, four: Path, tmp_path: Path) -> None:
        """The marker says which file belongs to it."""
        other = assembled(tmp_path / "other-1", 4, lambda rank: {"w": cut(4)})
        name = "checkpoint_2.safetensors"
        shutil.copy(other / name, four / name)
        self.refused((IntegrityError, errors.StorageError), "step-1", four)

    def test_a_file_of_another_checkpoint_of_the_same_size(
        self, four: Path, tmp_path: Path
    ) -> None:
        """The load refuses it, though it looks alike."""
        state: dict[str, Any] = {"b": WHOLE, "n": 1, "mine": own(2)}
        other = assembled(
            tmp_path / "step-2", 4, lambda rank: {"w": cut(4, whole=WHOLE + 1), **state}
        )
        name = "checkpoint_2.safetensors"
        assert (other / name).stat().st_size == (four / name).stat().st_size
        shutil.copy(other / name, four / name)
        self.refused(IntegrityError, name, four)

    LACKING: ClassVar[dict[str, Callable[[int], Any]]] = {
        "no such tensor": lambda rank: {"b": WHOLE},
        "a smaller share": lambda rank: {
            "w": rows(WHOLE[:0], 4),
            "b": WHOLE,
        },
        "another shape": lambda rank: {"w": cut(4, whole=WHOLE[:7]), "b": WHOLE},
        "another dtype": lambda rank: {"w": cut(4, whole=WHOLE.double()), "b": WHOLE},
        "no column": lambda rank: {"w": cut(4, Shard(1)), "b": WHOLE},
        "an overlap": lambda rank: {
            "w": rows(WHOLE[:3], 4),
            "b": WHOLE,
        },
        "all of it": lambda rank: {"w": cut(4, Replicate()), "b": WHOLE},
    }

    @pytest.mark.parametrize("lost", [1, 3])
    def test_a_marker_that_forgets_a_rank(self, four: Path, lost: int) -> None:
        """The listed files are whole, and still a part of the tensor is lost."""
        (four / f"checkpoint_{lost}.safetensors").unlink()
        for rank in range(lost, 3):
            names = [f"checkpoint_{each}.safetensors" for each in (rank + 1, rank)]
            (four / names[0]).rename(four / names[1])
        marker = json.loads((four / "commit.json").read_text())
        files = [each for n, each in enumerate(marker["files"].values()) if n != lost]
        names = [f"checkpoint_{rank}.safetensors" for rank in range(3)]
        marker |= {"files": dict(zip(names, files, strict=True)), "world_size": 3}
        (four / "commit.json").write_text(json.dumps(marker, indent=2))
        said = self.refused(AiockptError, r"\bw\b", four, rank=lost // 2)
        assert "no file has 6 of the 12 elements" in said
        with as_rank(1 - lost // 2, 2):  # it needs the others
            into = {"w": cut(2, whole=0 * WHOLE)}
            aiockpt.load(four, into=into)
            assert torch.equal(into["w"].to_local(), rows_of(WHOLE, 1 - lost // 2, 2))
        with pytest.raises(AiockptError, match=r"\bw\b"):
            aiockpt.load(four, select=["w"])
        assert_same(aiockpt.load(four, select=["b"]), {"b": WHOLE})

    def test_each_rank_checks_what_it_needs(self, four: Path) -> None:
        """A rank whose elements are there, and undamaged, loads."""
        flip(four / "checkpoint_3.safetensors", -1)
        for rank in range(2):
            with as_rank(rank, 2):
                into = {"w": cut(2, whole=0 * WHOLE)}
                refused = pytest.raises(IntegrityError)
                with refused if rank else contextlib.nullcontext():
                    aiockpt.load(four, into=into)
                    assert torch.equal(into["w"].to_local(), WHOLE[:4])

    @pytest.mark.parametrize("what", LACKING)
    def test_lost_coverage(self, tmp_path: Path, what: str) -> None:
        """An element that no file has, or files that contradict one another."""

        def state_of(rank: int) -> Any:
            if rank == 3:
                return self.LACKING[what](rank)
            return {"w": cut(4), "b": WHOLE}

        path = assembled(tmp_path / "s", 4, state_of)
        seen: list[int] = []
        with pytest.raises(AiockptError, match=r"\bw\b") as caught:
            aiockpt.load(path, on_bytes=seen.append)
        if what == "no such tensor":
            assert "6" in str(caught.value)  # elements are missing
        assert not seen
        self.refused(AiockptError, r"\bw\b", path)
        if what in ("another shape", "another dtype", "all of it"):
            # Files that contradict one another are trusted by nobody, not even by a
            # rank that needs none of the elements in question.
            self.refused(AiockptError, r"\bw\b", path, rank=0)
        with as_rank(0, 2):
            first = {"b": torch.zeros(8, 3)}
            aiockpt.load(path, into=first)
            assert torch.equal(first["b"], WHOLE)


def test_only_the_seeds_files_count_their_ranks(tmp_path: Path) -> None:
    """Files of torch.save say nothing that could be put together."""
    for rank in (0, 1):
        torch.save({"rank": rank}, tmp_path / f"checkpoint_{rank}.pt")
    with pytest.raises(WorldSizeMismatchError, match="rank="):
        aiockpt.load(tmp_path)
    assert aiockpt.load(tmp_path, rank=1) == {"rank": 1}


@pytest.mark.parametrize("options", [{"full": True}, {"rank_values": 0}])
def test_a_peer_has_no_ranks(options: dict[str, Any]) -> None:
    """The load refuses options that are for files, and says what to do."""
    with pytest.raises(ValueError, match=r"for files.*leave them out, or load the dir"):
        aiockpt.load("http://127.0.0.1:1/checkpoint/1", **options)


@pytest.mark.asyncio
async def test_the_event_of_a_load_has_its_numbers(four: Path) -> None:
    """The event says how many bytes were needed and read, in how many ranges."""
    seen: list[int] = []
    async with told() as events:
        aiockpt.load(four, select=["w"], on_bytes=seen.append)
        with as_rank(1, 2):
            aiockpt.load(four, into={"w": cut(2)})
    one, half = (each for each in events if each.stop == "load")
    assert (one.needed, one.files, one.ranges) == (WHOLE.nbytes, 4, 4)
    assert one.needed <= one.nbytes == sum(seen)
    assert str(four) in one.detail
    assert (half.needed, half.files) == (WHOLE.nbytes // 2, 2)


WAYS_TO_WRITE: dict[str, Callable[[], Any]] = {
    "sync": aiockpt.make_sync_checkpointer,
    "thread": partial(
        aiockpt.make_background_checkpointer,
        aiockpt.CheckpointerConfig(use_process=False),
    ),
    "process": aiockpt.make_background_checkpointer,
}


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_every_checkpointer_loads_and_counts_its_loads(four: Path, way: str) -> None:
    """It loads on the mesh that saved, on another one, and in one process."""
    with WAYS_TO_WRITE[way]() as made:
        assert made.statistics().loads == LoadStatistics()
        expected = LoadStatistics()
        for rank, world, files in ((2, 4, 1), (1, 2, 2), (0, 1, 4)):
            part = WHOLE.nbytes // world
            with as_rank(rank, world):
                into = {"w": cut(world, whole=0 * WHOLE)}
                check(made.load(four, into=into), {"w": WHOLE})
            now = made.statistics().loads
            assert now.ended == expected.ended + 1
            assert now.needed == expected.needed + part
            assert now.files == expected.files + files
            assert now.ranges == expected.ranges + files
            assert now.nbytes >= expected.nbytes + part
            expected = now
        with pytest.raises(errors.RankValuesError):
            made.load(four)
        assert made.statistics().loads.ended == 3
    with aiockpt.make_sync_checkpointer() as other:
        assert other.statistics().loads == LoadStatistics()
