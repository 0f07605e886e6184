"""Ranks of a group save together to an object store; others load, and savers race."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import make_sync_checkpointer
from aiockpt.checkpointers import WriterHook
from aiockpt.errors import StorageError
from aiockpt.testing import assert_same
from tests.objects.conftest import Place, Proxied
from tests.support.object_saver import COMMAND, ROWS

SAVERS = 8


def run(place: Place, verb: str, world: int, way: str) -> None:
    """Run the ranks of a group to their ends."""
    root, environment = place.child()
    path = f"{root}/{place.prefix}/run/step-3"
    command = [*COMMAND, "ranks", verb, str(world), path, way]
    subprocess.run(command, env=environment, check=True, timeout=200)


@pytest.mark.parametrize(
    ("saved", "loaded", "way"), [(2, 4, "background"), (4, 2, "sync")]
)
def test_ranks(place: Place, proxied: Proxied, saved: int, loaded: int, way: str):
    """Each rank uploads its file; each rank of another number reads what it needs."""
    run(place, "save", saved, way)
    (found,) = aiockpt.list_checkpoints(place())
    assert found.world_size == saved
    assert len(place.objects()) == saved + 1  # and the marker
    assert place.uploads() == []
    proxy, there = proxied()
    run(there, "load", loaded, "load")
    assert proxy.down <= 1.05 * ROWS * 1024 * 4 + loaded * saved * (256 << 10)
    whole = torch.arange(ROWS * 1024, dtype=torch.float32).reshape(ROWS, 1024)
    assert_same(aiockpt.load(place("run/step-3")), {"w": whole, "step": 3})


class Together(WriterHook):
    """Waits before the commit until all savers are there."""

    def __init__(self) -> None:
        self._all = threading.Barrier(SAVERS)

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        self._all.wait(60)

    def post_commit(self, path: str, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_eight_savers(place: Place, replaces: bool) -> None:
    """Of eight that save one checkpoint at once, one wins, and seven are told."""
    path, together = place("run/step-1"), Together()
    if replaces:
        with make_sync_checkpointer() as made:
            made.save({"w": torch.zeros(1000)}, path, step=1)

    def save(value: int) -> StorageError | None:
        with make_sync_checkpointer(commit_hook=together) as made:
            try:
                made.save({"w": torch.full((1000,), float(value))}, path, step=1)
            except StorageError as error:
                return error
        return None

    with ThreadPoolExecutor(SAVERS) as pool:
        said = [*pool.map(save, range(1, SAVERS + 1))]
    told = [each for each in said if each is not None]
    assert len(told) == SAVERS - 1
    assert not any(each.may_be_committed for each in told)
    assert all("another process has saved to it" in str(each) for each in told)
    winner = said.index(None) + 1
    found = aiockpt.load(path)
    assert found["w"].eq(winner).all()
    # The losers have deleted their files. The winner has noted those of the first one.
    kept = [key for key in place.objects() if key.endswith(".safetensors")]
    assert len(kept) == 1 + replaces
