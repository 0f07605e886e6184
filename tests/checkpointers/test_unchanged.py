"""A save whose tensors are those of the save before it says so.

A trainer that saves a copy of its first step for ever loses everything, and nobody
notices as long as files appear.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import (
    CheckpointerConfig,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.events import TransferEvent, add_hook

KINDS = [True, False]


@pytest.fixture
def events() -> Iterator[list[TransferEvent]]:
    """Return the events of writes, as they come."""
    found: list[TransferEvent] = []
    remove = add_hook(
        lambda event: found.append(event) if event.stop == "write" else None
    )
    yield found
    remove()


def state(step: int, fill: float = 1.0) -> dict[str, Any]:
    """Return a state dict whose plain value says the step."""
    return {"step": step, "weight": torch.full((1000,), fill), "bias": torch.ones(3)}


def check(
    event: TransferEvent, log: pytest.LogCaptureFixture, paths: list[Path]
) -> None:
    """Check that an event, and one line of the log, name both saves."""
    assert event.unchanged
    assert event.level == logging.WARNING
    lines = [each.getMessage() for each in log.records if each.levelname == "WARNING"]
    assert len(lines) == 1
    for text in (event.detail, lines[0]):
        assert all(str(path) in text for path in paths)
        assert "step 1" in text
        assert "step 2" in text


@pytest.mark.asyncio
@pytest.mark.parametrize("use_process", KINDS, ids=["process", "thread"])
async def test_a_save_in_the_background(
    tmp_path: Path,
    events: list[TransferEvent],
    caplog: pytest.LogCaptureFixture,
    *,
    use_process: bool,
) -> None:
    """Its handle says so, its event, and one warning in the log."""
    paths = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    async with make_async_checkpointer(
        CheckpointerConfig(use_process=use_process)
    ) as made:
        first = await made.save(state(1), paths[0])
        await first.written()
        assert not caplog.records or caplog.records[-1].levelname != "WARNING"
        second = await made.save(state(2), paths[1])
        await second.written()
        check(events[-1], caplog, paths[:2])
        third = await made.save(state(3, fill=2.0), paths[2])
        await third.written()
    assert [each.unchanged for each in (first, second, third)] == [False, True, False]
    assert [each.unchanged for each in events] == [False, True, False]


def test_a_save_that_is_waited_for(
    tmp_path: Path, events: list[TransferEvent], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no handle; its event and the log say so."""
    paths = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    with make_sync_checkpointer() as made:
        made.save(state(1), paths[0])
        made.save(state(2), paths[1])
        check(events[-1], caplog, paths[:2])
        made.save(state(3, fill=2.0), paths[2])
    assert [each.unchanged for each in events] == [False, True, False]


def test_a_copy_of_the_same_step_is_no_warning(
    tmp_path: Path, events: list[TransferEvent], caplog: pytest.LogCaptureFixture
) -> None:
    """It is meant to be equal: "best" beside "last"."""
    with make_sync_checkpointer() as made:
        made.save(state(5), tmp_path / "last", step=5)
        made.save(state(5), tmp_path / "best", step=5)
        assert events[-1].unchanged
        assert events[-1].level == logging.INFO
        assert not [each for each in caplog.records if each.levelname == "WARNING"]
        made.save(state(5), tmp_path / "best", step=5)
        assert events[-1].level == logging.WARNING


def test_a_state_without_tensors_says_nothing(
    tmp_path: Path, events: list[TransferEvent]
) -> None:
    """There is nothing that should have changed."""
    with make_sync_checkpointer() as made:
        made.save({"step": 1}, tmp_path / "step-1")
        made.save({"step": 1}, tmp_path / "step-2")
    assert not any(each.unchanged for each in events)
