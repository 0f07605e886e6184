"""The checkpointers pass the public suite in an object store of obstore."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aiockpt import (
    AsyncCheckpointer,
    BackgroundCheckpointer,
    CheckpointerConfig,
    SyncCheckpointer,
    make_async_checkpointer,
    make_background_checkpointer,
    make_sync_checkpointer,
    register_store,
)
from aiockpt.storage.interface import storage_at
from aiockpt.testing import CheckpointerConformance

obstore = pytest.importorskip("obstore")
obstore.put(obstore.store.MemoryStore(), "warm", b"")  # its threads stay

pytestmark = pytest.mark.asyncio

IN_A_THREAD = CheckpointerConfig(use_process=False)


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


class TestSyncCheckpointer(_InMemory, CheckpointerConformance[SyncCheckpointer]):
    """It saves without an event loop, in the foreground."""

    @asynccontextmanager
    async def checkpointer(self):
        with make_sync_checkpointer() as made:
            yield made


class TestAsyncCheckpointer(_InMemory, CheckpointerConformance[AsyncCheckpointer]):
    """It runs on the event loop, and a thread writes."""

    config: ClassVar = IN_A_THREAD

    @asynccontextmanager
    async def checkpointer(self):
        async with make_async_checkpointer(self.config) as made:
            yield made


class TestBackgroundCheckpointer(
    _InMemory, CheckpointerConformance[BackgroundCheckpointer]
):
    """It needs no event loop, and a thread writes."""

    config: ClassVar = IN_A_THREAD

    @asynccontextmanager
    async def checkpointer(self):
        with make_background_checkpointer(self.config) as made:
            yield made
