"""The checkpointers pass the public suite in a real object store."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiockpt import (
    AsyncCheckpointer,
    BackgroundCheckpointer,
    SyncCheckpointer,
    make_async_checkpointer,
    make_background_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.testing import CheckpointerConformance
from tests.objects.conftest import Place

pytestmark = pytest.mark.asyncio


class _InAStore:
    """The directory is a place in the bucket."""

    @pytest.fixture
    def tmp_path(self, place: Place) -> Path:
        self.place = place
        return Path(place())

    def names(self, directory: Path) -> list[str]:
        found = {key.partition("/")[0] for key in self.place.objects()}
        return sorted(found - {".aiockpt"})

    def occupy(self, path: Path) -> None:
        self.place.server.store().put(
            f"{self.place.prefix}/run/{path.name}", b"precious"
        )


class TestSync(_InAStore, CheckpointerConformance[SyncCheckpointer]):
    """It uploads in the foreground."""

    @asynccontextmanager
    async def checkpointer(self):
        with make_sync_checkpointer() as made:
            yield made


class TestAsync(_InAStore, CheckpointerConformance[AsyncCheckpointer]):
    """Its checkpoint process uploads, which gets the registered store."""

    @asynccontextmanager
    async def checkpointer(self):
        async with make_async_checkpointer() as made:
            yield made


class TestBackground(_InAStore, CheckpointerConformance[BackgroundCheckpointer]):
    """So does the one of a program without an event loop."""

    @asynccontextmanager
    async def checkpointer(self):
        with make_background_checkpointer() as made:
            yield made
