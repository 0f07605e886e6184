"""Each public verb takes the address of an object store for a path."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import (
    CheckpointerConfig,
    make_sync_checkpointer,
)
from aiockpt.checkpointers import CheckpointWriterConfig
from aiockpt.errors import IntegrityError
from aiockpt.storage.directory import StrPath
from aiockpt.testing import assert_same
from tests.objects.conftest import Place, Proxied
from tests.support.commandline import Commands, aiockpt_command
from tests.support.object_saver import COMMAND
from tests.support.objectstore import OWNER

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

    def test_a_load_reads_once_and_a_selection_little(
        self, place: Place, proxied: Proxied
    ) -> None:
        """A whole load reads 5 % more at most, and 5 % of the bytes 6 %."""
        whole = {f"w{i}": torch.full((MIB,), float(i)) for i in range(20)}  # 80 MiB
        save(place("run/step-1"), whole, chunk_bytes=256 << 10)
        total = sum(value.nbytes for value in whole.values())
        for select, share in ((None, 1.05), (["w7"], 0.06)):
            proxy, there = proxied()
            found = aiockpt.load(there("run/step-1"), select=select)
            assert_same(found, {key: whole[key] for key in select or whole})
            assert proxy.down <= share * total


class TestCommands:
    """What a person types."""

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
        with pytest.raises(IntegrityError):
            aiockpt.load(place("run/step-1"))

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
