"""Trees of several ranks that look alike, and are not."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import aiockpt
from aiockpt import TransferEvent, add_hook
from aiockpt.errors import (
    IntegrityError,
    MissingKeysError,
    RankValuesError,
    StateDictError,
    TemplateMismatchError,
)
from tests.support.memory import forget_the_peak, resident
from tests.support.mesh_ranks import as_rank, assembled, distributed
from tests.support.saving import flip

ROWS = torch.arange(8.0).view(4, 2)
Pair = namedtuple("Pair", ["a", "b"])


def flat(world: int) -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", (world,))


def test_large_replicas_are_compared_in_parts(tmp_path: Path) -> None:
    """The last bit of large replicas counts, and each byte that is read is reported."""
    big = torch.arange(24 << 20, dtype=torch.float32)

    def state_of(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [rank])
        before = torch.zeros(1000 * rank)  # its bytes are at another offset
        return {f"a{rank}": before, "w": distributed(big, mesh, Shard(0))}

    path = assembled(tmp_path / "s", 2, state_of)
    own, seen = torch.zeros(len(big)), list[int]()
    told: list[TransferEvent] = []
    remove = add_hook(told.append)
    before = forget_the_peak()
    try:
        aiockpt.load(path, into={"w": own}, on_bytes=seen.append)
    finally:
        remove()
    assert resident("VmHWM") - before < big.nbytes
    assert torch.equal(own, big)
    (event,) = told
    assert event.nbytes == sum(seen) >= event.needed == 3 * big.nbytes
    assert event.files == 2

    own.zero_()
    flip(path / "checkpoint_1.safetensors", -1)
    with pytest.raises(IntegrityError):
        aiockpt.load(path, into={"w": own})
    with pytest.raises(RankValuesError) as caught:
        aiockpt.load(path, into={"w": own}, verify="none")
    assert caught.value.paths == ["w"]
    aiockpt.load(path, into={"w": own}, verify="none", rank_values="keep")
    assert not own.any()


def test_two_tensors_of_one_memory_on_other_meshes(tmp_path: Path) -> None:
    """The order of the ranks decides what each has."""

    def state_of(_: int) -> Any:
        a = distributed(ROWS, flat(2), Shard(0))
        mesh = DeviceMesh("cpu", [1, 0])
        b = DTensor.from_local(a.to_local(), mesh, [Shard(0)], run_check=False)
        return {"a": a, "b": b}

    found = aiockpt.load(assembled(tmp_path / "s", 2, state_of))
    assert torch.equal(found["a"], ROWS)
    assert torch.equal(found["b"], ROWS.roll(2, 0))


def with_attributes(rank: int) -> Any:
    """Return an OrderedDict as `Module.state_dict` makes it."""
    made: Any = OrderedDict(a=1)
    vars(made)["_metadata"] = {"rank": rank}
    return made


FACTORIES: list[Any] = [dict, list]

FRAMES: dict[str, Any] = {
    "attributes": with_attributes,
    "kind": lambda rank: {"a": 1} if rank else OrderedDict(a=1),
    "factory": lambda rank: defaultdict(FACTORIES[rank % 2], a=1),
    "length": lambda rank: deque([1, 2], maxlen=2 + rank),
}


@pytest.mark.parametrize("name", FRAMES)
def test_containers_that_differ(tmp_path: Path, name: str) -> None:
    """Their kind and their attributes are values, too."""
    path = assembled(tmp_path / "s", 3, lambda rank: {"m": FRAMES[name](rank)})
    with pytest.raises(RankValuesError) as caught:
        aiockpt.load(path)
    assert caught.value.paths == ["m"]
    found, expected = aiockpt.load(path, rank_values=1)["m"], FRAMES[name](1)
    assert type(found) is type(expected)
    assert found == expected
    for each in ("_metadata", "default_factory", "maxlen"):
        assert getattr(found, each, None) == getattr(expected, each, None)


@pytest.mark.parametrize("kind", [tuple, deque, lambda items: Pair(*items)])
def test_structures_of_plain_tensors_fill_shards(tmp_path: Path, kind: Any) -> None:
    """Nested lists of local tensors fill shards at any depth."""
    path = assembled(tmp_path / "s", 1, lambda _: {"t": kind([ROWS, ROWS + 1])})
    for rank in range(2):
        with as_rank(rank, 2):
            made = [distributed(torch.zeros(4, 2), flat(2), Shard(0)) for _ in "ab"]
            aiockpt.load(path, into={"t": kind(made)})
            for at, each in enumerate(made):
                expected = (ROWS + at)[2 * rank : 2 * rank + 2]
                assert torch.equal(each.to_local(), expected)


def test_a_named_tuple_of_tensors_is_filled_in_place(tmp_path: Path) -> None:
    """A named tuple that has only tensors is filled, too."""
    path = assembled(tmp_path / "s", 1, lambda _: {"x": Pair(ROWS, ROWS + 1)})
    own = Pair(torch.zeros(4, 2), torch.zeros(4, 2))
    found = aiockpt.load(path, into={"x": own})
    assert found["x"].a is own.a
    assert torch.equal(own.a, ROWS)
    assert torch.equal(own.b, ROWS + 1)


class TestDottedNames:
    """Other tools save flat names, which are paths of a template."""

    def test_a_template_of_dicts(self, tmp_path: Path) -> None:
        """The paths of nested dicts match flat names."""
        file = tmp_path / "m.safetensors"
        save_file({"model.w.0": ROWS, "model.b": ROWS + 1, "c": ROWS + 2}, file)
        into: dict[str, Any] = {
            "model": {"w": {0: torch.zeros(4, 2)}, "b": torch.zeros(4, 2)},
            "c": torch.zeros(4, 2),
        }
        aiockpt.load(file, into=into)
        assert torch.equal(into["model"]["w"][0], ROWS)
        assert torch.equal(into["model"]["b"], ROWS + 1)
        assert torch.equal(into["c"], ROWS + 2)

    def test_two_paths_of_one_name(self, tmp_path: Path) -> None:
        """The load refuses them instead of guessing one."""
        file = tmp_path / "m.safetensors"
        save_file({"model.w.b": ROWS, "x": ROWS + 1}, file)
        into: dict[str, Any] = {
            "model": {"w.b": torch.zeros(4, 2), "w": {"b": torch.ones(4, 2)}},
            "x": torch.zeros(4, 2),
        }
        with pytest.raises(TemplateMismatchError, match=r"model\.w\.b"):
            aiockpt.load(file, into=into)
        assert not into["x"].any()

    def test_our_own_files_have_paths(self, tmp_path: Path) -> None:
        """A name with dots is another key there."""
        path = assembled(tmp_path / "s", 1, lambda _: {"a.b": ROWS, "c": 1})
        with pytest.raises(MissingKeysError):
            aiockpt.load(path, into={"a": {"b": torch.zeros(4, 2)}, "c": 0})


class TestTiesOfOtherTools:
    """They write a tied tensor twice, or under one of its names."""

    @pytest.mark.parametrize("names", [["e", "h"], ["e"], ["h"]])
    @pytest.mark.parametrize("form", ["file", "directory", "dcp"])
    def test_a_tied_template(self, tmp_path: Path, names: list[str], form: str) -> None:
        """Plain or in shards; nothing is lost."""
        path = tmp_path / "m.safetensors"
        state = {**{name: ROWS.clone() for name in names}, "w": ROWS + 1}
        if form == "file":
            save_file(state, path)
        elif form == "directory":
            path.mkdir()
            for name, tensor in state.items():
                save_file({name: tensor}, path / f"{name}.safetensors")
        else:
            with as_rank(0, 1):
                save_dcp(state, checkpoint_id=path)
        own = torch.zeros(4, 2)
        into = {"e": own, "w": torch.zeros(4, 2), "h": torch.nn.Parameter(own)}
        aiockpt.load(path, into=into)
        assert torch.equal(own, ROWS)
        assert torch.equal(into["w"], ROWS + 1)
        with as_rank(1, 2):
            cut = distributed(torch.zeros(4, 2), flat(2), Shard(0))
            aiockpt.load(path, into={"e": cut, "h": cut})
            assert torch.equal(cut.to_local(), ROWS[2:])

    def test_two_values_for_one_memory(self, tmp_path: Path) -> None:
        """The load refuses them, since one of them would be lost."""
        path = tmp_path / "m.safetensors"
        save_file({"e": ROWS, "h": ROWS + 1}, path)
        own = torch.zeros(4, 2)
        with pytest.raises(TemplateMismatchError, match="shared with e"):
            aiockpt.load(path, into={"e": own, "h": own})
        assert not own.any()


def test_a_tensor_of_one_element_with_a_stride(tmp_path: Path) -> None:
    """The load accepts it, since torch calls it contiguous."""

    def state_of(rank: int) -> Any:
        return {"w": torch.arange(8)[rank : rank + 4 : 4], "x": torch.zeros(3)}

    path = assembled(tmp_path / "s", 2, state_of)
    with pytest.raises(RankValuesError) as caught:
        aiockpt.load(path)
    assert caught.value.paths == ["w"]
    assert aiockpt.load(path, rank_values=1)["w"].tolist() == [1]


def test_nothing_is_left_to_keep(tmp_path: Path) -> None:
    """The message does not name the option that was given."""
    path = assembled(tmp_path / "s", 2, lambda rank: {"rank": rank})
    with pytest.raises(RankValuesError, match="cannot be kept") as caught:
        aiockpt.load(path, rank_values="keep")
    assert '"keep"' not in str(caught.value)


def test_lists_of_other_lengths(tmp_path: Path) -> None:
    """The chosen rank has the length; parts of its items come from all files."""

    def state_of(rank: int) -> Any:
        whole = distributed(ROWS, flat(2), Shard(0))
        return {"parts": [whole for _ in range(1 + rank)]}

    path = assembled(tmp_path / "s", 2, state_of)
    with pytest.raises(RankValuesError, match="parts"):
        aiockpt.load(path)
    (only,) = aiockpt.load(path, rank_values=0)["parts"]
    assert torch.equal(only, ROWS)


def test_an_empty_tensor_is_not_blamed(tmp_path: Path) -> None:
    """`mmap=True` names the first tensor that it cannot map."""

    def state_of(_: int) -> Any:
        none = distributed(torch.empty(0, 2), flat(2), Shard(0))
        return {"none": none, "w": distributed(ROWS, flat(2), Shard(0))}

    path = assembled(tmp_path / "s", 2, state_of)
    with pytest.raises(StateDictError, match=r"^w is put together"):
        aiockpt.load(path, mmap=True)


def test_a_file_of_torch_tells_its_load(tmp_path: Path) -> None:
    """A file of torch emits the event of a load, as all files do."""
    torch.save({"a": 1}, tmp_path / "m.pt")
    events: list[TransferEvent] = []
    remove = add_hook(events.append)
    try:
        aiockpt.load(tmp_path / "m.pt")
    finally:
        remove()
    (event,) = events
    assert (event.stop, event.detail) == ("load", str(tmp_path / "m.pt"))
