"""The names, keywords and defaults of torch's experimental checkpointers are kept."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aiockpt import checkpointers

ROOT = Path(__file__).parents[2]
PACKAGE = "torch.distributed.checkpoint._experimental"
MODULES = [
    *("barriers", "builder", "checkpoint_process", "checkpoint_reader"),
    *("checkpoint_writer", "checkpointer", "config", "staging", "types"),
]
NAMES = [
    *("AsyncCheckpointer", "BarrierConfig", "CheckpointProcess"),
    *("CheckpointProcessConfig", "CheckpointReader", "CheckpointStager"),
    *("CheckpointStagerConfig", "CheckpointWriter", "CheckpointWriterConfig"),
    *("Checkpointer", "CheckpointerConfig", "DefaultStager"),
    *("RankInfo", "SyncCheckpointer", "TCPStoreBarrier", "WriterHook"),
    *("make_async_checkpointer", "make_sync_checkpointer"),
]


def seed(name: str) -> Any:
    """Return what torch calls so; skips where it has no such package."""
    pytest.importorskip(f"{PACKAGE}.checkpointer")
    modules = [import_module(f"{PACKAGE}.{module}") for module in MODULES]
    return next(getattr(each, name) for each in modules if hasattr(each, name))


def words(call: Any) -> list[str]:
    """Return the parameters that have a name."""
    found = inspect.signature(call).parameters.values()
    return [each.name for each in found if each.kind is not each.VAR_KEYWORD]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_called_in_the_same_words(name: str) -> None:
    """What made one, and called it, does so here; the order of ``save`` is another."""
    theirs, ours = seed(name), getattr(checkpointers, name)
    assert words(ours)[: len(words(theirs))] == words(theirs)
    for method, call in vars(theirs).items():
        if method == "execute_barrier":
            continue  # a writer meets, and reports its failures, by `meet`
        if callable(call) and not method.startswith("_"):
            expected = words(call)
            if method == "save":
                assert expected == ["self", "path", "state_dict"]
                expected = ["self", "state_dict", "path"]
            assert words(getattr(ours, method))[: len(expected)] == expected


def test_the_page_of_migration_has_every_name() -> None:
    """A class or function of torch's package has a replacement there, or a reason."""
    pytest.importorskip(f"{PACKAGE}.checkpointer")
    page = (ROOT / "docs/howto/migrating-from-torch.md").read_text()
    named = {
        name
        for module in map(import_module, (f"{PACKAGE}.{each}" for each in MODULES))
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and not name.startswith("_")
    }
    assert not {name for name in named if name not in page}


# We always fsync, find the ranks' meeting place, and need no accelerator: what they
# default to None or to a factory of their own is not compared.
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Config")])
def test_its_numbers_are_the_same(name: str) -> None:
    """A timeout or a switch that nobody sets is what it was."""
    theirs, ours = seed(name), getattr(checkpointers, name)
    assert is_dataclass(theirs)
    own = {each.name: each.default for each in fields(ours)}
    for each in fields(theirs):
        if each.default is not MISSING:
            assert own[each.name] == each.default
