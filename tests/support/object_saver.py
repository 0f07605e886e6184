"""Programs that save to an object store: see the functions at the end.

The environment says where the store is, and who asks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import aiockpt
from aiockpt.checkpointers import CheckpointWriterConfig
from tests.support.memory import forget_the_peak, resident
from tests.support.ports import free_port
from tests.support.ranks import rank_of
from tests.support.saving import note_pid

__all__ = ["COMMAND", "ROWS", "filled", "save_filled", "value_of"]

ROWS = 4096
PART = 5 << 20
"""Bytes in a part of what is uploaded in the tests of deaths: S3 allows no fewer."""

PARTS = 7


def filled(value: int, parts: int = 1) -> dict[str, Any]:
    """Return a state that is uploaded in so many parts, and says which one it is."""
    size = PART // 4 * (2 * parts - 1) // 4
    names = ("first", "last")
    return {name: torch.full((size,), float(value)) for name in names} | {"step": value}


def value_of(state: dict[str, Any]) -> int:
    """Return which state it is, having looked at every element."""
    value = state["step"]
    assert all(state[name].eq(value).all() for name in ("first", "last"))
    return int(value)


def save_filled(path: str, state: dict[str, Any], keep_last: int = 0) -> None:
    """Save a state as the step that it says; keep so many checkpoints, 0: all."""
    writer = CheckpointWriterConfig(chunk_bytes=64 << 10, keep_last=keep_last or None)
    config = aiockpt.CheckpointerConfig(writer_config=writer)
    with aiockpt.make_sync_checkpointer(config) as made:
        made.save(state, path, step=state["step"])


def sharded(fill: float | None = None) -> dict[str, Any]:
    """Return what a rank of a group saves, or the template that it loads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 1024, dtype=torch.float32).reshape(ROWS, 1024)
    if fill is not None:
        whole = torch.full_like(whole, fill)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}


def whole_of(found: dict[str, Any]) -> None:
    """Check what a rank has loaded."""
    shard: DTensor = found["w"]
    rows = ROWS // dist.get_world_size()
    first = dist.get_rank() * rows * 1024
    expected = torch.arange(first, first + rows * 1024, dtype=torch.float32)
    assert torch.equal(shard.to_local().flatten(), expected)
    assert found["step"] == 3


# ----------------------------------------------------------------------- programs


def save(path: str, value: str, keep_last: str) -> None:
    """Save a state in small parts, and keep so many checkpoints; 0: all."""
    from aiockpt.storage import objects

    objects._PART_BYTES = PART  # type: ignore[misc]
    save_filled(path, filled(int(value), parts=PARTS), int(keep_last))


def interrupted(verb: str, path: str) -> None:
    """Begin, and print how long an interrupt has taken to end it."""
    signal.signal(signal.SIGINT, _interrupt)
    print("begins", flush=True)
    try:
        if verb == "load":
            aiockpt.load(path)
        elif verb == "list":
            aiockpt.list_checkpoints(os.path.dirname(path))
        else:
            save(path, "2", "0")
    except KeyboardInterrupt as error:
        print(time.monotonic() - error.args[0], flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt(time.monotonic())


def prepared(pid_file: str) -> None:
    """Have this checkpoint process upload small parts; say which process it is."""
    from aiockpt.storage import objects

    objects._PART_BYTES = PART  # type: ignore[misc]
    note_pid(pid_file)


def save_in_process(path: str, value: str, pid_file: str) -> None:
    """Save by a checkpoint process; print what the handle says."""
    state = filled(int(value), parts=PARTS)
    with aiockpt.make_background_checkpointer(
        subprocess_init_fn=prepared, subprocess_init_args=(pid_file,)
    ) as made:
        handle = made.save(state, path, step=int(value))
        try:
            handle.result()
        except aiockpt.AiockptError as error:
            may_be = getattr(error, "may_be_committed", False)
            print("perhaps" if may_be else "not saved", error, flush=True)
        else:
            print("saved", flush=True)


def ranks(verb: str, world: str, path: str, way: str) -> None:
    """Save or load as the ranks of a group; ``way`` names the checkpointer."""
    port = free_port()
    rank = rank_of(int(world))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    writer = CheckpointWriterConfig(chunk_bytes=1 << 20)
    config = aiockpt.CheckpointerConfig(writer_config=writer)
    if verb == "load":
        whole_of(aiockpt.load(path, into=sharded(0.0)))
    elif way == "sync":
        with aiockpt.make_sync_checkpointer(config) as made:
            made.save(sharded(), path, step=3)
    else:
        with aiockpt.make_background_checkpointer(config) as later:
            later.save(sharded(), path, step=3).result()
    dist.barrier()
    dist.destroy_process_group()


def large(mib: int, fill: float) -> dict[str, Any]:
    """Return a state of so many MiB."""
    return {f"w{i}": torch.full((1 << 20,), fill) for i in range(mib // 4)}


def memory(path: str, mib: str) -> None:
    """Save in the foreground; print the most memory that this took, in bytes."""
    small, state = large(4, 0.0), large(int(mib), 1.0)
    with aiockpt.make_sync_checkpointer() as made:
        made.save(small, f"{path}/step-0")  # what is loaded once is here
        before = forget_the_peak()
        made.save(state, f"{path}/step-1")
        print(resident("VmHWM") - before, flush=True)


def load_memory(path: str, mib: str) -> None:
    """Load into a template; print the most memory that this took, in bytes."""
    template = large(int(mib), 0.0)
    aiockpt.load(f"{path}/step-0")
    before = forget_the_peak()
    aiockpt.load(f"{path}/step-1", into=template)
    print(resident("VmHWM") - before, flush=True)


PROGRAMS = {
    each.__name__: each
    for each in (save, save_in_process, interrupted, ranks, memory, load_memory)
}
COMMAND = [sys.executable, str(Path(__file__))]
"""What runs a program: its name and its arguments follow."""

if __name__ == "__main__":
    os.environ.pop("http_proxy", None)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
