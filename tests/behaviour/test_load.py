"""Loading: whole, in place, in part, onto a device, mapped, and from a peer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import io
import itertools
import logging
import os
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils import _pytree

import aiockpt
from aiockpt import CheckpointerConfig, Limits, make_async_checkpointer
from aiockpt.checkpointers import CheckpointReader, RankInfo
from aiockpt.errors import (
    AuthenticationError,
    CheckpointNotFoundError,
    IntegrityError,
    LocalProtocolError,
    MissingKeysError,
    StateDictError,
    StepNotFoundError,
    StorageError,
    TemplateMismatchError,
)
from aiockpt.testing import assert_same
from tests.support.commandline import beside
from tests.support.proofs import proves
from tests.support.saving import (
    ALONE,
    CHUNK,
    flip,
    load,
    read,
    save,
    save_by_two,
    sync_checkpointer,
    training_state,
)
from tests.support.states import states
from tests.support.transports import transport

FILE = "checkpoint_0.safetensors"
WAYS = pytest.mark.parametrize(
    "way",
    [{}, {"verify": "none"}, {"mmap": True}, {"mmap": True, "verify": "none"}],
    ids=str,
)


def zeroed(state):
    """Return the same state dict with zeros in its tensors."""
    template = copy.deepcopy(state)
    for tensor in tensors_of(template):
        tensor.detach().zero_()
    return template


def tensors_of(value) -> list[torch.Tensor]:
    """Return all tensors of a state dict."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def stop(_: int) -> None:
    """End a load from its callback."""
    raise KeyboardInterrupt


class TestWhole:
    """A load without a template returns everything."""

    @WAYS
    def test_what_was_saved_comes_back(self, tmp_path, way) -> None:
        """Bit by bit, ties and all; nothing is missing."""
        state = training_state()
        found, missing = read(save(tmp_path / "s", state), **way)
        assert_same(found, state)
        assert missing == []

    def test_a_rank_or_its_file_may_be_named(self, tmp_path) -> None:
        """Then the number of ranks does not matter."""
        pair = save_by_two(tmp_path / "pair")
        alone = save(tmp_path / "alone", {"a": 1})
        two = CheckpointReader(RankInfo(1, 2))
        assert two.read(alone)[0] == two.read(alone, rank=0)[0] == {"a": 1}
        assert load(pair / "checkpoint_1.safetensors") == {"rank": 1}
        with sync_checkpointer() as checkpointer:
            assert checkpointer.load(pair, rank=1) == {"rank": 1}
        with pytest.raises(CheckpointNotFoundError, match="none of them was rank 2"):
            load(pair, rank=2)

    def test_limits_are_kept(self, tmp_path) -> None:
        """A file that exceeds a limit is not read."""
        path = save(tmp_path / "s", training_state())
        reader = CheckpointReader(ALONE, limits=Limits(max_bytes=1000))
        with pytest.raises(StorageError, match="more than the limit of 1000"):
            reader.read(path)


class TestDamage:
    """A flipped bit, a failing disk, and a checkpoint that is replaced meanwhile."""

    @proves("cell AsyncCheckpointer.load: error")
    @pytest.mark.parametrize("offset", [9, 300, -1, -CHUNK, -3 * CHUNK])
    @pytest.mark.parametrize("mapped", [False, True])
    def test_a_flipped_bit_anywhere(self, tmp_path, offset: int, mapped: bool) -> None:
        """A flip in the header or a chunk is found, unless nothing is compared."""
        path = save(tmp_path / "s", training_state())
        flip(path / FILE, offset)
        with pytest.raises((IntegrityError, StorageError)) as caught:
            load(path, mmap=mapped)
        assert str(path / FILE) in str(caught.value)
        if offset < 0:
            assert isinstance(caught.value, IntegrityError)
            load(path, mmap=mapped, verify="none")

    @pytest.mark.parametrize("state", [{"a": torch.zeros(3)}, {"a": 1}, {}])
    def test_another_way_to_verify_is_refused(self, tmp_path, state) -> None:
        """`verify` has two values, also where nothing can be compared."""
        path = save(tmp_path / "s", state)
        for word in ("sampled", True, None):
            known = f"verify is 'full' or 'none', not {word!r}"
            for mapped in (False, True):
                with pytest.raises(ValueError, match=known):
                    load(path, verify=word, mmap=mapped)

    def test_a_file_of_another_checkpoint(self, tmp_path) -> None:
        """The load refuses it, since the marker has its snapshot id."""
        path, other = (save(tmp_path / f"s{i}", {"a": i}) for i in (1, 2))
        os.replace(other / FILE, path / FILE)
        with pytest.raises(IntegrityError, match="the header"):
            load(path)

    @proves("cell AsyncCheckpointer.load, state_dict=: error")
    def test_the_template_was_modified(self, tmp_path) -> None:
        """Its tensors may hold bytes of the damaged chunk; its values are as before."""
        path = save(tmp_path / "s", {"a": torch.randn(3 * CHUNK), "n": 5})
        flip(path / FILE, -1)
        template = {"a": torch.zeros(3 * CHUNK), "n": 0}
        with pytest.raises(IntegrityError) as caught:
            load(path, template)
        assert caught.value.__notes__ == ["the template was modified"]
        assert caught.value.chunk == 11
        assert template["n"] == 0

    @pytest.mark.parametrize("call", ["pread", "preadv", "scandir", "stat", "open"])
    @pytest.mark.parametrize("held", [False, True])
    def test_a_call_that_fails(self, tmp_path, monkeypatch, call, held) -> None:
        """Each time that it is made: the error is typed, and names the file."""
        state = {"a": torch.ones(CHUNK), "b": torch.arange(35.0), "n": 5}
        path = save(tmp_path / "s", state)
        place = io if call == "open" else os
        real = getattr(place, call)
        for number in itertools.count():
            left = [number]

            def failing(*args, left=left, **more):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args, **more)

            monkeypatch.setattr(place, call, failing)
            template = zeroed(state) if held else None
            try:
                found = load(path, template)
            except StorageError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017 - or it goes on
            else:
                assert_same(found, state)
            finally:
                monkeypatch.undo()
            if left[0] >= 0:
                break

    @WAYS
    @pytest.mark.parametrize("gone", [False, True])
    def test_it_is_replaced_while_it_is_read(self, tmp_path, way, gone: bool) -> None:
        """Its file was opened once, and is read to the end, or longer if mapped."""
        path = save(tmp_path / "s-1", {"a": torch.ones(CHUNK), "step": 1})

        def select(name: str) -> bool:
            """Replace it when its header was read, and nothing else."""
            if name == "a" and gone:
                save(tmp_path / "s-2", {"a": 2}, keep_last=1)
            elif name == "a":
                save(path, {"a": torch.zeros(CHUNK), "step": 1})
            return True

        found = load(path, select=select, **way)
        assert path.exists() is not gone
        assert_same(found, {"a": torch.ones(CHUNK), "step": 1})

    def test_it_is_replaced_before_any_call(self, tmp_path, monkeypatch) -> None:
        """There is always a whole one of this name, so the load begins again."""
        path, opened = save(tmp_path / "s-1", {"a": 0}), os.open
        for number in itertools.count():
            left = [number]

            def replacing(*args, left=left, **more):
                left[0] -= 1
                if left[0] == -1:
                    save(path, {"a": left[1]})
                return opened(*args, **more)

            left.append(number + 1)
            monkeypatch.setattr(os, "open", replacing)
            found = load(path)["a"]
            monkeypatch.undo()
            assert found in (number, number + 1)
            if left[0] >= 0:
                break
        assert number > 1


class Context:
    """A pytree node whose context is made of bytes of the data segment."""

    def __init__(self, tensor: torch.Tensor, note: bytes) -> None:
        self.tensor, self.note = tensor, note


_pytree.register_pytree_node(
    Context,
    lambda node: ([node.tensor], node.note),
    lambda children, note: Context(next(iter(children)), note),
)


class TestTemplate:
    """A load reads only the template's keys, into its tensors."""

    @pytest.mark.parametrize("mmap", [False, True])
    def test_keys_and_contexts_of_any_kind(self, tmp_path, mmap) -> None:
        """Keys are compared as they are; what bytes make is read before it is made."""
        note = b"x" * 9000
        keys = (torch.float32, b"k", (1, torch.device("cpu")), Decimal("0.5"), None)

        def state(fill: float) -> dict[str, Any]:
            node = Context(torch.full((3,), fill), note)
            tensors = {key: torch.full((2,), fill) for key in keys}
            return {"node": node, "tensors": tensors, "new": None}

        long = {bytes(range(1, 251)) * 40: 7}
        path = save(tmp_path / "s", state(1.0) | {"new": long})
        into = state(0.0)
        own, tensor = dict(into["tensors"]), into["node"].tensor
        got = load(path, into, mmap=mmap)
        assert got["new"] == long
        assert got["node"].note == note
        assert got["node"].tensor is tensor
        assert tensor.tolist() == [1, 1, 1]
        assert all(got["tensors"][key] is own[key] for key in keys)
        assert all(own[key].tolist() == [1, 1] for key in keys)

    @proves("cell AsyncCheckpointer.load, state_dict=: success")
    @given(state=states())
    @settings(
        max_examples=settings().max_examples // 3,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_any_state_dict(self, tmp_path, state) -> None:
        """Loaded into zeros of the same form, it is the same; so it is without."""
        plain = dict(state)
        path = save(tmp_path / "s", plain)
        assert_same(load(path, dict.fromkeys(plain)), plain)
        assert_same(load(path), plain)

    def test_the_function_of_the_package(self, tmp_path) -> None:
        """`aiockpt.load` takes a template, a selection, and ``strict``."""
        path = save(tmp_path / "s", {"w": torch.ones(3), "epoch": 3})
        template = {"w": torch.zeros(3), "epoch": 0}
        assert aiockpt.load(path, template) is template
        assert_same(template, {"w": torch.ones(3), "epoch": 3})
        assert aiockpt.load(path, select=["epoch"]) == {"epoch": 3}
        with pytest.raises(MissingKeysError, match="head"):
            aiockpt.load(path, {"head": None}, strict=True)

    @pytest.mark.parametrize("verify", ["full", "none"])
    def test_no_more_is_read_than_its_chunks(self, tmp_path, verify: str) -> None:
        """What is not read is not verified either."""
        state = {f"{i}": torch.full((CHUNK // 2,), float(i)) for i in range(20)}
        path = save(tmp_path / "s", state)
        flip(path / FILE, -1)
        seen: list[int] = []
        template = {"7": torch.zeros(CHUNK // 2)}
        found = load(path, template, on_bytes=seen.append, verify=verify)
        assert torch.equal(found["7"], state["7"])
        assert sum(seen) == 2 * CHUNK

    def test_missing_keys_are_listed(self, tmp_path, caplog) -> None:
        """A warning lists them as dotted paths, and the rest is loaded."""
        path = save(tmp_path / "s", {"a": {"b": 1, "l": [{"x": 1}]}, "t": 2})
        inner = {"b": 0, "c": 5, "l": [{"x": 0, "y": 7}]}
        with caplog.at_level(logging.WARNING):
            found, missing = read(path, {"a": inner, "t": 0, "u": {"v": 1}, 3: None})
        assert missing == ["a.c", "a.l[0].y", "u", "3"]
        inner = {"b": 1, "c": 5, "l": [{"x": 1, "y": 7}]}
        assert found == {"a": inner, "t": 2, "u": {"v": 1}, 3: None}
        assert "is missing keys: a.c, a.l[0].y, u, 3" in caplog.text

    def test_a_strict_load_refuses_keys_without_a_place(self, tmp_path) -> None:
        """A selected path needs a place in the template, too."""
        path = save(tmp_path / "s", {"a": torch.ones(3), "n": 1})
        with pytest.raises(MissingKeysError, match="is missing keys: b") as caught:
            load(path, {"a": torch.zeros(3), "b": None}, strict=True)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.keys == ["b"]
        with pytest.raises(TemplateMismatchError, match="n"):
            load(path, {"a": torch.zeros(3)}, select=["a", "n"], strict=True)

    def test_autograd_notices(self, tmp_path) -> None:
        """A filled tensor counts as changed in place."""
        path = save(tmp_path / "s", {"w": torch.ones(3)})
        weight = torch.nn.Parameter(torch.full((3,), 2.0))
        loss = (weight * weight).sum()
        load(path, {"w": weight})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestSelect:
    """A load reads only the selected paths and what is below them."""

    def test_by_a_function_or_inside_of_keys_with_dots(self, tmp_path) -> None:
        """A flat state dict has its dots in the keys."""
        state = {"a": {"w": 1, "b": 2}, "w": [3, {"w": 4, "c": 5}]}
        flat = {"layers.0.w": 1, "layers.0.b": 2, "layers.10.w": 3}
        path = save(tmp_path / "s", state | flat)
        found = load(path, select=["layers.0"])
        assert found == {"layers.0.w": 1, "layers.0.b": 2}
        found = load(path, select=lambda path: path.endswith("w") or "[0]" in path)
        assert found == {"layers.0.w": 1, "layers.10.w": 3} | {
            "a": {"w": 1},
            "w": [3, {"w": 4}],
        }


class TestDevice:
    """Tensors without a place in a template go to ``map_location``."""

    def test_meta_has_no_bytes(self, tmp_path) -> None:
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
            (None, "cpu"),
            ("cpu", "cpu"),
            (torch.device("meta"), "meta"),
            ({"cpu": "meta"}, "meta"),
            ({"cuda:0": "meta"}, "cpu"),
            (lambda storage, location: storage, "cpu"),
            (lambda storage, location: None, "cpu"),
        ],
    )
    def test_all_that_torch_takes(self, tmp_path, given, expected: str) -> None:
        """Names, devices, dicts of them, and functions."""
        found = load(save(tmp_path / "s", {"w": torch.ones(3)}), map_location=given)
        assert found["w"].device.type == expected

    @pytest.mark.skipif(
        torch.accelerator.is_available(), reason="a device that is here is no mistake"
    )
    @pytest.mark.parametrize(
        "where",
        [
            *("cuda", "nonsense", "cpu:x", "mps:3", torch.device("cuda", 1)),
            *({"cpu": "cuda:7"}, {"cpu": 5.5}, 5.5, object()),
            lambda storage, location: "nowhere",
        ],
        ids=lambda where: str(where)[:12],
    )
    def test_a_device_that_is_not_here_is_named(self, tmp_path, where) -> None:
        """The error comes before the template is changed, also from a coroutine."""
        path = save(tmp_path / "s", {"w": torch.ones(3), "n": 1})
        into = {"w": torch.zeros(3), "n": 0}
        for template in (None, into):
            with pytest.raises(StateDictError, match="map_location") as caught:
                load(path, template, map_location=where)
            assert isinstance(caught.value, ValueError)
        assert_same(into, {"w": torch.zeros(3), "n": 0})

        async def main() -> None:
            thread = CheckpointerConfig(use_process=False)
            async with make_async_checkpointer(thread) as checkpointer:
                await checkpointer.load(path, default_map_location=where)

        with pytest.raises(StateDictError, match="map_location"):
            asyncio.run(main())


def test_a_mapping_is_private(tmp_path) -> None:
    """Writing leaves the file alone, and replacing the checkpoint the tensors."""
    path = save(tmp_path / "s", {"a": torch.zeros(CHUNK)})
    before = (path / FILE).read_bytes()
    found = load(path, mmap=True, verify="none")
    found["a"].add_(1)
    assert (path / FILE).read_bytes() == before
    save(path, {"a": torch.zeros(CHUNK)})
    assert found["a"].sum() == CHUNK


@contextlib.asynccontextmanager
async def served(state):
    """Serve a state dict as step 100; give the metadata."""
    async with transport() as sender:
        await sender.send_checkpoint([1], 100, state)
        yield sender.metadata()


class TestPeer:
    """Straight from a sender, as from a file."""

    def test_all_that_a_file_can(self) -> None:
        """Whole, in place, and in part; also beside a loop that stands still."""
        state = training_state()

        async def main(url: str):
            return load(url)

        with beside(served(state)) as metadata:
            base, _, token = metadata.partition("#")
            url = f"{base}100#{token}"
            assert_same(load(url), state)
            assert_same(asyncio.run(main(metadata)), state)
            template = zeroed(state)
            found, missing = read(url, {**template, "q": 1})
            assert missing == ["q"]
            assert found["model"]["embed.weight"] is template["model"]["embed.weight"]
            assert_same(found, {**state, "q": 1})
            seen: list[int] = []
            found = load(url, select=["model.norm.bias"], on_bytes=seen.append)
            assert torch.equal(found["model"]["norm.bias"], state["model"]["norm.bias"])
            assert 0 < sum(seen) < 3 * CHUNK

    def test_what_goes_wrong(self, caplog) -> None:
        """The error is one of the package, and does not show the secret."""
        with beside(served({"a": torch.ones(9)})) as metadata:
            base, _, token = metadata.partition("#")
            with pytest.raises(StepNotFoundError):
                load(f"{base}101#{token}")
            with pytest.raises(AuthenticationError):
                load(f"{base}100")
            with pytest.raises(MissingKeysError) as caught:
                load(metadata, {"b": 1}, strict=True)
            assert token not in str(caught.value)
            assert load(metadata, {"a": None, "b": 1})["b"] == 1
            assert token not in caplog.text
            with pytest.raises(KeyboardInterrupt):
                load(metadata, on_bytes=stop)
        with pytest.raises(LocalProtocolError):
            load("http://")
