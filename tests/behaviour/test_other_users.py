"""What others may not do, and file systems that are others': typed errors, no harm."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import make_async_checkpointer
from aiockpt.errors import StorageError
from tests.support.ranks import SUPPORT
from tests.support.saving import load, names, save
from tests.support.shortages import small_disk
from tests.support.unprivileged import KINDS

DENIED = "Permission denied"
MODES = {"closed": 0o700, "blind": 0o711, "sealed": 0o700, "listed": 0o744}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another")


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    """Return what everything says to the user nobody, by what was tried."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for kind in (*KINDS, "mine"):
            save(place / kind / "step-1", {"a": 5})
        for kind in ("closed", "blind"):
            (place / kind).chmod(MODES[kind])
        for kind in ("sealed", "listed"):
            (place / kind / "step-1").chmod(MODES[kind])
        (place / "mine").chmod(0o777)
        (place / "run").mkdir(mode=0o700)
        place.chmod(0o755)
        before = {kind: names(place / kind) for kind in KINDS}
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "unprivileged.py"), directory],
            stdout=subprocess.PIPE,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        found["changed"] = [k for k in KINDS if names(place / k) != before[k]]
        found["in mine"] = names(place / "mine")
        yield found


@needs_root
class TestAnotherUser:
    """Somebody else's checkpoints: read as far as that is allowed, and never harmed."""

    @pytest.mark.parametrize("kind", ["open", "blind"])
    def test_what_may_be_read(self, said: dict[str, Any], kind: str) -> None:
        """Is: also in a directory that may not be written to, or not be listed."""
        assert said[f"load {kind}"] == said[f"load file {kind}"] == 5
        for command in ("verify", "inspect", "convert"):
            assert said[f"{command} {kind}"].startswith("0: ")
        assert said["latest open"] == 1

    @pytest.mark.parametrize("kind", ["closed", "sealed", "listed"])
    def test_what_may_not(self, said: dict[str, Any], kind: str) -> None:
        """The error is a StorageError, and one line on the command line."""
        for call in ("load", "load file"):
            assert said[f"{call} {kind}"].startswith("StorageError: ")
            assert DENIED in said[f"{call} {kind}"]
        for command in ("verify", "inspect", "convert"):
            assert said[f"{command} {kind}"].startswith("1: aiockpt: error: ")
            assert DENIED in said[f"{command} {kind}"]

    def test_a_list_of_what_may_not(self, said: dict[str, Any]) -> None:
        """The directory is refused; a checkpoint in it is left out, and named."""
        for kind in ("closed", "blind"):
            assert said[f"latest {kind}"].startswith("StorageError: ")
            assert said[f"ls {kind}"].startswith("1: ")
        for kind in ("sealed", "listed"):
            assert said[f"latest {kind}"] is None
            assert said[f"ls {kind}"] == f"0: step-1: cannot be read: {DENIED}"

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_is_written(self, said: dict[str, Any], kind: str) -> None:
        """The process writes neither there nor beside it."""
        for call in ("save", "save new", "background"):
            assert said[f"{call} {kind}"].startswith("StorageError: ")
            assert DENIED in said[f"{call} {kind}"]
        assert said[f"convert into {kind}"].startswith("1: ")
        assert said["changed"] == []

    def test_one_that_cannot_be_removed_is_not_taken_away(self, said) -> None:
        """Its files would stay, as trash; the new one is saved all the same."""
        assert said["save mine"] is None
        assert said["latest mine"] == 2
        assert {"step-1", "step-2"} == {n for n in said["in mine"] if ".pt" not in n}

    def test_nothing_is_recovered(self, said: dict[str, Any]) -> None:
        """`recover` refuses a directory that belongs to another user."""
        assert said["recover theirs"].startswith("StorageError: ")
        assert DENIED in said["recover theirs"]
        assert said["recover nothing"].startswith("CheckpointNotFoundError: ")


class TestFileSystems:
    """Everything of a checkpoint is made where it will be: no rename leaves a disk."""

    def test_a_link_to_another_one(self, tmp_path, monkeypatch) -> None:
        """What is built, replaced and retired stays there."""
        seen: list[tuple[int, int]] = []
        rename = os.rename

        def watched(one: Any, other: Any) -> None:
            parents = [os.stat(Path(each).parent).st_dev for each in (one, other)]
            seen.append((parents[0], parents[1]))
            rename(one, other)

        monkeypatch.setattr(os, "rename", watched)
        with small_disk(tmp_path / "disk", 8 << 20) as disk:
            (disk / "real").mkdir()
            (tmp_path / "link").symlink_to(disk / "real")
            (tmp_path / "step-9").symlink_to(disk / "real" / "step-9")
            assert os.stat(disk).st_dev != os.stat(tmp_path).st_dev
            for step in (1, 2, 2, 3):
                path = tmp_path / "link" / f"step-{step}"
                save(path, {"a": torch.ones(5)}, keep_last=1)
            save(tmp_path / "step-9", {"a": 9})
            assert names(disk / "real") == ["step-3", "step-9"]
            assert names(tmp_path) == ["disk", "link", "step-9"]
            assert load(tmp_path / "step-9") == {"a": 9}
            assert {one == other for one, other in seen} == {True}

    def test_a_name_where_another_one_is_mounted(self, tmp_path: Path) -> None:
        """Cannot be taken: it says so, and what is there stays."""
        with small_disk(tmp_path / "step-1", 1 << 20) as disk:
            with pytest.raises(StorageError, match=r"step-1: .*busy.* directory below"):
                save(disk, {"a": 1})
            assert names(tmp_path) == ["step-1"]
            assert names(disk) == []

    @pytest.mark.allow_error_logs
    def test_one_that_is_read_only(self, tmp_path: Path) -> None:
        """It is loaded from, and refused to save to; training goes on."""
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            save(disk / "step-1", {"a": 1})
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            assert load(disk / "step-1") == {"a": 1}
            found = aiockpt.latest(disk)
            assert found is not None
            for path in (disk / "step-1", disk / "step-2", disk / "new" / "step-3"):
                with pytest.raises(StorageError, match="Read-only file system"):
                    save(path, {"a": 2}, keep_last=1)

            async def background() -> BaseException | None:
                async with make_async_checkpointer() as made:
                    handle = await made.save({"a": 2}, disk / "step-2")
                    await asyncio.wait([asyncio.ensure_future(handle.written())])
                    return handle.error

            assert isinstance(asyncio.run(background()), StorageError)
            assert names(disk) == ["step-1"]
