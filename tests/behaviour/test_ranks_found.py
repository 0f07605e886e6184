"""Which ranks save together is looked up at each save, and so is where they meet."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - the backend

import aiockpt
from aiockpt import list_checkpoints
from aiockpt.checkpointers import CheckpointProcessConfig, RankInfo
from tests.support.saving import OwnFormat, names, save_by_two
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(150)

ALL_KINDS = pytest.mark.parametrize("kind", ["sync", "thread", "process"])
IN_BACKGROUND = pytest.mark.parametrize("use_process", [False, True])
STATE = {"w": torch.ones(100)}


@contextmanager
def one_rank(rank: int, size: int) -> Iterator[None]:
    """Be a rank of a default group whose other ranks do not exist."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", rank=rank, world_size=size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(kind: str, rank_info: RankInfo | None = None, **options: Any) -> Any:
    """Return a checkpointer whose calls block."""
    config = aiockpt.CheckpointerConfig(use_process=kind == "process", **options)
    if kind == "sync":
        return aiockpt.make_sync_checkpointer(config, rank_info)
    return aiockpt.make_background_checkpointer(config, rank_info)


def save(made: Any, path: Path) -> None:
    """Save, and wait until that is committed."""
    handle = made.save(STATE, path)
    assert handle is None or handle.result(60)


class TestEarlyCheckpointer:
    """A checkpointer that is older than the process group."""

    @IN_BACKGROUND
    def test_a_writer_of_ones_own_is_made_again(self, tmp_path, use_process) -> None:
        """It gets the rank of the save, and the reader has that of the load."""
        config = aiockpt.CheckpointerConfig(use_process=use_process)
        with aiockpt.make_background_checkpointer(
            config, checkpoint_writer_init_fn=OwnFormat
        ) as made:
            assert made.save(STATE, tmp_path / "1").result(60)
            with one_rank(1, 2):
                assert made.save(STATE, tmp_path / "2").result(60)
            assert made.save(STATE, tmp_path / "3").result(60)
        assert [names(tmp_path / each) for each in "123"] == [
            ["0.own"],
            ["1.own"],
            ["0.own"],
        ]

    def test_loads_follow_the_group(self, tmp_path) -> None:
        """Checkpointers and plain readers use the default group, too."""
        path = save_by_two(tmp_path / "step-1")
        with make("sync") as made:
            for load in (made.load, aiockpt.load):
                with one_rank(1, 2):
                    assert load(path) == {"rank": 1}
                with one_rank(0, 2):
                    assert load(path) == {"rank": 0}
                with pytest.raises(aiockpt.errors.RankValuesError):
                    load(path)

    @pytest.mark.asyncio
    async def test_recovery_follows_the_group(self) -> None:
        """What is kept is that of the rank that saved."""
        with tempfile.TemporaryDirectory() as place:  # short enough for a socket
            runtime = f"{place}/run"
            keeping = CheckpointProcessConfig(keep_last_seconds=60, runtime_dir=runtime)
            config = aiockpt.CheckpointerConfig(process_config=keeping)
            made = aiockpt.make_async_checkpointer(
                config, checkpoint_writer_init_fn=OwnFormat
            )
            with suppress(ZeroDivisionError):
                async with made:
                    with one_rank(1, 2):
                        handle = await made.save(STATE, f"{place}/step-1")
                        await handle.written()
                    raise ZeroDivisionError
            # The process offers it once it has noticed that its trainer has failed.
            await eventually(lambda: [*Path(runtime).glob("*")], "an offer")
            found = await aiockpt.recover(
                place, rank_info=RankInfo(1, 2), runtime_dir=runtime
            )
            assert torch.equal(found.state_dict["w"], STATE["w"])

    @IN_BACKGROUND
    def test_a_busy_policy_that_ranks_cannot_share(self, tmp_path, use_process) -> None:
        """It is refused when there are several ranks, not before."""
        config = aiockpt.CheckpointerConfig(use_process=use_process, busy_policy="skip")
        with aiockpt.make_background_checkpointer(
            config, checkpoint_writer_init_fn=OwnFormat
        ) as made:
            save(made, tmp_path / "step-1")
            with one_rank(0, 2), pytest.raises(ValueError, match="busy_policy='skip'"):
                made.save(STATE, tmp_path / "step-2")
        assert names(tmp_path) == ["step-1"]


class TestNowhereToMeet:
    """Several ranks, and no store that other processes can reach."""

    @ALL_KINDS
    def test_no_group(self, tmp_path, kind: str) -> None:
        """The save itself raises it, and names both ways out; a later one is well."""
        with make(kind, RankInfo(0, 2)) as made:
            with pytest.raises(ValueError, match=r"2 ranks need .*RankInfo\(0, 1\)"):
                made.save(STATE, tmp_path / "step-1")
            assert made.statistics().under_way == 0
        assert names(tmp_path) == []

    @ALL_KINDS
    def test_a_store_without_an_address(self, tmp_path, kind: str) -> None:
        """The error names the store that has no address."""
        with make(kind) as made, one_rank(0, 2):
            with pytest.raises(ValueError, match=r"meet in the HashStore .*env://"):
                made.save(STATE, tmp_path / "step-1")
            with make(kind, RankInfo(0, 1)) as alone:
                save(alone, tmp_path / "step-1")
        assert [each.world_size for each in list_checkpoints(tmp_path)] == [1]


class TestAlone:
    """A process of several that takes itself for the only one."""

    @ALL_KINDS
    @pytest.mark.parametrize(
        ("launched", "rank_info", "warned"),
        [
            ("2", None, True),
            ("2", RankInfo(0, 1), False),
            ("1", None, False),
            ("many", None, False),
        ],
    )
    def test_it_is_said_once(
        self, tmp_path, monkeypatch, caplog, kind, launched, rank_info, warned
    ) -> None:
        """One warning has the contradicting number, and what to do."""
        monkeypatch.setenv("WORLD_SIZE", launched)
        with caplog.at_level(logging.WARNING), make(kind, rank_info) as made:
            assert "WORLD_SIZE" not in caplog.text  # the group may come yet
            for step in (1, 2):
                save(made, tmp_path / f"step-{step}")
        found = [each for each in caplog.messages if "as the only rank" in each]
        assert len(found) == warned
        for text in found:
            assert "WORLD_SIZE is 2" in text
            assert "init_process_group before the first save" in text
            assert "rank_info=RankInfo(0, 1)" in text

    def test_a_group_is_believed(self, tmp_path, monkeypatch, caplog) -> None:
        """A group of one rank is one, whatever the environment says."""
        monkeypatch.setenv("WORLD_SIZE", "8")
        with one_rank(0, 1), make("sync") as made:
            save(made, tmp_path / "step-1")
        assert "WORLD_SIZE" not in caplog.text
