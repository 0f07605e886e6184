"""All checkpointers pass the public suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiockpt import (
    AsyncCheckpointer,
    BackgroundCheckpointer,
    CheckpointerConfig,
    SyncCheckpointer,
    make_async_checkpointer,
    make_background_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.testing import CheckpointerConformance

pytestmark = pytest.mark.asyncio

IN_A_THREAD = CheckpointerConfig(use_process=False)


class TestSyncCheckpointer(CheckpointerConformance[SyncCheckpointer]):
    """Without an event loop, in the foreground."""

    @asynccontextmanager
    async def checkpointer(self) -> AsyncIterator[SyncCheckpointer]:
        """Make one."""
        with make_sync_checkpointer() as made:
            yield made


class TestAsyncCheckpointer(CheckpointerConformance[AsyncCheckpointer]):
    """On the event loop; a process writes."""

    @asynccontextmanager
    async def checkpointer(self) -> AsyncIterator[AsyncCheckpointer]:
        """Make one."""
        async with make_async_checkpointer() as made:
            yield made


class TestAsyncCheckpointerInAThread(CheckpointerConformance[AsyncCheckpointer]):
    """On the event loop; a thread writes."""

    @asynccontextmanager
    async def checkpointer(self) -> AsyncIterator[AsyncCheckpointer]:
        """Make one."""
        async with make_async_checkpointer(IN_A_THREAD) as made:
            yield made


class TestBackgroundCheckpointer(CheckpointerConformance[BackgroundCheckpointer]):
    """Without an event loop; a process writes."""

    @asynccontextmanager
    async def checkpointer(self) -> AsyncIterator[BackgroundCheckpointer]:
        """Make one."""
        with make_background_checkpointer() as made:
            yield made


class TestBackgroundCheckpointerInAThread(
    CheckpointerConformance[BackgroundCheckpointer]
):
    """Without an event loop; a thread writes."""

    @asynccontextmanager
    async def checkpointer(self) -> AsyncIterator[BackgroundCheckpointer]:
        """Make one."""
        with make_background_checkpointer(IN_A_THREAD) as made:
            yield made
