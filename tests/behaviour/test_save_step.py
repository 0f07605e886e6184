"""No checkpointer saves a step that is none; any integer type is taken."""

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
from tests.support.saved import names, sync_checkpointer
from tests.support.transports import weights

pytestmark = pytest.mark.asyncio

WRONG = [
    ("5", TypeError, r"step must be an integer, got '5' \(str\); pass int\(step\)"),
    (5.0, TypeError, r"step must be an integer, got 5.0 \(float\)"),
    (-1, ValueError, r"step must be from 0 to 2\*\*63 - 1, got -1"),
    (1 << 63, ValueError, "step must be from 0"),
]


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


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7], ids=repr)
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
