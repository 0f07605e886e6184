"""A path of ``select`` at which nothing is: an error, or a warning where asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt import make_async_checkpointer
from aiockpt.errors import MissingKeysError
from aiockpt.testing import assert_same
from tests.support.saved import load, save
from tests.support.transports import pair, receive

STATE = {"model": {"w": torch.ones(3)}, "step": 5}


def zeros() -> dict[str, Any]:
    """Return a template."""
    return {"model": {"w": torch.zeros(3)}, "step": 0}


WRONG: list[tuple[list[str], str]] = [
    (["typo"], "typo"),
    (["model.typo"], r"model\.typo"),
    (["model", "typo"], "typo"),
    (["model.w.typo"], r"model\.w\.typo"),
    (["step[0]"], r"step\[0\]"),
]


@pytest.mark.parametrize(("select", "named"), WRONG)
@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_strict_load_raises(
    tmp_path: Path, select: list[str], named: str, *, template: bool, mapped: bool
) -> None:
    """Before the template is changed."""
    path, into = save(tmp_path / "s", STATE), zeros() if template else None
    with pytest.raises(MissingKeysError, match=named) as caught:
        load(path, into, select=select, strict=True, mmap=mapped)
    assert len(caught.value.keys) == 1
    if into is not None:
        assert_same(into, zeros())


@pytest.mark.asyncio
async def test_a_strict_load_from_a_coroutine_raises(tmp_path: Path) -> None:
    """As the other one does."""
    path, into = save(tmp_path / "s", STATE), zeros()
    async with make_async_checkpointer() as checkpointer:
        with pytest.raises(MissingKeysError, match="typo"):
            await checkpointer.load(path, into, select=["typo"], strict=True)
    assert_same(into, zeros())


def test_another_load_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And loads what there is."""
    path, into = save(tmp_path / "s", STATE), zeros()
    with caplog.at_level(logging.WARNING, logger="aiockpt"):
        load(path, into, select=["step", "typo"])
    assert "is missing keys: typo" in caplog.text
    assert_same(into, zeros() | {"step": 5})


@pytest.mark.asyncio
@pytest.mark.parametrize(("select", "named"), WRONG)
@pytest.mark.parametrize("template", [True, False])
async def test_a_receive_raises(
    select: list[str], named: str, *, template: bool
) -> None:
    """It is always strict."""
    into = zeros() if template else None
    async with pair() as (sender, receiver):
        await sender.send_checkpoint([], 1, STATE)
        with pytest.raises(MissingKeysError, match=named):
            await receive(sender, receiver, select=select, into=into)
    if into is not None:
        assert_same(into, zeros())
