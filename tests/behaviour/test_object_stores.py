"""Checkpoints in an object store: commits, races, what dead saves leave, bad input."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.writer import CheckpointWriter, WriterHook
from aiockpt.cli import main
from aiockpt.errors import CheckpointNotFoundError, StagingError, StorageError
from aiockpt.storage.directory import MARKER
from aiockpt.storage.interface import storage_at
from aiockpt.testing import assert_same

obstore = pytest.importorskip("obstore")
obstore.put(obstore.store.MemoryStore(), "warm", b"")  # its threads stay
objects = pytest.importorskip("aiockpt.storage.objects")

MIB = 1 << 20


@pytest.fixture
def store() -> Any:
    """Return a store in memory."""
    return obstore.store.MemoryStore()


@pytest.fixture
def bucket(store: Any) -> str:
    """Return the address of the store."""
    address = f"memory://{secrets.token_hex(4)}"
    aiockpt.register_store(address, store)
    return address


def save(path: str, state: object, hook: WriterHook | None = None, **how: Any) -> None:
    """Save in the foreground, as one rank."""
    writer = CheckpointWriter(CheckpointWriterConfig(**how), RankInfo(0, 1), None, hook)
    writer.write(path, state)
    writer.close()


def keys(store: Any) -> list[str]:
    """Return the keys in a store, with ATTEMPT in the place of each attempt."""
    found = (each["path"] for each in obstore.list(store).collect())
    parts = (path.split("/") for path in found)
    return sorted(
        "/".join("ATTEMPT" if len(part) > 31 else part for part in each)
        for each in parts
    )


class During(WriterHook):
    """Calls a function before the commit."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Call it."""
        self.call()

    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Do nothing."""


class TestAddresses:
    """An address is text, whoever has handled it."""

    @pytest.mark.parametrize(
        "form", ["{}/run/s-1", "{}/run/s-1/", "{}//run", "{}", "{}/run/../s", "{}/a?b"]
    )
    def test_forms(self, bucket: str, form: str) -> None:
        """One and two slashes are the same; what names no object is refused."""
        address = form.format(bucket)
        if form.startswith("{}/run/s-1"):
            save(address, {"a": 1})
            assert aiockpt.load(Path(address)) == {"a": 1}
        else:
            with pytest.raises(StorageError):
                save(address, {"a": 1})

    def test_a_directory_that_looks_like_one(self, tmp_path, monkeypatch) -> None:
        """Written with a dot before it, it is a path of a file system."""
        monkeypatch.chdir(tmp_path)
        save("./s3:/bucket/step-1", {"a": 1})
        assert aiockpt.load(tmp_path / "s3:/bucket/step-1") == {"a": 1}
        assert aiockpt.load("./s3:/bucket/step-1") == {"a": 1}
        assert main(["verify", "./s3:/bucket/step-1"]) == 0

    def test_what_follows_a_question_mark_is_not_repeated(self) -> None:
        """It may be a secret."""
        with pytest.raises(StorageError) as caught:
            aiockpt.load("s3://bucket/run?X-Amz-Signature=secret")
        assert "secret" not in str(caught.value)

    def test_a_store_that_nobody_has_registered(self) -> None:
        """A store in memory has to be."""
        with pytest.raises(StorageError, match="register_store"):
            aiockpt.load("memory://nobody/run")

    @pytest.mark.parametrize("address", ["s3://bucket/run", "bucket", "s3://"])
    def test_what_cannot_be_registered(self, store: Any, address: str) -> None:
        """It is no scheme and bucket."""
        with pytest.raises((ValueError, StorageError)):
            aiockpt.register_store(address, store)

    def test_a_forked_process(self, bucket: str) -> None:
        """Obstore's threads are not there, so it is refused."""
        save(f"{bucket}/s", {"a": 1})
        pid = os.fork()
        if not pid:
            code = 1
            try:
                aiockpt.load(f"{bucket}/s")
            except StorageError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.allow_error_logs
def test_a_store_that_does_not_pickle(bucket: str, store: Any) -> None:
    """The checkpoint process does without it, and says so for its addresses only."""
    with aiockpt.make_background_checkpointer() as checkpointer:
        handle = checkpointer.save({"a": 1}, f"{bucket}/s")
        with pytest.raises(StorageError, match="use_process=False"):
            handle.result(60)
    assert keys(store) == []


class TestSaves:
    """A save is there as a whole, or not at all."""

    def test_parts(self, bucket: str, store: Any) -> None:
        """A large file goes in parts, and comes in ranges."""
        state: Any = {"w": torch.arange(3 * MIB), "b": torch.ones(3), "n": [1, "x"]}
        save(f"{bucket}/run/step-7", state)
        assert_same(aiockpt.load(f"{bucket}/run/step-7"), state)
        into: Any = {"b": torch.zeros(3)}
        aiockpt.load(f"{bucket}/run/step-7", into=into)
        assert torch.equal(into["b"], state["b"])
        assert keys(store) == [
            "run/step-7/ATTEMPT/checkpoint_0.safetensors",
            "run/step-7/commit.json",
        ]

    def test_the_latest_is_the_last_commit(self, bucket: str) -> None:
        """Serial numbers count over all names."""
        for step in (1, 3, 2):
            save(f"{bucket}/run/step-{step}", {"step": step})
        found = aiockpt.list_checkpoints(f"{bucket}/run")
        assert [each.step for each in found] == [1, 3, 2]
        newest = aiockpt.latest(f"{bucket}/run")
        assert newest is not None
        assert os.fspath(newest) == f"{bucket}/run/step-2"
        assert aiockpt.load(newest) == {"step": 2}

    def test_old_ones_are_removed(self, bucket: str, store: Any) -> None:
        """Nothing of them is left."""
        for step in range(4):
            save(f"{bucket}/run/step-{step}", {"step": step}, keep_last=2)
        found = aiockpt.list_checkpoints(f"{bucket}/run")
        assert [each.step for each in found] == [2, 3]
        assert len(keys(store)) == 4

    def test_a_failed_save(self, bucket: str, store: Any) -> None:
        """Its file is deleted, and what was there stays."""
        save(f"{bucket}/s", {"a": 1})
        before = keys(store)

        def fail() -> None:
            raise OSError("the disk of the hook is full")

        with pytest.raises(OSError, match="of the hook"):
            save(f"{bucket}/s", {"a": 2}, During(fail))
        assert keys(store) == before
        assert aiockpt.load(f"{bucket}/s") == {"a": 1}

    @pytest.mark.parametrize("first", [True, False])
    def test_two_savers(self, bucket: str, first: bool) -> None:
        """The one that commits later is told, and nothing of it is there."""
        path = f"{bucket}/s"
        if not first:
            save(path, {"a": 0})
        with pytest.raises(StorageError, match="another process has saved to it"):
            save(path, {"a": 1}, During(lambda: save(path, {"a": 2})))
        assert aiockpt.load(path) == {"a": 2}

    def test_a_lost_answer(self, bucket: str, monkeypatch) -> None:
        """The marker is there, so the save has succeeded."""
        put = obstore.put

        def lose(store: Any, key: str, data: Any, **how: Any) -> Any:
            done = put(store, key, data, **how)
            if key.endswith(MARKER):
                put(store, key, data, **how)
            return done

        monkeypatch.setattr(objects.obstore, "put", lose)
        save(f"{bucket}/s", {"a": 1})
        assert aiockpt.load(f"{bucket}/s") == {"a": 1}

    def test_a_state_that_changes_meanwhile(self, bucket, store, monkeypatch) -> None:
        """Its digests come first, so it is refused."""
        put, state = obstore.put, {"w": torch.zeros(5 * MIB)}

        def change(store: Any, key: str, data: Any, **how: Any) -> Any:
            if "step-1/" in key:
                state["w"][0] = 1
            return put(store, key, data, **how)

        monkeypatch.setattr(objects.obstore, "put", change)
        with pytest.raises(StagingError, match="was changed while it was saved"):
            save(f"{bucket}/step-1", state)
        assert keys(store) == []

    def test_a_store_without_conditional_puts(self, bucket: str, monkeypatch) -> None:
        """It is refused, with what to do."""
        put = obstore.put

        def plain(store: Any, key: str, data: Any, **how: Any) -> Any:
            if how.get("mode") is not None:
                raise NotImplementedError
            return put(store, key, data, **how)

        monkeypatch.setattr(objects.obstore, "put", plain)
        with pytest.raises(StorageError, match="no conditional puts"):
            save(f"{bucket}/s", {"a": 1})

    def test_a_marker_of_another_tool(self, bucket: str, store: Any) -> None:
        """It is not replaced."""
        obstore.put(store, f"s/{MARKER}", b'{"commit": 1}')
        with pytest.raises(StorageError, match="not a valid marker"):
            save(f"{bucket}/s", {"a": 1})
        assert bytes(obstore.get(store, f"s/{MARKER}").bytes()) == b'{"commit": 1}'

    @pytest.mark.parametrize("key", ["s", "s/notes.txt"])
    def test_a_place_that_is_taken(self, bucket: str, store: Any, key: str) -> None:
        """What others have put there stays."""
        obstore.put(store, key, b"mine")
        with pytest.raises(StorageError, match=r"it is a file|it holds files"):
            save(f"{bucket}/s", {"a": 1})
        assert keys(store) == [key]

    def test_a_copy_on_a_disk(self, bucket: str, store: Any, tmp_path: Path) -> None:
        """A bucket that was copied to a disk loads there."""
        save(f"{bucket}/s", {"a": torch.ones(2)})
        for each in obstore.list(store, "s").collect():
            file = tmp_path / each["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(obstore.get(store, each["path"]).bytes()))
        assert torch.equal(aiockpt.load(tmp_path / "s")["a"], torch.ones(2))


class TestSweep:
    """A later save removes what a dead one has left."""

    def left(self, store: Any, bucket: str) -> None:
        """Leave what a process leaves that dies before its commit."""
        upload = objects.Upload(storage_at(f"{bucket}/run/s-1"), 0)
        upload._destination.put_note([upload._attempt])
        obstore.put(store, f"run/s-1/{upload._key}", b"x")
        time.sleep(0.01)  # the clock of the store goes on

    def test_it_is_removed_when_it_is_old(self, bucket, store, monkeypatch) -> None:
        """A young one may belong to a save that goes on."""
        self.left(store, bucket)
        save(f"{bucket}/run/s-2", {"a": 1})
        assert len(keys(store)) == 4
        monkeypatch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
        save(f"{bucket}/run/s-3", {"a": 1})
        assert [each for each in keys(store) if "s-1" in each or ".aio" in each] == []

    def test_what_is_committed_stays(self, bucket, store, monkeypatch) -> None:
        """The note of a save that died right after its commit does no harm."""
        save(f"{bucket}/run/s-1", {"a": 1})
        (found,) = aiockpt.list_checkpoints(f"{bucket}/run")
        attempt = found.files["checkpoint_0.safetensors"].key.partition("/")[0]
        storage_at(f"{bucket}/run/s-1").put_note([attempt])  # type: ignore[attr-defined]
        time.sleep(0.01)
        monkeypatch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
        save(f"{bucket}/run/s-2", {"a": 2})
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 1}
        assert not [each for each in keys(store) if ".aiockpt" in each]

    def test_a_replaced_one_stays_for_its_readers(self, bucket, monkeypatch) -> None:
        """Then its files go."""
        save(f"{bucket}/run/s", {"a": torch.ones(2)})
        monkeypatch.setattr(objects, "_HEAD_BYTES", 0)
        found = aiockpt.list_checkpoints(f"{bucket}/run")[0]
        save(f"{bucket}/run/s", {"a": torch.zeros(2)})
        assert torch.equal(aiockpt.load(found.file_of(0))["a"], torch.ones(2))
        time.sleep(0.01)
        monkeypatch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
        save(f"{bucket}/run/t", {"a": 1})
        with pytest.raises(StorageError, match="no such"):
            aiockpt.load(found.file_of(0))


class TestLoads:
    """What is not there, or not whole, is an error that says so."""

    def test_nothing(self, bucket: str) -> None:
        """The error says what is there."""
        with pytest.raises(CheckpointNotFoundError, match="there is no such"):
            aiockpt.load(f"{bucket}/run/s-1")
        assert aiockpt.latest(f"{bucket}/run") is None

    def test_a_directory_of_checkpoints(self, bucket: str) -> None:
        """The newest one is named, by its address."""
        save(f"{bucket}/run/s-1", {"a": 1})
        newest = f"it holds 1 checkpoint, the newest is {bucket}/run/s-1; load that"
        with pytest.raises(CheckpointNotFoundError, match=newest):
            aiockpt.load(f"{bucket}/run")

    def test_a_missing_file(self, bucket: str, store: Any) -> None:
        """It is named."""
        save(f"{bucket}/s", {"a": 1})
        (key,) = (
            each["path"]
            for each in obstore.list(store).collect()
            if each["path"].endswith(".safetensors")
        )
        obstore.delete(store, key)
        with pytest.raises(CheckpointNotFoundError, match="missing, or not of the"):
            aiockpt.load(f"{bucket}/s")

    def test_some_of_it(self, bucket: str) -> None:
        """Few bytes are read for few tensors."""
        state = {f"w{n}": torch.full((MIB,), n) for n in range(20)}
        save(f"{bucket}/s", state)
        seen: list[aiockpt.TransferEvent] = []
        remove = aiockpt.add_hook(seen.append)
        try:
            found = aiockpt.load(f"{bucket}/s", select=["w3"])
        finally:
            remove()
        assert torch.equal(found["w3"], state["w3"])
        assert seen[-1].nbytes <= 10 * MIB

    def test_a_safetensors_file_of_another_tool(self, bucket, store, tmp_path) -> None:
        """A file, or a directory of such, loads as from a disk."""
        from safetensors.torch import save_file

        save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
        obstore.put(
            store, "hf/m.safetensors", (tmp_path / "m.safetensors").read_bytes()
        )
        for path in (f"{bucket}/hf", f"{bucket}/hf/m.safetensors"):
            assert torch.equal(aiockpt.load(path)["w"], torch.ones(2))

    def test_a_file_of_torch(self, bucket, store, tmp_path) -> None:
        """It needs a disk, and the error says so."""
        torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
        obstore.put(store, "m.pt", (tmp_path / "m.pt").read_bytes())
        with pytest.raises(StorageError, match="copy it to a disk"):
            aiockpt.load(f"{bucket}/m.pt")

    def test_mmap_reads_it(self, bucket: str) -> None:
        """An object cannot be mapped."""
        save(f"{bucket}/s", {"w": torch.ones(2)})
        assert torch.equal(aiockpt.load(f"{bucket}/s", mmap=True)["w"], torch.ones(2))


class TestCommands:
    """The commands take an address for a path."""

    def test_ls(self, bucket: str, store: Any, capsys) -> None:
        """It lists, and names what is not whole."""
        save(f"{bucket}/run/step-1", {"a": 1})
        TestSweep().left(store, bucket)
        assert main(["ls", f"{bucket}/run"]) == 0
        said = capsys.readouterr()
        assert "step-1" in said.out
        assert "s-1: not whole" in said.err
        assert main(["ls", bucket]) == 0
        assert f"aiockpt ls {bucket}/run" in capsys.readouterr().err

    def test_verify_and_inspect(self, bucket: str, capsys) -> None:
        """They name the address."""
        save(f"{bucket}/run/step-1", {"a": torch.ones(3)})
        assert main(["verify", f"{bucket}/run/step-1"]) == 0
        assert f"{bucket}/run/step-1" in capsys.readouterr().out
        assert main(["inspect", f"{bucket}/run/step-1"]) == 0
        assert f"{bucket}/run/step-1" in capsys.readouterr().out
        assert main(["verify", f"{bucket}/run"]) == 1
        assert f"{bucket}/run/step-1" in capsys.readouterr().err

    def test_convert(self, bucket: str, tmp_path: Path, capsys) -> None:
        """A checkpoint goes to a store, and comes from it."""
        state = {"w": torch.ones(3)}
        save(str(tmp_path / "step-1"), state)
        assert main(["convert", str(tmp_path / "step-1"), f"{bucket}/step-1"]) == 0
        assert torch.equal(aiockpt.load(f"{bucket}/step-1")["w"], state["w"])
        assert main(["convert", str(tmp_path / "step-1"), f"{bucket}/step-1"]) == 1
        assert (
            main(["convert", f"{bucket}/step-1", str(tmp_path / "m.safetensors")]) == 0
        )
        assert torch.equal(aiockpt.load(tmp_path / "m.safetensors")["w"], state["w"])
        assert main(["convert", f"{bucket}/step-1", f"{bucket}/m.safetensors"]) == 2
        capsys.readouterr()
