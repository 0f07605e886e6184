"""Types that not every process knows: announced by the sender, named by the loader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

import aiockpt
from aiockpt import Limits, StorageError
from aiockpt.checkpointers import DefaultStager, make_background_checkpointer
from aiockpt.errors import (
    LimitExceededError,
    RemoteProtocolError,
    UnsupportedLeafError,
)
from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest, decode_header
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.registry import REGISTRY
from aiockpt.format.tree import decode_tree
from aiockpt.state.flatten import describe
from aiockpt.storage.statefile import read_state_file
from aiockpt.testing import assert_same
from aiockpt.transfer.remarks import Remarks
from tests.support.headers import entries_of
from tests.support.saving import load, save
from tests.support.transports import pair, receive, transport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLAME = ("malformed", "remote", "Remote", "peer")


class Moments(NamedTuple):
    """What an optimizer may keep."""

    number: int
    mu: torch.Tensor


class Pair:
    """A node that only pytree knows."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other


_pytree.register_pytree_node(
    Pair, lambda pair: ([pair.one, pair.other], None), lambda items, _: Pair(*items)
)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test registers."""
    for table in ("_by_type", "_by_tag"):
        monkeypatch.setattr(REGISTRY, table, dict(getattr(REGISTRY, table)))


def state() -> dict[str, Any]:
    """Return a state dict with one value of each kind."""
    return {"opt": [Moments(1, torch.ones(2))], "pair": Pair(1, torch.ones(3))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the texts of the warnings about what was staged, and forget them."""
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return [each for each in found if each.startswith("stage ")]


class TestAnnouncements:
    """One warning, with path, type and remedy, while it is the same."""

    def test_a_save_in_the_foreground(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The second save has nothing new to say; another type is new."""
        with aiockpt.make_sync_checkpointer() as made:
            made.save(state(), tmp_path / "step-1")
            (said,) = warnings_of(caplog)
            assert f"opt[0] is a {__name__}.Moments, pair is a {__name__}.Pair" in said
            assert f"aiockpt.register_leaf(Moments, tag='{__name__}.Moments')" in said
            made.save(state(), tmp_path / "step-2")
            assert warnings_of(caplog) == []
            made.save({"pair": Pair(0, 0)}, tmp_path / "step-3")
            (said,) = warnings_of(caplog)
            assert "Moments" not in said

    @pytest.mark.parametrize("process", [True, False])
    def test_a_save_in_the_background(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, process: bool
    ) -> None:
        """The trainer's process warns at the call, whoever writes."""
        config = aiockpt.CheckpointerConfig(use_process=process)
        with make_background_checkpointer(config) as made:
            first = made.save(state(), tmp_path / "step-1")
            (said,) = warnings_of(caplog)
            assert "opt[0] is a " in said
            second = made.save(state(), tmp_path / "step-2")
            assert warnings_of(caplog) == []
            assert first.result(60)
            assert second.result(60)

    @pytest.mark.asyncio
    async def test_a_send(self, caplog: pytest.LogCaptureFixture) -> None:
        """The receiver needs a template, or the registration."""
        async with pair(state=state()) as (sender, receiver):
            (said,) = warnings_of(caplog)
            assert "opt[0] is a " in said
            with pytest.raises(RemoteProtocolError, match=r"\.Moments' at opt\[0\]: "):
                await receive(sender, receiver, 1)
            got = await receive(sender, receiver, 1, into=state())
            assert_same(got["opt"], state()["opt"])
            for kind in (Moments, Pair):
                aiockpt.register_leaf(kind)
            await sender.send_checkpoint([1], 2, state())
            assert warnings_of(caplog) == []
            got = await receive(sender, receiver, 2)
            assert_same(got["opt"], state()["opt"])
            assert_same(got["pair"].other, torch.ones(3))

    def test_what_every_process_knows(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Torch's own results are no strangers."""
        save(tmp_path / "step-1", {"top": torch.ones(3).max(0)})
        assert warnings_of(caplog) == []


READ: dict[str, Any] = {
    "load": lambda path, file, key: load(path),
    "select": lambda path, file, key: load(path, select=[key]),
    "serve": lambda path, file, key: read_state_file(file, limits=FILE_LIMITS),
}
"""What makes values of a file, given its directory, its path and a key."""


class TestLoads:
    """The load of a file blames no peer."""

    @pytest.mark.parametrize("key", ["opt", "pair"])
    @pytest.mark.parametrize("how", ["load", "select", "serve"])
    def test_the_error_says_what_to_do(
        self, tmp_path: Path, key: str, how: str
    ) -> None:
        """It names type, path and both remedies, and blames nobody."""
        path = save(tmp_path / "step-1", {key: state()[key], "other": torch.ones(1)})
        file = path / "checkpoint_0.safetensors"
        with pytest.raises(UnsupportedLeafError) as caught:
            READ[how](path, file, key)
        kind = type(state()["opt"][0] if key == "opt" else state()["pair"]).__name__
        text = str(caught.value)
        assert caught.value.path == ("opt[0]" if key == "opt" else "pair")
        assert caught.value.type_name == f"{__name__}.{kind}"
        assert f"aiockpt.register_leaf({kind}, tag='{__name__}.{kind}')" in text
        assert "a template that has one" in text
        assert not any(word in text for word in BLAME)
        assert_same(load(path, select=["other"]), {"other": torch.ones(1)})

    @pytest.mark.parametrize("functions", [True, False])
    def test_both_remedies_work(self, tmp_path: Path, functions: bool) -> None:
        """Both work for every way to register a type, with its own tag."""
        path = save(tmp_path / "step-1", state())
        found = load(path, state())
        assert_same(found["opt"], state()["opt"])
        moved: Any = type("Moments", (Moments,), {})  # as in another module
        node: Any = Pair
        more: dict[str, Any] = {"encode": vars, "decode": vars} if functions else {}
        aiockpt.register_leaf(moved, tag=f"{__name__}.Moments", **more)
        aiockpt.register_leaf(node, **more)
        found = load(path)
        assert type(found["opt"][0]) is moved
        assert_same(found["opt"][0].mu, torch.ones(2))
        assert_same(found["pair"].other, torch.ones(3))

    def test_a_registered_type_that_is_not_known_here(self, tmp_path: Path) -> None:
        """It has no template, so the error offers none."""

        class Own:
            """Known to the saver only."""

        aiockpt.register_leaf(
            Own, tag="a.Own", encode=lambda _: 1, decode=lambda _: Own()
        )
        path = save(tmp_path / "step-1", {"x": {"y": Own()}})
        del REGISTRY._by_tag["a.Own"], REGISTRY._by_type[Own]
        with pytest.raises(UnsupportedLeafError) as caught:
            load(path)
        text = str(caught.value)
        assert text.startswith("x.y is a a.Own: ")
        assert "aiockpt.register_leaf(Own, tag='a.Own', encode=" in text
        assert "template" not in text

    @pytest.mark.asyncio
    async def test_a_staged_state_says_what_is_not_registered(self) -> None:
        """The error is a local one with path, type and remedy, which works."""

        class Own:
            """Known when it is staged."""

        def register() -> None:
            aiockpt.register_leaf(
                Own, tag="a.Own", encode=lambda _: 1, decode=lambda _: Own()
            )

        register()
        stager = DefaultStager()
        with await stager.stage({"a": [Own()]}) as staged:
            del REGISTRY._by_tag["a.Own"], REGISTRY._by_type[Own]
            with pytest.raises(
                UnsupportedLeafError, match=r"a\.Own.*register"
            ) as error:
                staged.state_dict()
            assert error.value.path == "a[0]"
            register()
            assert type(staged.state_dict()["a"][0]) is Own
        await stager.close()

    @pytest.mark.parametrize(
        "tree",
        [["dict", ["a"], []], ["nobody", 1]],
        ids=["keys", "tag"],
    )
    @pytest.mark.parametrize("how", ["load", "serve"])
    def test_a_file_that_breaks_the_format(
        self, tmp_path: Path, tree: Any, how: str
    ) -> None:
        """The error names the file, and no peer."""
        manifest = build_manifest(
            step=1, chunk_bytes=64, entries=entries_of(), tree=tree, digests=[]
        )
        path = tmp_path / "a.safetensors"
        path.write_bytes(manifest.header)
        with pytest.raises(StorageError, match=r"a\.safetensors: it cannot") as caught:
            READ[how](path, path, "a")
        assert "peer" not in str(caught.value)


def nested(levels: int) -> Any:
    """Return lists in lists."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


BEYOND: dict[str, tuple[Callable[[], Any], str]] = {
    "max_tensors": (
        lambda: {str(n): torch.ones(1) for n in range(6)},
        "the number of tensors is 6",
    ),
    "max_nodes": (lambda: {"n": [*range(2000)]}, "the number of values in the tree is"),
    "max_depth": (lambda: nested(9), "the nesting of the tree is 10"),
    "max_text_bytes": (
        lambda: {"t": "a" * 300_000},
        "the length of a string is 300002",
    ),
    "max_header_bytes": (lambda: {"t": "a" * 4000}, "the length of the header is "),
}
READERS = {
    "max_tensors": Limits(max_tensors=5),
    "max_nodes": Limits(max_nodes=1000, max_tensors=5),
    "max_depth": Limits(max_depth=9),
    "max_text_bytes": Limits(max_text_bytes=1000),
    "max_header_bytes": Limits(max_header_bytes=1024),
}


@pytest.mark.parametrize("option", BEYOND)
def test_each_limit_of_readers(option: str, caplog: pytest.LogCaptureFixture) -> None:
    """The sender warns of what a reader refuses, and what it advises is enough."""
    make, words = BEYOND[option]
    described = describe(make(), limits=FILE_LIMITS)
    manifest = build_manifest(
        step=1,
        chunk_bytes=1 << 20,
        entries=described.entries,
        tree=described.tree,
        digests=[digest([])] if described.entries.nbytes else [],
    )
    readers, own = READERS[option], Limits(max_depth=100)

    def read(limits: Limits) -> None:
        found = decode_header(manifest.header, limits=limits, ours=True)
        decode_tree(
            found.tree,  # type: ignore[union-attr]
            registry=REGISTRY,
            tensors=[None] * 10,
            limits=limits,
        )

    with pytest.raises(LimitExceededError):
        read(readers)
    remarks = Remarks(readers, own)
    remarks.on(manifest, {}, step=1)
    (said,) = warnings_of(caplog)
    assert words in said
    assert f"say limits=Limits({option}=" in said
    remarks.on(manifest, {}, step=2)
    assert warnings_of(caplog) == []
    value = int(said.partition(f"({option}=")[2].partition(")")[0])
    read(Limits(**{option: value}))
    Remarks(Limits(), own).on(manifest, {}, step=1)
    assert warnings_of(caplog) == []


@pytest.mark.asyncio
async def test_a_send_of_more_than_receivers_accept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sender's own limits do not matter: they are those of what it receives."""
    async with transport() as sender:
        await sender.send_checkpoint([1], 1, [*range(400_000)])
        assert warnings_of(caplog) == []
    deep = nested(80)
    limits = Limits(max_depth=100)
    async with transport(receive=aiockpt.Receive(limits=limits)) as sender:
        await sender.send_checkpoint([1], 1, deep)
        (said,) = warnings_of(caplog)
        assert "say limits=Limits(max_depth=81) there" in said
