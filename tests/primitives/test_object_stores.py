"""Checkpoints in a store in memory: commits, races, dead saves, bad input."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

import aiockpt
from aiockpt.checkpointers import (
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
    WriterHook,
)
from aiockpt.cli import main
from aiockpt.errors import CheckpointNotFoundError, StagingError, StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.memory.arena import ArenaPool
from aiockpt.storage.directory import MARKER
from aiockpt.storage.interface import find_checkpoint, storage_at
from aiockpt.testing import assert_same
from aiockpt.transfer.live import LiveState
from aiockpt.transfer.remarks import Remarks

obstore = pytest.importorskip("obstore")
obstore.put(obstore.store.MemoryStore(), "warm", b"")  # its threads stay
objects = pytest.importorskip("aiockpt.storage.objects")
requests = pytest.importorskip("aiockpt.storage.bucket")

MIB = 1 << 20
FILE = "checkpoint_0.safetensors"


@pytest.fixture
def store() -> Any:
    """Return a store in memory."""
    return obstore.store.MemoryStore()


@pytest.fixture
def bucket(store: Any) -> Iterator[str]:
    """Yield the address of the store."""
    address = f"memory://{secrets.token_hex(4)}"
    aiockpt.register_store(address, store)
    yield address
    aiockpt.register_store(address, None)  # checkpointers of other tests pickle it


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

    def test_what_cannot_be_registered(self, store: Any) -> None:
        """It is no scheme and bucket."""
        for address in ("s3://bucket/run", "bucket", "s3://"):
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
def test_a_store_that_does_not_pickle(bucket: str, store: Any, tmp_path: Path) -> None:
    """The checkpoint process does without it, and says so for its addresses only."""
    with aiockpt.make_background_checkpointer() as checkpointer:
        assert checkpointer.save({"a": 1}, tmp_path / "s").result(60)
        handle = checkpointer.save({"a": 1}, f"{bucket}/s")
        with pytest.raises(StorageError, match="use_process=False"):
            handle.result(60)
    assert keys(store) == []


def test_an_error_of_the_program_while_a_store_is_pickled(bucket: str) -> None:
    """It is the program's, such as that of a signal's handler."""

    class PreemptedError(Exception):
        """The program's own."""

    class Interrupted:
        def __reduce__(self) -> str:
            raise PreemptedError

    interrupted: Any = Interrupted()
    aiockpt.register_store(bucket, interrupted)
    with pytest.raises(PreemptedError):
        aiockpt.make_background_checkpointer()


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

        monkeypatch.setattr(obstore, "put", lose)
        save(f"{bucket}/s", {"a": 1})
        assert aiockpt.load(f"{bucket}/s") == {"a": 1}

    def test_a_state_that_changes_meanwhile(self, bucket, store, monkeypatch) -> None:
        """Its digests come first, so it is refused."""
        put, state = obstore.put, {"w": torch.zeros(5 * MIB)}

        def change(store: Any, key: str, data: Any, **how: Any) -> Any:
            if "step-1/" in key:
                state["w"][0] = 1
            return put(store, key, data, **how)

        monkeypatch.setattr(obstore, "put", change)
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

        monkeypatch.setattr(obstore, "put", plain)
        with pytest.raises(StorageError, match="no conditional puts"):
            save(f"{bucket}/s", {"a": 1})

    def test_a_marker_of_another_tool(self, bucket: str, store: Any) -> None:
        """It is not replaced."""
        obstore.put(store, f"s/{MARKER}", b'{"commit": 1}')
        with pytest.raises(StorageError, match="not a valid marker"):
            save(f"{bucket}/s", {"a": 1})
        assert bytes(obstore.get(store, f"s/{MARKER}").bytes()) == b'{"commit": 1}'

    def test_a_directory_of_a_console(self, bucket, store, monkeypatch) -> None:
        """It is an empty object with the directory's own name."""
        found = obstore.list

        def with_itself(store: Any, prefix: Any = None, **how: Any) -> Any:
            itself = [{"path": prefix, "size": 0}] if prefix == "s" else []
            return iter([itself, *found(store, prefix, **how)])

        with monkeypatch.context() as patch:
            patch.setattr(obstore, "list", with_itself)
            objects.Upload(storage_at(f"{bucket}/s"), 0)

    def test_what_a_put_replaces(self) -> None:
        """Google's store asks for its number, the others for the entity tag."""
        for meta in ({"e_tag": "a", "version": "7"}, {"e_tag": "a", "version": None}):
            expected = {name: value for name, value in meta.items() if value}
            assert requests.StoredContent(meta, b"").version == expected

    @pytest.mark.parametrize("name", ["run/.aiockpt", "run/.aiockpt/s-1"])
    def test_the_place_of_the_notes(self, bucket: str, name: str) -> None:
        """A sweep would read what is there."""
        with pytest.raises(StorageError, match="is for the notes of saves"):
            save(f"{bucket}/{name}", {"a": 1})

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


class TestRanks:
    """Rank 0 commits what the others have uploaded."""

    def uploaded(self, path: str, rank: int) -> tuple[Any, str]:
        """Upload a rank's file; return the draft and what rank 0 is told."""
        draft, config = objects.Upload(storage_at(path), rank), CheckpointWriterConfig()
        with LiveState(
            {"rank": rank},
            step=1,
            chunk_bytes=config.chunk_bytes,
            allow_pickle=False,
            pool=ArenaPool(keep=1),
            remarks=Remarks(FILE_LIMITS, FILE_LIMITS),
        ) as live:
            return draft, draft.arrival(draft.write(live))

    def test_a_rank_that_stops_waiting(self, bucket: str, store: Any) -> None:
        """Rank 0 may commit its file just now, so it stays."""
        first, others = self.uploaded(f"{bucket}/s", 0), self.uploaded(f"{bucket}/s", 1)
        others[0].discard()
        first[0].commit(1, {0: first[1], 1: others[1]})
        assert len(keys(store)) == 5
        for each in (first, others):
            each[0].__exit__()
        assert len(keys(store)) == 3
        assert aiockpt.load(f"{bucket}/s", rank=1) == {"rank": 1}

    def test_ranks_that_agree_on_it(self, bucket: str, store: Any) -> None:
        """If all know that rank 0 will not commit, the file is deleted."""
        for rank in (0, 1):
            self.uploaded(f"{bucket}/s", rank)[0].discard(agreed=True)
        assert keys(store) == []

    def test_another_store(self, bucket: str, store: Any) -> None:
        """A rank whose file is elsewhere has no note here."""
        other = f"memory://{secrets.token_hex(4)}"
        aiockpt.register_store(other, obstore.store.MemoryStore())
        first, others = self.uploaded(f"{bucket}/s", 0), self.uploaded(f"{other}/s", 1)
        with pytest.raises(StorageError, match="do all ranks save to one store"):
            first[0].commit(1, {0: first[1], 1: others[1]})

    def test_a_rank_that_has_waited_for_long(self, bucket, store, monkeypatch) -> None:
        """A sweep may delete its file just now, so nothing is committed."""
        monkeypatch.setattr(objects, "_EXPIRED_AFTER_S", 0.05)
        others = self.uploaded(f"{bucket}/s", 1)
        time.sleep(0.1)
        first = self.uploaded(f"{bucket}/s", 0)
        with pytest.raises(StorageError, match="or has waited for too long"):
            first[0].commit(1, {0: first[1], 1: others[1]})
        with pytest.raises(StorageError, match="has paused for 0 s"):
            others[0]._renew()
        assert aiockpt.list_checkpoints(bucket) == []

    def test_a_long_upload(self, bucket: str, store: Any, monkeypatch) -> None:
        """Its note is written again before each part."""
        monkeypatch.setattr(objects, "_RENEWED_AFTER_S", 0.0)
        put, notes = obstore.put, list[str]()

        def count(store: Any, key: str, data: Any, **how: Any) -> Any:
            notes.extend([key] if ".aiockpt" in key else ())
            return put(store, key, data, **how)

        monkeypatch.setattr(obstore, "put", count)
        save(f"{bucket}/s", {"w": torch.ones(6 * MIB)})
        assert len(notes) >= 4
        assert torch.equal(aiockpt.load(f"{bucket}/s")["w"], torch.ones(6 * MIB))


class TestRemovals:
    """A checkpoint is removed as a whole, and nothing else is."""

    def test_one_that_was_replaced_meanwhile(self, bucket: str) -> None:
        """Its saver would lose what it was told that it has saved."""
        save(f"{bucket}/run/s-1", {"a": 1})
        (found,) = aiockpt.list_checkpoints(f"{bucket}/run")
        run: Any = storage_at(f"{bucket}/run")
        save(f"{bucket}/run/s-1", {"a": 2})
        assert not run.retire(found)
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 2}

    def test_one_that_is_replaced_just_then(self, bucket, store, monkeypatch) -> None:
        """The marker is exchanged by its version, so the new one stays."""
        save(f"{bucket}/run/s-1", {"a": 1})
        (found,) = aiockpt.list_checkpoints(f"{bucket}/run")
        put = obstore.put

        def between(place: Any, key: str, data: Any, **how: Any) -> Any:
            if key.endswith(MARKER):
                monkeypatch.setattr(obstore, "put", put)
                save(f"{bucket}/run/s-1", {"a": 2})
            return put(place, key, data, **how)

        monkeypatch.setattr(obstore, "put", between)
        run: Any = storage_at(f"{bucket}/run")
        assert not run.retire(found)
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 2}
        sweep(bucket, monkeypatch)
        assert len([each for each in keys(store) if "s-1" in each]) == 2

    def test_a_removal_that_was_interrupted(
        self, bucket, store, monkeypatch, caplog
    ) -> None:
        """It is no checkpoint any more; a later save ends the removal."""
        save(f"{bucket}/run/s-1", {"a": 1})
        (found,) = aiockpt.list_checkpoints(f"{bucket}/run")

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        run: Any = storage_at(f"{bucket}/run")
        with monkeypatch.context() as patch:
            patch.setattr(obstore, "delete", die)
            with pytest.raises(KeyboardInterrupt):
                run.retire(found)
        assert aiockpt.list_checkpoints(f"{bucket}/run") == []
        assert caplog.records == []
        with pytest.raises(CheckpointNotFoundError, match="is being removed"):
            aiockpt.load(f"{bucket}/run/s-1")
        with pytest.raises(StorageError, match="is being removed"):
            save(f"{bucket}/run/s-1", {"a": 1})
        sweep(bucket, monkeypatch)
        assert [each for each in keys(store) if "s-1" in each] == []

    def test_what_others_have_put_there(self, bucket: str, store: Any) -> None:
        """It stays, also below an attempt."""
        save(f"{bucket}/run/s-1", {"a": 1})
        (found,) = aiockpt.list_checkpoints(f"{bucket}/run")
        attempt = found.files[FILE].key.partition("/")[0]
        obstore.put(store, f"run/s-1/{attempt}/notes.txt", b"mine")
        save(f"{bucket}/run/s-2", {"a": 1}, keep_last=1)
        left = [each for each in keys(store) if "s-1" in each]
        assert left == ["run/s-1/ATTEMPT/notes.txt"]

    def test_a_late_end_of_a_save(self, bucket: str, store: Any, monkeypatch) -> None:
        """The note of the saver that has replaced it stays."""
        draft, said = TestRanks().uploaded(f"{bucket}/run/s-1", 0)
        draft.commit(1, {0: said})
        save(f"{bucket}/run/s-1", {"a": 2})
        draft.__exit__()
        sweep(bucket, monkeypatch)
        assert len([each for each in keys(store) if "s-1" in each]) == 2
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 2}

    @pytest.mark.parametrize(
        "note",
        [
            {"name": "s-1", "attempts": [""]},
            {"name": "s-1", "attempts": ["commit.json"]},
            {"name": "s-1/.", "attempts": ["0" * 32]},
            {"name": "..", "attempts": ["0" * 32]},
            {"name": "", "attempts": ["s-1"]},
            "",
        ],
    )
    def test_a_wrong_note(self, bucket, store, monkeypatch, note: object) -> None:
        """It deletes nothing."""
        save(f"{bucket}/run/s-1", {"a": 1})
        obstore.put(store, f"run/.aiockpt/{32 * '0'}.json", msgspec.json.encode(note))
        sweep(bucket, monkeypatch)
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 1}

    def test_a_large_note_is_not_read(self, bucket, store, monkeypatch) -> None:
        """And neither is a large marker."""
        save(f"{bucket}/run/s-1", {"a": 1})
        monkeypatch.setattr(objects, "_MARKER_LIMIT", 10)
        assert aiockpt.list_checkpoints(f"{bucket}/run") == []
        with pytest.raises(StorageError, match="not a valid marker"):
            aiockpt.load(f"{bucket}/run/s-1")


def sweep(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save beside, when all notes are old."""
    time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
        save(f"{bucket}/run/swept", {"a": 1})


class TestCopies:
    """A checkpoint that was made on a disk is in the store without attempts."""

    @pytest.fixture
    def copied(self, bucket: str, store: Any, tmp_path: Path) -> str:
        """Copy one."""
        save(str(tmp_path / "s-1"), {"a": 1})
        for each in (tmp_path / "s-1").iterdir():
            obstore.put(store, f"run/s-1/{each.name}", each.read_bytes())
        return f"{bucket}/run/s-1"

    def test_it_loads(self, copied: str, bucket: str) -> None:
        """It is a checkpoint like any other."""
        assert aiockpt.load(copied) == {"a": 1}
        save(f"{bucket}/run/s-0", {"a": 0})
        found = aiockpt.list_checkpoints(f"{bucket}/run")
        assert [each.name for each in found] == ["s-1", "s-0"]

    def test_it_is_replaced(self, copied, bucket, store, monkeypatch) -> None:
        """Its file is swept."""
        save(copied, {"a": 2})
        sweep(bucket, monkeypatch)
        left = [each for each in keys(store) if "s-1" in each]
        assert left == [f"run/s-1/ATTEMPT/{FILE}", f"run/s-1/{MARKER}"]
        assert aiockpt.load(copied) == {"a": 2}

    def test_it_is_removed(self, copied: str, bucket: str, store: Any) -> None:
        """Nothing is left."""
        save(f"{bucket}/run/s-2", {"a": 2}, keep_last=1)
        assert [each for each in keys(store) if "s-1" in each] == []


class TestSerials:
    """The order is that of the commits, and no save reads all markers for it."""

    def test_requests(self, bucket: str, store: Any, monkeypatch) -> None:
        """A save makes as many beside twenty checkpoints as beside one."""
        count = list[str]()
        for verb in ("get", "put", "head", "list", "list_with_delimiter", "delete"):

            def counted(call: Any, *args: Any, **how: Any) -> Any:
                count.append("")
                return call(*args, **how)

            call = partial(counted, getattr(obstore, verb))
            monkeypatch.setattr(obstore, verb, call)
        sums = []
        for step in range(20):
            count.clear()
            save(f"{bucket}/run/step-{step}", {"a": step})
            sums.append(len(count))
        assert sums[1:] == [sums[1]] * 19
        assert sums[1] <= 9
        steps = [each.step for each in aiockpt.list_checkpoints(f"{bucket}/run")]
        assert steps == [*range(20)]

    @pytest.mark.parametrize("skew", [-1e6, -0.5, 0.5, 1e6])
    def test_this_host_has_another_clock(self, bucket, monkeypatch, skew: float):
        """Only the store's counts."""
        save(f"{bucket}/run/step-1", {"a": 1})
        now = time.time
        monkeypatch.setattr(objects.time, "time", lambda: now() + skew)
        time.sleep(1.1)
        save(f"{bucket}/run/step-0", {"a": 0})
        monkeypatch.setattr(objects.time, "time", now)
        monkeypatch.setattr(objects, "_serials", {})  # another process
        time.sleep(1.1)
        save(f"{bucket}/run/step-2", {"a": 0})
        found = aiockpt.list_checkpoints(f"{bucket}/run")
        assert [each.step for each in found] == [1, 0, 2]

    def test_the_highest_one(self, bucket: str, store: Any) -> None:
        """A number beyond it would make a marker that nobody can read."""
        save(f"{bucket}/run/s-1", {"a": 1})
        text = bytes(obstore.get(store, f"run/s-1/{MARKER}").bytes())
        highest = re.sub(rb'"serial": \d+', b'"serial": %d' % (2**63 - 1), text)
        obstore.put(store, f"run/s-1/{MARKER}", highest)
        save(f"{bucket}/run/s-1", {"a": 2})
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 2}


class TestSweep:
    """A later save removes what a dead one has left."""

    def left(self, store: Any, bucket: str) -> None:
        """Leave what a process leaves that dies before its commit."""
        upload = objects.Upload(storage_at(f"{bucket}/run/s-1"), 0)
        upload._renew(at_once=True)
        obstore.put(store, f"run/s-1/{upload._attempt}/{FILE}", b"x")
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
        attempt = found.files[FILE].key.partition("/")[0]
        storage_at(f"{bucket}/run/s-1").put_note(32 * "0", [attempt])  # type: ignore[attr-defined]
        time.sleep(0.01)
        monkeypatch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
        save(f"{bucket}/run/s-2", {"a": 2})
        assert aiockpt.load(f"{bucket}/run/s-1") == {"a": 1}
        assert not [each for each in keys(store) if ".aiockpt" in each]

    def test_a_replaced_one_stays_for_its_readers(self, bucket, monkeypatch) -> None:
        """Then its files go."""
        save(f"{bucket}/run/s", {"a": torch.ones(2)})
        monkeypatch.setattr(objects, "_HEAD_BYTES", 1)
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

    def test_a_store_that_fails(self, bucket: str, monkeypatch) -> None:
        """A checkpoint that cannot be asked for is not left out."""
        for step in (1, 2):
            save(f"{bucket}/run/s-{step}", {"a": step})
        get = obstore.get

        def fail(store: Any, key: str, **how: Any) -> Any:
            if key == f"run/s-2/{MARKER}":
                raise obstore.exceptions.GenericError("busy - 503 Slow Down")
            return get(store, key, **how)

        monkeypatch.setattr(obstore, "get", fail)
        for call in (
            lambda: aiockpt.latest(f"{bucket}/run"),
            lambda: find_checkpoint(f"{bucket}/run/s-2"),
        ):
            with pytest.raises(StorageError, match="503 Slow Down"):
                call()

    def test_an_empty_file(self, bucket: str, store: Any) -> None:
        """It is no checkpoint."""
        obstore.put(store, "empty.safetensors", b"")
        with pytest.raises(StorageError, match="cannot be read"):
            aiockpt.load(f"{bucket}/empty.safetensors")

    @pytest.mark.parametrize(
        ("failure", "shown"),
        [
            (
                "PUT http://s in 1 s - 503 Slow Down: <Code>SlowDown</Code>",
                "(SlowDown)",
            ),
            (
                "GET http://s - 400 Bad Request: <Code>ExpiredToken</Code>",
                "credentials",
            ),
            ('Generic GCS error: invalid type: string "secret", expected a', "invalid"),
            ("Generic GCS error: unknown variant `secret`", "unknown variant"),
            ("GET http://s - error sending request", "check the endpoint"),
            (type("PanicException", (BaseException,), {}), "does not work with"),
        ],
    )
    def test_what_the_store_says(
        self, bucket, store, monkeypatch, failure: Any, shown: str
    ) -> None:
        """The error has its code or what to check, and nothing that may be a secret."""
        if isinstance(failure, str):
            failure = obstore.exceptions.GenericError(failure)
        monkeypatch.setattr(obstore, "head", Mock(side_effect=failure))
        with pytest.raises(StorageError, match=re.escape(shown)) as caught:
            requests.Bucket(bucket, {bucket: store}).head("key")
        assert "secret" not in str(caught.value)

    def test_an_upload_that_was_aborted(self, bucket, store, monkeypatch) -> None:
        """The error says by whom, and that saving again helps."""
        monkeypatch.setattr(obstore, "put", Mock(side_effect=FileNotFoundError))
        with pytest.raises(StorageError, match=r"was aborted.*save again"):
            requests.Bucket(bucket, {bucket: store}).put_parts("key", [], MIB)

    def test_a_name_that_no_store_takes(self, bucket: str) -> None:
        """It is a typed error."""
        for call in (aiockpt.load, aiockpt.list_checkpoints):
            with pytest.raises(StorageError):
                call(f"{bucket}/a\tb")
        with pytest.raises(StorageError):
            save(f"{bucket}/a\tb", {"a": 1})

    def test_a_directory_of_checkpoints(self, bucket: str) -> None:
        """The newest one is named, by its address."""
        save(f"{bucket}/run/s-1", {"a": 1})
        newest = f"it holds 1 checkpoint, the newest is {bucket}/run/s-1; load that"
        with pytest.raises(StorageError, match=newest):
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
        mapped = aiockpt.load(f"{bucket}/s", mmap=True, select=["w3"])
        assert torch.equal(mapped["w3"], state["w3"])
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
        save(f"{bucket}/step-2", {"w": None})
        capsys.readouterr()
        for how in (["m.safetensors"], ["m", "--hf"]):
            command = ["convert", f"{bucket}/step-2", str(tmp_path / "new" / how[0])]
            assert main([*command, *how[1:]]) == 1
            assert bucket.partition("//")[0] + "/" + bucket[9:] not in (
                capsys.readouterr().err
            )
