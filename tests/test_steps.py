"""A step that is none is refused by its name; one of another integer type is taken."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt import latest, make_async_checkpointer
from aiockpt.checkpointers.config import RankInfo
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.checkpointers.stager import DefaultStager
from aiockpt.testing import assert_same
from tests.support.groups import transports as group_transports
from tests.support.saved import names, sync_checkpointer
from tests.support.transports import pair, weights

pytestmark = pytest.mark.asyncio

WRONG = [
    ("5", TypeError, r"step must be an integer, got '5' \(str\); pass int\(step\)"),
    (5.0, TypeError, r"step must be an integer, got 5.0 \(float\)"),
    (-1, ValueError, r"step must be from 0 to 2\*\*63 - 1, got -1"),
    (1 << 63, ValueError, "step must be from 0"),
]
RIGHT = [np.int64(7), torch.tensor(7), 7]

right = pytest.mark.parametrize("step", RIGHT, ids=["numpy", "torch", "int"])


async def test_no_checkpointer_takes_it(tmp_path: Path) -> None:
    """At once, before anything is staged or written."""
    async with (
        aclosing(CheckpointProcess(RankInfo(0, 1))) as process,
        make_async_checkpointer() as saver,
    ):
        stager, checkpointer = DefaultStager(), sync_checkpointer()
        for wrong, error, reason in WRONG:
            step: Any = wrong
            with pytest.raises(error, match=reason):
                checkpointer.save(weights(), tmp_path / "a", step=step)
            with pytest.raises(error, match=reason):
                await saver.save(weights(), tmp_path / "a", step=step)
            with pytest.raises(error, match=reason):
                await process.write(weights(), tmp_path / "a", step=step)
            with pytest.raises(error, match=reason):
                await stager.stage(weights(), step=step)
        assert saver.statistics().saves == 0
        await stager.close()
        checkpointer.close()
    assert not names(tmp_path)


@right
async def test_checkpointers_take_any_integer(tmp_path: Path, step: Any) -> None:
    """Hooks get an ``int``."""
    with sync_checkpointer() as made:
        made.save(weights(), tmp_path / "sync", step=step)
        assert latest(tmp_path).step == 7  # type: ignore[union-attr]
    async with make_async_checkpointer() as saver:
        handle = await saver.save(weights(), tmp_path / "async", step=step)
        assert (handle.step, type(handle.step)) == (7, int)
        assert await handle.written()
        assert (await saver.save(weights(), tmp_path / "b-8", step=None)).step == 8


@pytest.mark.parametrize(("step", "error", "reason"), WRONG)
async def test_no_transport_takes_it(
    step: Any, error: type[Exception], reason: str
) -> None:
    """Neither to send, nor to look for it."""
    for transports in (pair, group_transports):
        async with transports() as (sender, receiver):
            with pytest.raises(error, match=reason):
                await sender.send_checkpoint([1], step, weights())
            with pytest.raises(error, match=reason):
                await receiver.recv_checkpoint(0, sender.metadata(), step)


@right
async def test_transports_take_any_integer(step: Any) -> None:
    """It is what the peer's is equal to."""
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([1], step, weights())
        got = await receiver.recv_checkpoint(0, sender.metadata(), step)
        assert_same(got, weights())
        with pytest.raises(TypeError, match="step must be an integer"):
            await sender.allow_checkpoint("8")  # type: ignore[arg-type]
        await sender.allow_checkpoint(np.int64(8))  # type: ignore[arg-type]
        assert_same(await receiver.recv_checkpoint(0, sender.metadata(), 8), weights())
