"""Each public verb takes the address of an object store for a path."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import (
    CheckpointerConfig,
    make_background_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.checkpointers import CheckpointWriterConfig
from aiockpt.errors import CheckpointNotFoundError, IntegrityError
from aiockpt.storage.directory import StrPath
from aiockpt.testing import assert_same
from tests.objects.conftest import Place, Proxied
from tests.support.commandline import Commands, aiockpt_command
from tests.support.object_saver import COMMAND
from tests.support.objectstore import OWNER
from tests.support.saving import training_state

MIB = 1 << 20


def state(value: float) -> dict[str, Any]:
    """Return something small."""
    return {"w": torch.full((50_000,), float(value)), "step": value}


def save(path: StrPath, value: Any, step: int | None = None, **options: Any) -> None:
    """Save in the foreground."""
    config = CheckpointerConfig(writer_config=CheckpointWriterConfig(**options))
    with make_sync_checkpointer(config) as made:
        made.save(value, path, step=step)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Run commands in this process."""
    return Commands(capsys)


class TestPython:
    """What a program asks of the package."""

    def test_a_training_state(self, place: Place) -> None:
        """Everything that a training loop saves comes back."""
        save(place("run/step-1"), training_state())
        assert_same(aiockpt.load(place("run/step-1")), training_state())

    def test_a_path_object(self, place: Place) -> None:
        """`Path` takes one of the slashes away, and the address is still known."""
        save(Path(place("run")) / "step-1", state(1))
        assert_same(aiockpt.load(Path(place("run")) / "step-1"), state(1))

    def test_what_is_there(self, place: Place) -> None:
        """Checkpoints are listed in the order of their commits, with their files."""
        assert aiockpt.list_checkpoints(place()) == []
        assert aiockpt.latest(place()) is None
        for step in (2, 1, 3):
            save(place(f"run/step-{step}"), state(step))
        listed = aiockpt.list_checkpoints(place())
        assert [each.step for each in listed] == [2, 1, 3]
        newest = aiockpt.latest(place())
        assert newest is not None
        assert os.fspath(newest) == place("run/step-3")
        assert newest.nbytes == sum(
            size
            for key, size in place.objects().items()
            if key.startswith("step-3/") and key.endswith(".safetensors")
        )
        assert_same(aiockpt.load(newest), state(3))

    def test_retention(self, place: Place) -> None:
        """Old checkpoints go with all their objects."""
        for step in range(5):
            path = place(f"run/step-{step}")
            save(path, state(step), keep_last=2, keep_every=3)
        left = [each.step for each in aiockpt.list_checkpoints(place())]
        assert left == [0, 3, 4]
        names = sorted(key.partition("/")[0] for key in place.objects())
        assert names == ["step-0"] * 2 + ["step-3"] * 2 + ["step-4"] * 2

    def test_a_bucket_that_was_copied(self, place: Place, tmp_path: Path) -> None:
        """On a disk, the same objects are a checkpoint, too."""
        save(place("run/step-1"), state(1))
        store = place.server.store()
        for key in place.objects():
            file = tmp_path / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(store.get(f"{place.prefix}/run/{key}").bytes())
        assert_same(aiockpt.load(tmp_path / "step-1"), state(1))
        newest = aiockpt.latest(tmp_path)
        assert newest is not None
        assert newest.step == 1

    def test_a_store_that_cannot_travel(self, place: Place, tmp_path: Path) -> None:
        """It hinders no checkpoint process that does not need it."""
        store = place.server.store(credential_provider=lambda: None)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(store)
        aiockpt.register_store("s3://here", store)
        with make_background_checkpointer() as made:
            made.save(state(1), tmp_path / "step-1").result()
            made.save(state(1), place("run/step-1")).result()
        assert_same(aiockpt.load(place("run/step-1")), state(1))

    def test_the_programs_of_the_page(self, place: Place) -> None:
        """docs/howto/checkpoints.md registers a store, saves to it and loads."""
        from obstore.store import S3Store

        bucket, endpoint = place.server.bucket, f"http://127.0.0.1:{place.port}"
        name, key = OWNER.key, OWNER.secret
        run, state = place("run"), {"w": torch.ones(1000), "step": 100}

        store = S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=name,
            secret_access_key=key,
            client_options={"allow_http": True},  # for an http:// endpoint
        )
        aiockpt.register_store(f"s3://{bucket}", store)

        with aiockpt.make_background_checkpointer() as checkpointer:
            checkpointer.save(state, f"{run}/step-100")
        if newest := aiockpt.latest(run):
            aiockpt.load(newest, into=state)
        assert newest
        assert newest.step == 100

    def test_nothing_is_there(self, place: Place) -> None:
        """The error has the address, and says what is there."""
        save(place("run/step-1"), state(1))
        with pytest.raises(CheckpointNotFoundError, match=place("run/step-2")):
            aiockpt.load(place("run/step-2"))
        with pytest.raises(CheckpointNotFoundError, match="the newest is s3://"):
            aiockpt.load(place("run"))

    def test_damage(self, place: Place) -> None:
        """A byte that has changed in the store is found by its digest."""
        save(place("run/step-1"), state(1))
        (key,) = (key for key in place.objects() if key.endswith(".safetensors"))
        key, store = f"{place.prefix}/run/{key}", place.server.store()
        data = bytearray(store.get(key).bytes())
        data[-5000] ^= 4
        store.put(key, bytes(data))
        with pytest.raises(IntegrityError):
            aiockpt.load(place("run/step-1"))

    def test_a_selection_reads_little(self, place: Place, proxied: Proxied) -> None:
        """5 % of the bytes are asked for, and at most 6 % of all are read."""
        whole = {f"w{i}": torch.full((MIB,), float(i)) for i in range(20)}  # 80 MiB
        save(place("run/step-1"), whole, chunk_bytes=256 << 10)
        proxy, there = proxied()
        found = aiockpt.load(there("run/step-1"), select=["w7"])
        assert_same(found, {"w7": whole["w7"]})
        total = sum(value.nbytes for value in whole.values())
        assert proxy.down <= 0.06 * total

    def test_a_load_reads_once(self, place: Place, proxied: Proxied) -> None:
        """A whole load reads hardly more than what there is."""
        whole = {f"w{i}": torch.full((MIB,), float(i)) for i in range(20)}
        save(place("run/step-1"), whole)
        proxy, there = proxied()
        assert_same(aiockpt.load(there("run/step-1")), whole)
        total = sum(value.nbytes for value in whole.values())
        assert proxy.down <= 1.05 * total


class TestCommands:
    """What a person types."""

    def test_ls(self, place: Place, cli: Commands) -> None:
        """It lists the checkpoints of a directory."""
        for step in (1, 2):
            save(place(f"run/step-{step}"), state(step))
        shown = cli("ls", place())[0]
        assert "step-1" in shown
        assert "step-2" in shown

    def test_inspect(self, place: Place, cli: Commands) -> None:
        """It shows the tensors, and reads no more than the header."""
        save(place("run/step-1"), state(1))
        shown = json.loads(cli("inspect", "--json", place("run/step-1"))[0])
        assert "w" in json.dumps(shown)
        assert "50000" in cli("inspect", place("run/step-1"))[0].replace(",", "")

    def test_verify(self, place: Place, cli: Commands) -> None:
        """It reads every byte, and finds damage."""
        save(place("run/step-1"), state(1))
        cli("verify", place("run/step-1"))
        (key,) = (key for key in place.objects() if key.endswith(".safetensors"))
        key, store = f"{place.prefix}/run/{key}", place.server.store()
        data = bytearray(store.get(key).bytes())
        data[-5000] ^= 4
        store.put(key, bytes(data))
        cli("verify", place("run/step-1"), code=1)

    def test_convert(self, place: Place, cli: Commands, tmp_path: Path) -> None:
        """To an object store, and back to a file system."""
        save(str(tmp_path / "step-1"), state(1))
        cli("convert", tmp_path / "step-1", place("run/step-1"))
        assert_same(aiockpt.load(place("run/step-1")), state(1))
        shutil.rmtree(tmp_path / "step-1")
        cli("convert", place("run/step-1"), tmp_path / "again")
        assert_same(aiockpt.load(tmp_path / "again"), state(1))

    def test_credentials_of_the_environment(self, place: Place) -> None:
        """Programs find the store as obstore does, and nothing is registered."""
        root, environment = place.child()
        path = f"{root}/{place.prefix}/run"
        command = [*COMMAND, "save", f"{path}/step-1", "1", "0"]
        subprocess.run(command, env=environment, check=True, timeout=100)
        done = subprocess.run(
            aiockpt_command("ls", path),
            env=environment,
            check=True,
            timeout=100,
            capture_output=True,
            text=True,
        )
        assert "step-1" in done.stdout
