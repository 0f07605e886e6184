"""What the three ways to fill a template do where it differs from the checkpoint.

One row is one difference. Its cells say what a receive (``recv_checkpoint(into=)``), a
load (``load(into=)``, strict and not) and a selection (``select=`` beside ``into=``, of
a receive and of a load) do. All states and templates have a tensor ``a``, which fits,
and the difference in ``b``.

An outcome is the name of an error, which leaves the template as it was, or a word:

* ``filled``: the template's own tensor or container has the checkpoint's elements;
* ``new``: what the checkpoint has took the place of what the template had;
* ``added``: the template had nothing there;
* ``kept``: the template's stays as it was;
* ``left out``: the template has nothing there, and gets nothing.

A load that is not strict warns of what it keeps or leaves out: ``kept, warned``.
docs/explanation/guarantees.md has these rows for users.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import aiockpt
from tests.support.template_rows import NOTHING, ROWS, WAYS, Row, Scaler, State
from tests.support.transports import pair, receive


class Warnings(logging.Handler):
    """Counts what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, _: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Fill the template of each row in each way, once; return the outcomes."""
    # Only a member of a group has meshes.
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield asyncio.run(outcomes(tmp_path_factory.mktemp("rows")))
    finally:
        distributed.destroy_process_group()


async def outcomes(place: Path) -> dict[str, list[str]]:
    """Return the outcomes of all rows, in the order of the ways."""
    found: dict[str, list[str]] = {}
    async with pair() as (sender, receiver):
        for step, (name, row) in enumerate(ROWS.items()):
            state, path = row.state(), place / f"step-{step}"
            await sender.send_checkpoint([1], step, state)
            with aiockpt.make_sync_checkpointer() as checkpointer:
                checkpointer.save(state, path)

            async def received(own: State, step: int = step, **options: Any) -> Any:
                return await receive(sender, receiver, step, into=own, **options)

            async def loaded(own: State, path: Path = path, **options: Any) -> Any:
                return aiockpt.load(path, own, **options)

            select = ["a", "b"]
            found[name] = [
                await outcome(row, received),
                await outcome(row, loaded),
                await outcome(row, partial(loaded, strict=False)),
                await outcome(row, partial(received, select=select)),
                await outcome(row, partial(loaded, select=select)),
                await outcome(row, partial(loaded, select=select, strict=False)),
            ]
    return found


async def outcome(row: Row, fill: Callable[[State], Awaitable[Any]]) -> str:
    """Fill the template of a row; return the outcome."""
    own = row.own()
    before = own.get("b", NOTHING)
    warnings = Warnings()
    logger = logging.getLogger("aiockpt")
    logger.addHandler(warnings)
    try:
        got = await fill(own)
    except aiockpt.AiockptError as error:
        assert shown(own) == shown(row.own())
        return type(error).__name__
    finally:
        logger.removeHandler(warnings)
    assert got is own
    assert shown(got["a"]) == shown(row.state()["a"])
    return _word(row, got.get("b", NOTHING), before) + ", warned" * bool(warnings.count)


def _word(row: Row, now: Any, before: Any) -> str:
    """Return what happened at ``b``."""
    if now is NOTHING:
        return "left out"
    if shown(now) == shown(row.state().get("b", NOTHING)):
        if before is NOTHING:
            return "added"
        return "filled" if now is before else "new"
    assert now is before
    assert shown(now) == shown(row.own()["b"])
    return "kept"


def shown(value: Any) -> object:
    """Return the elements of tensors, and what is around them, to compare."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        return "meta" if local.is_meta else (str(local.dtype), local.tolist())
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [*map(shown, value)]
    return shown(value.tensor) if isinstance(value, Scaler) else value


@pytest.mark.parametrize("name", ROWS)
def test_what_each_way_does(name: str, found: dict[str, list[str]]) -> None:
    """Each way to fill a template treats the row as the table says."""
    cells = ROWS[name].cells
    assert [*zip(WAYS, found[name], strict=True)] == [*zip(WAYS, cells, strict=True)]
