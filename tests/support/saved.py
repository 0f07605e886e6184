"""Checkpoints in directories: made small, looked at, damaged."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aiockpt.checkpointers.barriers import Barrier
from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.sync import SyncCheckpointer
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.storage.commit import Draft
from tests.support.accelerators import FakeAccelerator

ALONE = RankInfo(0, 1)
CHUNK = 64 << 10
"""The smallest chunk, so that small checkpoints have several."""


def config(**options: Any) -> CheckpointWriterConfig:
    """Return a config with small chunks, and without waiting for the disk."""
    return CheckpointWriterConfig(**{"chunk_bytes": CHUNK, "fsync": False, **options})


def sync_checkpointer(hook: Any = None, **options: Any) -> SyncCheckpointer:
    """Return a checkpointer of one rank."""
    writer = CheckpointWriter(config(**options), ALONE, commit_hook=hook)
    return SyncCheckpointer(writer, CheckpointReader(ALONE))


def save(path: Path, state: Any, **options: Any) -> Path:
    """Save a state dict; return the path."""
    with sync_checkpointer(**options) as checkpointer:
        checkpointer.save(state, path)
    return path


class Nobody(Barrier):
    """Lets everybody through."""

    def execute_barrier(self) -> None:
        pass


def save_by_two(path: Path, state: Any = None) -> Path:
    """Save a checkpoint of two ranks, the second one first; return the path."""
    with Draft(path, 1, durable=False) as draft:
        other = save(path.with_name(f"other-{path.name}"), {"rank": 1})
        shutil.copy(other / "checkpoint_0.safetensors", draft.temporary)
        shutil.rmtree(other)
        draft.keep_file()
        writer = CheckpointWriter(config(), RankInfo(0, 2), Nobody())
        writer.write(path, {"rank": 0, **(state or {})})
    return path


def load(path: Any, *args: Any, **options: Any) -> Any:
    """Return what is saved."""
    return read(path, *args, **options)[0]


def read(path: Any, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return what is saved, and the missing keys."""
    return CheckpointReader(ALONE).read(path, *args, **options)


def training_state(seed: int = 0) -> dict[str, Any]:
    """Return what a training loop saves: nested, tied, with values of many kinds."""
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(128, 256))
    return {
        "model": OrderedDict(
            [
                ("embed.weight", weight),
                ("head.weight", weight),
                ("norm.bias", torch.randn(256, dtype=torch.float64)),
                ("half", torch.randn(300).bfloat16()),
            ]
        ),
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(128, 256)},
                1: {"step": torch.tensor(7.0), "exp_avg": torch.randn(256)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "step": 100,
        "rng": np.arange(600, dtype=np.uint32),
        "log": b"x" * 5000,
        "transposed": torch.arange(35.0).reshape(5, 7).t(),
    }


def tied_state(fill: float = 1.0) -> dict[str, Any]:
    """Return a small state dict with a tie and several containers."""
    weight = torch.full((50_000,), fill)
    return {"weight": weight, "tied": weight[10:20], "more": [1, ("a", {2: None})]}


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def names(directory: Path) -> list[str]:
    """Return everything in a directory, hidden or not."""
    return sorted(os.listdir(directory))


def run_beside(device: FakeAccelerator, call: Any) -> Any:
    """Make a blocking call while a device works."""

    async def main() -> Any:
        working = asyncio.create_task(asyncio.to_thread(call))
        while not working.done():
            device.run()
            await asyncio.sleep(0.001)
        return await working

    return asyncio.run(main())
