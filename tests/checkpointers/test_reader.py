"""Loading: whole, in place, in part, onto a device, mapped, from other tools' files."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import gc
import io
import itertools
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from aiockpt import HTTPTransport, Progress, Server
from aiockpt.checkpointers import peer as peers
from aiockpt.checkpointers import reader, sources
from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.reader import CheckpointReader, device_of
from aiockpt.errors import (
    AuthenticationError,
    CheckpointNotFoundError,
    IntegrityError,
    LocalProtocolError,
    MissingKeysError,
    StepNotFoundError,
    StorageError,
    TemplateMismatchError,
    TransferTimeoutError,
    WorldSizeMismatchError,
)
from aiockpt.format.limits import Limits
from aiockpt.memory.arena import Arena
from aiockpt.runtime.lifetime import Deadline
from aiockpt.storage import directory
from aiockpt.storage.directory import MARKER
from aiockpt.testing import assert_same
from tests.support.accelerators import FakeAccelerator
from tests.support.commandline import beside
from tests.support.proofs import proves
from tests.support.rangepeer import RangePeer, serving
from tests.support.saved import (
    ALONE,
    CHUNK,
    flip,
    load,
    read,
    run_beside,
    save,
    save_by_two,
    sync_checkpointer,
    training_state,
)
from tests.support.states import State, states

FILE = "checkpoint_0.safetensors"
WAYS: list[dict[str, Any]] = [
    {},
    {"verify": "none"},
    {"mmap": True},
    {"mmap": True, "verify": "none"},
]


def zeroed(state: Any) -> Any:
    """Return the same state dict with zeros in its tensors."""
    template = copy.deepcopy(state)
    for tensor in tensors_of(template):
        tensor.detach().zero_()
    return template


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a state dict."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


class TestWhole:
    """Without a template everything is loaded."""

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_what_was_saved_comes_back(
        self, tmp_path: Path, way: dict[str, Any]
    ) -> None:
        """Bit by bit, ties and all."""
        state = training_state()
        assert_same(load(save(tmp_path / "s", state), **way), state)

    def test_nothing_is_missing(self, tmp_path: Path) -> None:
        """The second of what `read` returns is empty."""
        assert read(save(tmp_path / "s", {"a": 1})) == ({"a": 1}, [])

    @pytest.mark.parametrize("rank", [0, 1])
    def test_as_many_ranks_load_it_as_have_saved_it(
        self, tmp_path: Path, rank: int
    ) -> None:
        """Or each would have a part, and nobody would say that the rest is missing."""
        pair = save_by_two(tmp_path / "pair")
        alone = save(tmp_path / "alone", {"a": 1})
        with pytest.raises(WorldSizeMismatchError) as caught:
            load(pair)
        assert (caught.value.saved, caught.value.loading) == (2, 1)
        assert "2 ranks wrote it, each its own part, and 1 rank" in str(caught.value)
        with pytest.raises(WorldSizeMismatchError, match=r"1 rank wrote .* 2 ranks "):
            CheckpointReader(RankInfo(rank, 2)).read(alone)
        assert CheckpointReader(RankInfo(rank, 2)).read(pair)[0] == {"rank": rank}

    def test_a_part_may_be_named(self, tmp_path: Path) -> None:
        """Then the numbers do not matter; nor do they for a file."""
        pair = save_by_two(tmp_path / "pair")
        alone = save(tmp_path / "alone", {"a": 1})
        assert [load(pair, rank=rank) for rank in (0, 1)] == [{"rank": 0}, {"rank": 1}]
        assert CheckpointReader(RankInfo(1, 2)).read(alone, rank=0)[0] == {"a": 1}
        assert load(pair / "checkpoint_1.safetensors") == {"rank": 1}
        with sync_checkpointer() as checkpointer:
            assert checkpointer.load(pair, rank=1) == {"rank": 1}
        with pytest.raises(CheckpointNotFoundError, match="none of them was rank 2"):
            load(pair, rank=2)

    def test_also_of_the_seeds(self, tmp_path: Path) -> None:
        """Of which some may be on other machines; more than load are refused."""
        for rank in (0, 1):
            torch.save({"rank": rank}, tmp_path / f"checkpoint_{rank}.pt")
        with pytest.raises(WorldSizeMismatchError, match="2 ranks wrote it"):
            load(tmp_path)
        assert load(tmp_path, rank=1) == {"rank": 1}
        for size in (2, 4):
            found, _ = CheckpointReader(RankInfo(1, size)).read(tmp_path)
            assert found == {"rank": 1}

    def test_limits_are_kept(self, tmp_path: Path) -> None:
        """More than that is not read."""
        path = save(tmp_path / "s", training_state())
        reader = CheckpointReader(ALONE, limits=Limits(max_bytes=1000))
        with pytest.raises(StorageError, match="more than the limit of 1000"):
            reader.read(path)

    def test_the_sum_of_what_is_read_is_told(self, tmp_path: Path) -> None:
        """And what the listener raises ends the reading."""
        path = save(tmp_path / "s", {"a": torch.randn(10 * CHUNK)})
        seen: list[int] = []
        load(path, on_bytes=seen.append)
        assert sum(seen) == 40 * CHUNK

        def stop(nbytes: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load(path, on_bytes=stop)


class TestDamage:
    """A flipped bit is noticed (C2)."""

    @proves("cell AsyncCheckpointer.load: error")
    @pytest.mark.parametrize("offset", [9, 300, -1, -CHUNK, -3 * CHUNK])
    @pytest.mark.parametrize("mapped", [False, True])
    def test_anywhere(self, tmp_path: Path, offset: int, mapped: bool) -> None:
        """In the header, and in each chunk."""
        path = save(tmp_path / "s", training_state())
        flip(path / FILE, offset)
        with pytest.raises((IntegrityError, StorageError)) as caught:
            load(path, mmap=mapped)
        assert str(path / FILE) in str(caught.value)
        if offset < 0:
            assert isinstance(caught.value, IntegrityError)

    def test_nothing_is_compared_where_that_is_asked_for(self, tmp_path: Path) -> None:
        """And only there."""
        path = save(tmp_path / "s", {"a": torch.zeros(20 * CHUNK // 4)})
        flip(path / FILE, -3 * CHUNK)
        load(path, verify="none")
        with pytest.raises(IntegrityError):
            load(path)

    @pytest.mark.parametrize("state", [{"a": torch.zeros(3)}, {"a": 1}, {}])
    @pytest.mark.parametrize("mapped", [False, True])
    @pytest.mark.parametrize("word", ["fully", "sampled", True, None])
    def test_another_word_is_refused(
        self, tmp_path: Path, word: Any, state: Any, *, mapped: bool
    ) -> None:
        """Whether or not there is anything to compare."""
        path = save(tmp_path / "s", state)
        with pytest.raises(
            ValueError, match=f"verify is 'full' or 'none', not {word!r}"
        ):
            load(path, verify=word, mmap=mapped)

    def test_a_file_of_another_checkpoint(self, tmp_path: Path) -> None:
        """The marker knows its snapshot."""
        path, other = (save(tmp_path / f"s{i}", {"a": i}) for i in (1, 2))
        os.replace(other / FILE, path / FILE)
        with pytest.raises(IntegrityError, match="the header"):
            load(path)

    @proves("cell AsyncCheckpointer.load, state_dict=: error")
    def test_a_template_is_told_of(self, tmp_path: Path) -> None:
        """Its tensors may hold bytes of the damaged chunk."""
        state = {"a": torch.randn(3 * CHUNK), "n": 5}
        path = save(tmp_path / "s", state)
        flip(path / FILE, -1)
        template = {"a": torch.zeros(3 * CHUNK), "n": 0}
        with pytest.raises(IntegrityError) as caught:
            load(path, template)
        assert caught.value.__notes__ == ["the template was modified"]
        assert template["n"] == 0


class TestFailingDisk:
    """What cannot be read is an error of storage, wherever it fails."""

    @pytest.mark.parametrize("call", ["pread", "preadv", "scandir", "stat", "open"])
    @pytest.mark.parametrize("held", [False, True])
    def test_at_each_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, held: bool
    ) -> None:
        """It is typed, names the file, and says what became of the template."""
        path = save(tmp_path / "s", training_state(), chunk_bytes=CHUNK)
        place = io if call == "open" else os
        real = getattr(place, call)
        for number in itertools.count():
            left = [number]

            def failing(*args: Any, left: list[int] = left, **more: Any) -> Any:
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args, **more)

            monkeypatch.setattr(place, call, failing)
            template = zeroed(training_state()) if held else None
            try:
                found = load(path, template)
            except StorageError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017 - or it goes on
            else:
                assert_same(found, training_state())
            finally:
                monkeypatch.undo()
            if left[0] >= 0:
                break


class TestReplaced:
    """What is loaded is one checkpoint, although another takes its name meanwhile."""

    @pytest.mark.parametrize("how", [*WAYS, {"gone": True}])
    def test_while_it_is_read(self, tmp_path: Path, how: dict[str, Any]) -> None:
        """Its file was opened once, and is read to the end."""
        path = save(tmp_path / "s-1", {"a": torch.ones(CHUNK), "step": 1})
        how = dict(how)
        gone = how.pop("gone", False)

        def select(name: str) -> bool:
            """Replace it when its header was read, and nothing else."""
            if name == "a" and gone:
                save(tmp_path / "s-2", {"a": 2}, keep_last=1)
            elif name == "a":
                save(path, {"a": torch.zeros(CHUNK), "step": 1})
            return True

        assert_same(
            load(path, select=select, **how), {"a": torch.ones(CHUNK), "step": 1}
        )
        assert path.exists() is not gone

    @pytest.mark.parametrize("size", [1, CHUNK])
    def test_between_its_marker_and_its_file(
        self, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It begins again, with the new one."""
        path = save(tmp_path / "s-1", {"a": torch.zeros(CHUNK)})
        found = directory.checkpoint_at

        def checkpoint_at(place: Path) -> Any:
            checkpoint = found(place)
            monkeypatch.undo()
            save(path, {"a": torch.ones(size)})
            return checkpoint

        monkeypatch.setattr(sources, "checkpoint_at", checkpoint_at)
        assert_same(load(path), {"a": torch.ones(size)})

    def test_between_its_marker_and_its_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is always a whole one of this name."""
        path = save(tmp_path / "s-1", {"a": torch.zeros(CHUNK)})
        read_marker = directory._read_marker

        def replace(marker: Path) -> Any:
            commit = read_marker(marker)
            monkeypatch.undo()
            save(path, {"a": 1})
            return commit

        monkeypatch.setattr(directory, "_read_marker", replace)
        assert directory.checkpoint_at(path).path == path


class TestTemplate:
    """Only the template's keys are read, into its tensors."""

    @proves("cell AsyncCheckpointer.load, state_dict=: success")
    def test_in_place(self, tmp_path: Path) -> None:
        """The same dicts and tensors come back, filled."""
        state = training_state()
        path = save(tmp_path / "s", state)
        template = zeroed(state)
        ids = [id(tensor) for tensor in tensors_of(template)]
        found, missing = read(path, template)
        assert found is template
        assert missing == []
        assert [id(tensor) for tensor in tensors_of(found)] == ids
        assert_same(found, state)

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_some_keys(self, tmp_path: Path, way: dict[str, Any]) -> None:
        """What is not asked for is not there; None takes what there is."""
        state = training_state()
        path = save(tmp_path / "s", state)
        template = {
            "model": {"norm.bias": torch.zeros(256, dtype=torch.float64)},
            "optimizer": {"state": {1: None}, "param_groups": None},
            "step": None,
        }
        found = load(path, template, **way)
        assert torch.equal(found["model"]["norm.bias"], state["model"]["norm.bias"])
        assert list(found["model"]) == ["norm.bias"]
        assert list(found["optimizer"]["state"]) == [1]
        expected = state["optimizer"]["state"][1]["exp_avg"]
        assert torch.equal(found["optimizer"]["state"][1]["exp_avg"], expected)
        assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
        assert found["step"] == 100

    def test_no_more_is_read_than_its_chunks(self, tmp_path: Path) -> None:
        """One of many tensors costs its own bytes (C12)."""
        state = {f"{i}": torch.full((CHUNK // 2,), float(i)) for i in range(20)}
        path = save(tmp_path / "s", state)
        seen: list[int] = []
        found = load(path, {"7": torch.zeros(CHUNK // 2)}, on_bytes=seen.append)
        assert torch.equal(found["7"], state["7"])
        assert sum(seen) == 2 * CHUNK
        seen.clear()
        template = {"7": torch.zeros(CHUNK // 2)}
        load(path, template, on_bytes=seen.append, verify="none")
        assert sum(seen) == 2 * CHUNK
        flip(path / FILE, -1)  # what is not read is not verified either
        load(path, template)

    def test_missing_keys_are_listed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As dotted paths; the rest is loaded, and a warning says so."""
        path = save(tmp_path / "s", {"a": {"b": 1, "l": [{"x": 1}]}, "t": 2})
        template = {
            "a": {"b": 0, "c": 5, "l": [{"x": 0, "y": 7}]},
            "t": 0,
            "u": {"v": 1},
            3: None,
        }
        with caplog.at_level(logging.WARNING):
            found, missing = read(path, template)
        assert missing == ["a.c", "a.l[0].y", "u", "3"]
        assert found == {
            "a": {"b": 1, "c": 5, "l": [{"x": 1, "y": 7}]},
            "t": 2,
            "u": {"v": 1},
            3: None,
        }
        assert "is missing keys: a.c, a.l[0].y, u, 3" in caplog.text

    def test_strict_refuses_them(self, tmp_path: Path) -> None:
        """Before anything is changed; a RuntimeError that names them."""
        path = save(tmp_path / "s", {"a": torch.ones(3), "n": 1})
        template: dict[str, Any] = {"a": torch.zeros(3), "n": 0, "b": None}
        with pytest.raises(MissingKeysError, match="is missing keys: b") as caught:
            load(path, template, strict=True)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.keys == ["b"]
        with pytest.raises(MissingKeysError, match="is missing keys: c"):
            load(path, select=["a", "c"], strict=True)
        with pytest.raises(TemplateMismatchError, match="n"):
            load(path, {"a": template["a"]}, select=["a", "n"], strict=True)
        assert template["a"].tolist() == [0, 0, 0]
        assert template["n"] == 0
        with sync_checkpointer() as checkpointer:
            with pytest.raises(RuntimeError, match="missing keys"):
                checkpointer.load(path, template, strict=True)
            assert checkpointer.load(path, template)["n"] == 1

    @pytest.mark.parametrize(
        ("wrong", "expected", "actual"),
        [
            (torch.zeros(4), "float32 [3]", "float32 [4]"),
            (torch.zeros(3).double(), "float32 [3]", "float64 [3]"),
            (5, "float32 [3]", "a int"),
            ({}, "float32 [3]", "a dict"),
        ],
    )
    def test_what_does_not_fit(
        self, tmp_path: Path, wrong: Any, expected: str, actual: str
    ) -> None:
        """Size, dtype and type are compared, before anything is changed."""
        path = save(tmp_path / "s", {"m": {"ok": torch.ones(2), "a": torch.ones(3)}})
        template = {"m": {"ok": torch.zeros(2), "a": wrong}}
        with pytest.raises(TemplateMismatchError) as caught:
            load(path, template)
        error = caught.value
        assert (error.path, error.expected, error.actual) == ("m.a", expected, actual)
        assert template["m"]["ok"].tolist() == [0, 0]

    @pytest.mark.parametrize(
        ("saved", "template"),
        [
            ({"a": 1}, {"a": torch.zeros(1)}),
            ({"a": [1]}, {"a": {"b": 1}}),
            ({"a": {"b": 1}}, {"a": [1]}),
            ({"a": 1}, {"a": "text"}),
            ({"a": [1]}, {"a": [1, 2]}),
        ],
    )
    def test_values_of_another_type(
        self, tmp_path: Path, saved: Any, template: Any
    ) -> None:
        """Are refused by their path."""
        with pytest.raises(TemplateMismatchError, match=r"template a"):
            load(save(tmp_path / "s", saved), template)

    def test_lists_grow(self, tmp_path: Path) -> None:
        """By what the checkpoint has more."""
        path = save(tmp_path / "s", {"l": [torch.ones(2), 5, {"x": 1}]})
        template = {"l": [torch.zeros(2), None]}
        first = template["l"][0]
        found = load(path, template)
        assert found["l"][0] is first
        assert first.tolist() == [1, 1]
        assert found["l"][1:] == [5, {"x": 1}]

    def test_other_layouts_are_filled_by_value(self, tmp_path: Path) -> None:
        """Transposed, sliced, expanded, conjugated ones, and those on ``meta``."""
        torch.manual_seed(1)
        state = {name: torch.randn(6, 4) for name in ("t", "s", "meta")}
        state["c"] = torch.randn(6, 4, dtype=torch.complex64)
        state["e"] = torch.randn(1, 4).expand(6, 4)
        path = save(tmp_path / "s", state)
        template = {
            "t": torch.zeros(4, 6).t(),
            "s": torch.zeros(12, 8)[::2, ::2],
            "meta": torch.empty(6, 4, device="meta"),
            "c": torch.zeros(6, 4, dtype=torch.complex64).conj(),
            "e": torch.zeros(1, 4).expand(6, 4),
        }
        found = load(path, template)
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor), name
        assert found["t"].stride() == (1, 6)

    def test_equal_layouts_need_no_copy(self, tmp_path: Path) -> None:
        """Also if they are not contiguous."""
        state = {"a": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)}
        path = save(tmp_path / "s", state)
        template = {"a": torch.zeros_like(state["a"])}
        assert_same(load(path, template), state)

    def test_memory_that_is_shared_on_one_side_only(self, tmp_path: Path) -> None:
        """Each tensor gets its own elements; what a template ties gets the last."""
        one = torch.randn(4, 4)
        path = save(tmp_path / "s", {"a": one, "tied": one, "row": one[1], "b": -one})
        apart = {
            "a": torch.zeros(4, 4),
            "tied": torch.zeros(4, 4),
            "row": torch.zeros(4),
            "b": torch.zeros(4, 4),
        }
        found = load(path, apart)
        assert torch.equal(found["a"], one)
        assert torch.equal(found["tied"], one)
        assert torch.equal(found["row"], one[1])
        both = torch.zeros(4, 4)
        found = load(path, {"a": both, "b": both})
        assert torch.equal(both, -one)

    def test_autograd_notices(self, tmp_path: Path) -> None:
        """A filled tensor counts as changed in place."""
        path = save(tmp_path / "s", {"w": torch.ones(3)})
        weight = torch.nn.Parameter(torch.full((3,), 2.0))
        loss = (weight * weight).sum()
        load(path, {"w": weight})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @given(state=states())
    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
    )
    def test_any_state_dict(self, tmp_path: Path, state: State) -> None:
        """Loaded into zeros of the same form, it is the same."""
        plain = dict(state)
        path = save(tmp_path / "s", plain)
        found = load(path, dict.fromkeys(plain))
        assert_same(found, plain)


class TestSelect:
    """Only what is selected, and what is below it."""

    @pytest.mark.parametrize("strict", [False, True])
    def test_names_may_come_only_once(self, tmp_path: Path, strict: bool) -> None:
        """From an iterator; a template of what it names is filled."""
        path = save(tmp_path / "s", {"a": torch.ones(3), "b": torch.ones(3)})
        template = {"a": torch.zeros(3)}
        load(path, template, select=iter(["a"]), strict=strict)
        assert_same(template, {"a": torch.ones(3)})
        assert_same(load(path, select=iter(["b"])), {"b": torch.ones(3)})

    def test_by_paths(self, tmp_path: Path) -> None:
        """Those that are not there are missing."""
        state = training_state()
        path = save(tmp_path / "s", state)
        wanted = ["model.nor", "optimizer.state.1", "step", "x.y", "model.half"]
        found, missing = read(path, select=wanted)
        assert missing == ["model.nor", "x.y"]
        expected = {
            "model": OrderedDict(half=state["model"]["half"]),
            "optimizer": {"state": {1: state["optimizer"]["state"][1]}},
            "step": 100,
        }
        assert_same(found, expected)

    def test_inside_of_keys_with_dots(self, tmp_path: Path) -> None:
        """A flat state dict has its dots in the keys."""
        state = {"layers.0.w": 1, "layers.0.b": 2, "layers.10.w": 3}
        path = save(tmp_path / "s", state)
        found = load(path, select=["layers.0"])
        assert found == {"layers.0.w": 1, "layers.0.b": 2}

    def test_by_a_function(self, tmp_path: Path) -> None:
        """Asked for every value."""
        path = save(tmp_path / "s", {"a": {"w": 1, "b": 2}, "w": [3, {"w": 4, "c": 5}]})
        found = load(path, select=lambda path: path.endswith("w") or "[0]" in path)
        assert found == {"a": {"w": 1}, "w": [3, {"w": 4}]}

    def test_nothing(self, tmp_path: Path) -> None:
        """Is an empty dict."""
        assert load(save(tmp_path / "s", {"a": 1}), select=[]) == {}

    def test_a_string_is_a_mistake(self, tmp_path: Path) -> None:
        """Its letters would be taken for paths."""
        with pytest.raises(TypeError, match="list of paths"):
            load(save(tmp_path / "s", {"a": 1}), select="a")

    def test_of_a_template(self, tmp_path: Path) -> None:
        """The other keys keep what they have, and are not missing."""
        path = save(tmp_path / "s", {"a": {"x": torch.ones(2), "n": 1}, "b": [2, 3]})
        template = {"a": {"x": torch.zeros(2), "n": 0, "z": 9}, "b": [0, 0], "c": 9}
        found, missing = read(path, template, select=["a.x", "b[1]"])
        assert missing == []
        assert found["a"]["x"].tolist() == [1, 1]
        assert (found["a"]["n"], found["b"], found["c"]) == (0, [0, 3], 9)


class TestDevice:
    """Tensors without a place in a template go to ``map_location``."""

    @pytest.mark.parametrize("way", WAYS, ids=str)
    def test_all_of_it(
        self, tmp_path: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Through pinned memory; what shares memory shares it there."""
        state = training_state()
        path = save(tmp_path / "s", state)
        device = FakeAccelerator(held=False)
        monkeypatch.setattr(reader, "device_of", lambda _: torch.device("cpu"))
        loader = CheckpointReader(ALONE, ports=device.port_for)
        found, _ = loader.read(path, map_location="fake", **way)
        assert_same(found, state)
        assert not device.pinned  # any more
        assert device.copied

    @pytest.mark.parametrize("held", [False, True])
    def test_a_template_on_it(self, tmp_path: Path, held: bool) -> None:
        """Its bytes are copied to it while the next ones are read."""
        state = {**training_state(), "large": torch.randn(40 * CHUNK)}
        path = save(tmp_path / "s", state)
        device = FakeAccelerator(held=held)
        loader = CheckpointReader(ALONE, ports=device.port_for)
        template = zeroed(state)
        found, _ = run_beside(device, lambda: loader.read(path, template))
        assert_same(found, state)
        assert device.copied
        assert not device.pinned

    def test_meta_has_no_bytes(self, tmp_path: Path) -> None:
        """Shapes and dtypes alone, of which nothing is read."""
        path = save(tmp_path / "s", training_state(), chunk_bytes=CHUNK)
        seen: list[int] = []
        found = load(path, map_location="meta", on_bytes=seen.append)
        assert found["model"]["embed.weight"].is_meta
        assert found["model"]["embed.weight"].shape == (128, 256)
        assert sum(seen) <= 2 * CHUNK  # of what values are made

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (None, None),
            ("cpu", None),
            ("meta", "meta"),
            (torch.device("meta"), "meta"),
            ({"cpu": "meta"}, "meta"),
            ({"cuda:0": "meta"}, None),
            (lambda storage, location: storage, None),
            (lambda storage, location: None, None),
        ],
    )
    def test_all_that_torch_takes(self, given: Any, expected: str | None) -> None:
        """Names, devices, dicts of them, and functions."""
        found = device_of(given)
        assert (found and found.type) == expected


class TestMapped:
    """``mmap=True`` maps the file and copies nothing."""

    def test_writing_leaves_the_file_alone(self, tmp_path: Path) -> None:
        """The mapping is private."""
        path = save(tmp_path / "s", {"a": torch.zeros(CHUNK)})
        before = (path / FILE).read_bytes()
        load(path, mmap=True)["a"].add_(1)
        assert (path / FILE).read_bytes() == before
        assert load(path)["a"].sum() == 0

    def test_it_outlives_the_checkpoint(self, tmp_path: Path) -> None:
        """A replaced file keeps its pages while they are used."""
        path = save(tmp_path / "s", {"a": torch.ones(CHUNK)})
        found = load(path, mmap=True, verify="none")
        save(path, {"a": torch.zeros(CHUNK)})
        assert found["a"].sum() == CHUNK


class TestOtherTools:
    """Files that aiockpt did not write."""

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_checkpoint_of_the_predecessor(
        self, tmp_path: Path, zipped: bool
    ) -> None:
        """``checkpoint_{rank}.pt``, without running what is in it."""
        state = training_state()
        del state["rng"]
        (tmp_path / "s").mkdir()
        file = tmp_path / "s" / "checkpoint_0.pt"
        torch.save(state, file, _use_new_zipfile_serialization=zipped)
        assert_same(load(tmp_path / "s"), state)
        assert_same(load(file), state)
        template = zeroed(state)
        found, missing = read(tmp_path / "s", template)
        assert missing == []
        assert found["model"]["embed.weight"] is template["model"]["embed.weight"]
        assert_same(found, state)
        assert read(tmp_path / "s", {"q": 1, "step": 0})[1] == ["q"]
        file.unlink()
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "s")

    def test_its_bytes_are_copied(self, tmp_path: Path) -> None:
        """Unless they are to be mapped."""
        torch.save({"a": torch.ones(1000)}, tmp_path / "f.pt")
        loaded = load(tmp_path / "f.pt"), load(tmp_path / "f.pt", mmap=True)
        with (tmp_path / "f.pt").open("r+b") as file:
            file.write(bytes(5000))  # in place, under the mapping
        assert loaded[0]["a"].sum() == 1000
        assert loaded[1]["a"].sum() < 1000

    def test_code_in_it_is_not_run(self, tmp_path: Path) -> None:
        """It is refused."""
        torch.save({"a": _Evil()}, tmp_path / "checkpoint_0.pt")
        with pytest.raises(StorageError, match=r"it holds a posix\.system"):
            load(tmp_path)

    def test_a_safetensors_file(self, tmp_path: Path) -> None:
        """Whole, or the keys of a template."""
        state = {"x.w": torch.randn(3, 4).half(), "y": torch.arange(5)}
        save_file(state, tmp_path / "model.safetensors")
        found = load(tmp_path / "model.safetensors", select=["x", "y"])
        assert_same({name: found[name] for name in state}, state)
        template = {"y": torch.zeros(5, dtype=torch.int64)}
        assert load(tmp_path / "model.safetensors", template)["y"].tolist() == [
            *range(5)
        ]

    @pytest.mark.parametrize("indexed", [False, True])
    def test_a_directory_of_shards(self, tmp_path: Path, indexed: bool) -> None:
        """All that are in its index, or all that there are."""
        shards = {
            "1": {"x": torch.ones(3)},
            "2": {"y": torch.ones(2), "z": torch.ones(1)},
        }
        for name, shard in shards.items():
            save_file(shard, tmp_path / f"model-{name}.safetensors")
        if indexed:
            save_file({"old": torch.ones(9)}, tmp_path / "old.safetensors")
            listed = {k: f"model-{n}.safetensors" for n, s in shards.items() for k in s}
            index = json.dumps({"metadata": {}, "weight_map": listed})
            (tmp_path / "model.safetensors.index.json").write_text(index)
        found = load(tmp_path)
        assert sorted(found) == ["x", "y", "z"]
        assert found["y"].tolist() == [1, 1]
        template = {"z": torch.zeros(1), "q": None}
        assert read(tmp_path, template) == ({"z": torch.ones(1), "q": None}, ["q"])

    @pytest.mark.parametrize(
        ("index", "reason"),
        [("{", "no index of shards"), ('{"weight_map": {"a": "b"}}', "names b")],
    )
    def test_a_bad_index(self, tmp_path: Path, index: str, reason: str) -> None:
        """Is named."""
        save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(StorageError, match=reason):
            load(tmp_path)

    def test_rank_files_without_a_marker_are_no_shards(self, tmp_path: Path) -> None:
        """They are what is left of a save that failed."""
        path = save(tmp_path / "s", {"a": torch.ones(2)})
        (path / MARKER).unlink()
        (path / FILE).rename(path / "checkpoint_1.safetensors")
        save_file({"x": torch.ones(3)}, path / "model.safetensors")
        with pytest.raises(CheckpointNotFoundError, match="no marker"):
            load(path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@contextlib.asynccontextmanager
async def served(state: Any) -> AsyncIterator[str]:
    """Serve a state dict as step 100; give the metadata."""
    async with HTTPTransport(
        chunk_bytes=CHUNK, server=Server(host="127.0.0.1")
    ) as transport:
        transport_any: Any = transport
        await transport_any.send_checkpoint([1], 100, state)
        yield transport.metadata()


class TestPeer:
    """Straight from who serves it."""

    def test_all_that_a_file_can(self, tmp_path: Path) -> None:
        """Whole, in place, and in part."""
        state = training_state()
        with beside(served(state)) as metadata:
            base, _, token = metadata.partition("#")
            url = f"{base}100#{token}"
            assert_same(load(url), state)
            assert_same(load(metadata), state)
            template = zeroed(state)
            found, missing = read(url, {**template, "q": 1})
            assert missing == ["q"]
            assert found["model"]["embed.weight"] is template["model"]["embed.weight"]
            assert_same(found, {**state, "q": 1})
            seen: list[int] = []
            found = load(url, select=["model.norm.bias"], on_bytes=seen.append)
            assert torch.equal(found["model"]["norm.bias"], state["model"]["norm.bias"])
            assert sum(seen) < 3 * CHUNK

    def test_beside_a_running_loop(self, tmp_path: Path) -> None:
        """Which stands still meanwhile."""

        async def main(url: str) -> Any:
            return load(url)

        with beside(served({"a": 1})) as metadata:
            assert asyncio.run(main(metadata)) == {"a": 1}

    def test_its_memory_is_free_with_the_last_name_of_it(self) -> None:
        """And not when the collector runs."""

        def arenas() -> int:
            found = (each for each in gc.get_objects() if isinstance(each, Arena))
            return sum(not arena.closed for arena in found)

        with beside(served({"a": torch.ones(100_000)})) as metadata:
            gc.collect()
            gc.disable()
            try:
                before = arenas()
                assert set(load(metadata)) == {"a"}
                assert arenas() == before
            finally:
                gc.enable()

    def test_onto_a_device(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By way of host memory."""
        state = training_state()
        device = FakeAccelerator(held=False)
        monkeypatch.setattr(reader, "device_of", lambda _: torch.device("cpu"))
        with beside(served(state)) as metadata:
            loader = CheckpointReader(ALONE, ports=device.port_for)
            assert_same(loader.read(metadata, map_location="fake")[0], state)
        assert device.copied

    @pytest.mark.parametrize(
        ("refused", "status", "doing"),
        [
            ("", 502, "waiting for a checkpoint"),
            ("7/metadata", 404, "waiting for step 7"),
            ("7/full", 502, "fetching step 7"),
        ],
    )
    def test_a_peer_that_never_gives_anything_new_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, status: int, doing: str
    ) -> None:
        """Though it answers each request; the error tells its last answer."""
        monkeypatch.setattr(peers, "_IDLE_LIMIT", 0.5)

        async def meddle(
            peer: RangePeer, request: web.Request
        ) -> web.StreamResponse | None:
            if refused in request.path:
                return web.Response(status=status)
            if not request.path.endswith("latest"):
                return None
            tag = f'"{peer.manifest.snapshot_id}"'
            return web.Response(headers={"ETag": tag, "Aiockpt-Step": "7"})

        @contextlib.asynccontextmanager
        async def refusing() -> AsyncIterator[str]:
            async with serving(bytes(1000), meddle=meddle) as peer:
                yield peer.base_url

        with beside(refusing()) as url:
            begun = time.monotonic()
            with pytest.raises(TransferTimeoutError, match=doing) as caught:
                load(url)
            assert time.monotonic() - begun < 10
        assert url in caught.value.last_error

    def test_a_newer_step_has_its_own_time(self) -> None:
        """What came of the step before it does not count."""

        async def main() -> None:
            async with Deadline(60, stop="here") as deadline:
                meter = peers._Meter(None, deadline)
                renewed: list[bool] = []
                for step, nbytes in ((1, 900), (1, 500), (2, 100), (2, 50)):
                    meter.begin(step)
                    before = deadline.when
                    await asyncio.sleep(0.01)
                    meter.update(Progress(stop="fetch_chunk", bytes_done=nbytes))
                    renewed.append(deadline.when > before)
                assert renewed == [True, False, True, False]

        asyncio.run(main())

    def test_a_peer_that_is_slow_has_its_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each new byte renews the deadline."""
        monkeypatch.setattr(peers, "_IDLE_LIMIT", 1.0)
        monkeypatch.setattr(peers, "_CONNECTIONS", 1)  # which makes two requests

        async def meddle(peer: RangePeer, request: web.Request) -> None:
            await asyncio.sleep(0.6)

        @contextlib.asynccontextmanager
        async def slow() -> AsyncIterator[str]:
            async with serving(
                bytes(10 * CHUNK), chunk_bytes=CHUNK, meddle=meddle
            ) as peer:
                yield f"{peer.base_url}7"

        with beside(slow()) as url:
            assert not load(url)["weight"].any()

    def test_what_goes_wrong(
        self, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """Is an error of the package, and the secret is in none of them."""
        with beside(served({"a": torch.ones(9)})) as metadata:
            base, _, token = metadata.partition("#")
            with pytest.raises(StepNotFoundError):
                load(f"{base}101#{token}")
            with pytest.raises(AuthenticationError):
                load(f"{base}100")
            with pytest.raises(MissingKeysError) as caught:
                load(metadata, {"b": 1}, strict=True)
            assert token not in str(caught.value)
            assert load(metadata, {"b": 1}) == {"b": 1}
            assert token not in caplog.text

            def stop(nbytes: int) -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                load(metadata, on_bytes=stop)
        with pytest.raises(LocalProtocolError):
            load("http://")
