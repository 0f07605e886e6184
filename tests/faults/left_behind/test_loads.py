"""What a load leaves behind, in memory and at the path that it is from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiockpt import (
    AsyncCheckpointer,
    CheckpointerConfig,
    TransportError,
    make_async_checkpointer,
)
from aiockpt.checkpointers import peer
from aiockpt.testing import CutAfter, FaultProxy, Refuse
from tests.support.proofs import Cell, each_cell
from tests.support.ranks import process
from tests.support.transports import MIB, arenas, port_of, transport, weights

LOOP = "asyncio"  # uvloop's processes would be no forks of one with torch

pytestmark = [pytest.mark.asyncio(loop_factories=[LOOP]), pytest.mark.timeout(120)]

MIB_SAVED = 48
"""Three chunks, of which some are there when a load is cut short."""


PROGRAM = """
import os, signal, sys
from aiockpt.checkpointers import CheckpointReader, RankInfo
from tests.support.transports import weights
reader = CheckpointReader(RankInfo(0, 1))
die = lambda nbytes: os.kill(os.getpid(), signal.SIGKILL)
reader.read(sys.argv[1], {into}, on_bytes=die)
"""


def template_of(cell: Cell) -> dict[str, Any] | None:
    """Return what is loaded into."""
    if "state_dict=" not in cell.call:
        return None
    return weights(0.0, mib=MIB_SAVED, count=3)


def left(template: dict[str, Any] | None, before: int) -> str:
    """Say what is left of a load that has not succeeded."""
    if template is None:
        return "nothing" if arenas() <= before else "something"
    filled = [bool(each.any()) for each in template.values()]
    return "torn" if any(filled) else "untouched"


def files(path: Path) -> dict[str, int]:
    """Return what lies below a path, and when it was changed."""
    return {str(each): each.stat().st_mtime_ns for each in path.rglob("*")}


@asynccontextmanager
async def saved(path: Path) -> AsyncIterator[AsyncCheckpointer]:
    """Save something to ``path``."""
    config = CheckpointerConfig(use_process=False)
    async with make_async_checkpointer(config) as made:
        handle = await made.save(weights(mib=MIB_SAVED, count=3), path)
        assert await handle.written()
        yield made


@each_cell("AsyncCheckpointer.load*: timeout", "AsyncCheckpointer.load*: cancel")
async def test_a_cancel(cell: Cell, tmp_path: Path) -> None:
    """The thread that reads has ended, and keeps nothing."""
    template, arrived, go = template_of(cell), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(_: int) -> None:
        loop.call_soon_threadsafe(arrived.set)
        go.wait(30)

    async with saved(tmp_path / "s") as made:
        before, found = arenas(), files(tmp_path)
        load = made.load(tmp_path / "s", template, on_bytes=hold)
        loading = asyncio.create_task(load)
        await arrived.wait()
        loading.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait({loading})
        assert loading.cancelled()
        del load, loading  # which keep where they were cut
        assert cell.left in (f"{left(template, before)} / before", "as cancel")
        assert files(tmp_path) == found


@each_cell("AsyncCheckpointer.load*: this process dies")
async def test_a_loader_dies(cell: Cell, tmp_path: Path) -> None:
    """Killed when some was read: a load has not written anything."""
    async with saved(tmp_path / "s"):
        found = files(tmp_path)
        into = f"weights(0.0, mib={MIB_SAVED}, count=3)" if "=" in cell.call else None
        program = PROGRAM.format(into=into)
        async with process("-c", program, str(tmp_path / "s")) as loader:
            assert await loader.wait() == -9
        assert files(tmp_path) == found
    assert cell.left == "before"


@each_cell("AsyncCheckpointer.load*: the other one dies")
async def test_a_sender_dies(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer from which is loaded, instead of a path."""
    monkeypatch.setattr(peer, "READER_STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(peer, "READER_CONNECTIONS", 1)
    template = template_of(cell)
    async with transport(insecure=True, chunk_bytes=MIB) as sender:
        await sender.send_checkpoint([], 1, weights(mib=MIB_SAVED, count=3))
        dies = [CutAfter(20 * MIB)]  # the manifest comes, and some bytes
        there = ("127.0.0.1", port_of(sender))
        async with (
            FaultProxy(*there, faults=dies, otherwise=Refuse()) as proxy,
            make_async_checkpointer(CheckpointerConfig(use_process=False)) as made,
        ):
            before = arenas()
            with pytest.raises(TransportError):
                await made.load(proxy.url("/checkpoint/1"), template)
            assert left(template, before) == cell.left
