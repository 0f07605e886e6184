"""The checkpointers pass the public suite in an object store of obstore."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from aiockpt import register_store
from aiockpt.storage.interface import storage_at
from tests.suites import test_checkpointers as on_disk

obstore = pytest.importorskip("obstore")
obstore.put(obstore.store.MemoryStore(), "warm", b"")  # its threads stay

pytestmark = pytest.mark.asyncio


class _InMemory:
    """The directory is in a store of its own, in this process's memory."""

    @pytest.fixture
    def tmp_path(self) -> Path:
        bucket = f"memory://{secrets.token_hex(4)}"
        register_store(bucket, obstore.store.MemoryStore())
        return Path(bucket, "run")

    def names(self, directory: Path) -> list[str]:
        files, directories = storage_at(directory).listed()
        return [*files, *(each for each in directories if each != ".aiockpt")]

    def occupy(self, path: Path) -> None:
        place: Any = storage_at(path)
        place.bucket.put(place.key, b"precious")


class TestSyncCheckpointer(_InMemory, on_disk.TestSyncCheckpointer):
    """It saves without an event loop, in the foreground."""


class TestAsyncCheckpointer(_InMemory, on_disk.TestAsyncCheckpointerInAThread):
    """It runs on the event loop, and a thread writes."""


class TestBackgroundCheckpointer(
    _InMemory, on_disk.TestBackgroundCheckpointerInAThread
):
    """It needs no event loop, and a thread writes."""
