"""All checkpointers pass the public suite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import ClassVar

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
from tests.support.proofs import proves

pytestmark = pytest.mark.asyncio

IN_A_THREAD = CheckpointerConfig(use_process=False)


class TestSyncCheckpointer(CheckpointerConformance[SyncCheckpointer]):
    """This checkpointer saves without an event loop, in the foreground."""

    @asynccontextmanager
    async def checkpointer(self):
        with make_sync_checkpointer() as made:
            yield made


@proves(
    "cell AsyncCheckpointer.close, aclose: success",
    by="test_closing_waits_for_what_was_saved",
)
@proves(
    "cell AsyncCheckpointer.load: success",
    "cell SaveHandle.written: success",
    by="test_what_is_saved_is_loaded",
)
class TestAsyncCheckpointer(CheckpointerConformance[AsyncCheckpointer]):
    """This checkpointer runs on the event loop, and a process writes."""

    config: ClassVar = CheckpointerConfig()

    @asynccontextmanager
    async def checkpointer(self):
        async with make_async_checkpointer(self.config) as made:
            yield made


class TestAsyncCheckpointerInAThread(TestAsyncCheckpointer):
    """This checkpointer runs on the event loop, and a thread writes."""

    config = IN_A_THREAD


class TestBackgroundCheckpointer(CheckpointerConformance[BackgroundCheckpointer]):
    """This checkpointer needs no event loop, and a process writes."""

    config: ClassVar = CheckpointerConfig()

    @asynccontextmanager
    async def checkpointer(self):
        with make_background_checkpointer(self.config) as made:
            yield made


@pytest.mark.nightly
class TestBackgroundCheckpointerInAThread(TestBackgroundCheckpointer):
    """This checkpointer needs no event loop, and a thread writes."""

    config = IN_A_THREAD
