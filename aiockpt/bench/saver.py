"""The training process of the checkpointer's benchmark: it saves, loads and trains."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aiockpt.bench.disk import Figures, clean, settle, timed_call, write_raw
from aiockpt.bench.memory import TOUCHED, fresh, touch, warm_host
from aiockpt.bench.raw import memcpy
from aiockpt.bench.shapes import bytes_of, cut, numbered, shape_of
from aiockpt.bench.torch_savers import RIVALS, RivalSave, write_whole
from aiockpt.checkpointers.config import (
    CheckpointerConfig,
    CheckpointProcessConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from aiockpt.checkpointers.factories import (
    make_async_checkpointer,
    make_sync_checkpointer,
)
from aiockpt.checkpointers.process import CheckpointProcess
from aiockpt.runtime.bridge import Bridge

__all__ = ["Saver"]

_NICE = CheckpointProcessConfig().nice
_SPIN = 1.0
_PAUSE = 0.3
_SLICE = 0.02
_LAYERS = 256
"""Tensors of the file from which one is loaded."""


class Saver:
    """The commands that the process obeys; see `aiockpt.bench.worker`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._place = Path()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: dict[str, torch.Tensor] = {}
        self._ours: dict[int, Any] = {}  # by the niceness of their processes

    async def prepare(self, key: str, size: int, place: str) -> None:
        """Build the state dict; save in ``place``."""
        self._place = Path(place)
        shape = shape_of(key, size)
        self._flat = numbered(shape.nbytes)
        self._state = cut(self._flat, shape)

    async def release(self) -> None:
        """Close the checkpointer, and forget everything."""
        await self._close_ours()
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)

    async def _close_ours(self) -> None:
        ours, self._ours = self._ours, {}
        for each in ours.values():
            await each.close()

    # -------------------------------------------------------------- references

    async def memcpy(self, kind: str) -> Figures:
        """Copy the same bytes in one thread."""
        warm_host(self._flat.nbytes)
        memory = fresh(kind, self._flat.nbytes)
        if kind == TOUCHED:
            touch(memory)
        return {"seconds": memcpy(memory, bytes_of(self._flat))}

    async def write_raw(self, *, fsync: bool) -> Figures:
        """Write the same bytes to a plain file."""
        path, memory = self._place / "raw", bytes_of(self._flat)
        self._settle()
        return self._cleaned({"seconds": write_raw(path, memory, fsync=fsync)})

    # ------------------------------------------------------------------ saving

    async def save(self, *, first: bool) -> Figures:
        """Save in the background: until it may be mutated, until it is durable."""
        async with self._checkpointer(first=first) as ours:
            self._settle(1 + first)  # the first one needs an arena, too
            started = time.perf_counter()
            handle = await ours.save(self._state, self._place / "step-1")
            staged = time.perf_counter() - started
            await handle.written()
            seconds = time.perf_counter() - started
        return self._cleaned({"staged": staged, "seconds": seconds})

    async def spin_beside(self, *, nice: int) -> Figures:
        """Compute in plain Python while a save is written; what that costs, in %."""
        usual = await _spin(_for(_SPIN))
        async with self._checkpointer(first=False, nice=nice) as ours:
            self._settle()
            handle = await ours.save(self._state, self._place / "step-1")
            beside = await _spin(lambda: not handle.done())
        usual = _between(usual, await _spin(_for(_SPIN)))
        return self._cleaned({"seconds": 1.0, **_slowdown(usual, beside)})

    async def spin_beside_raw(self) -> Figures:
        """Compute likewise while a thread writes a plain file and syncs it."""
        usual = await _spin(_for(_SPIN))
        self._settle()
        path, memory = self._place / "raw", bytes_of(self._flat)
        write = partial(write_raw, path, memory, fsync=True)
        writing = asyncio.create_task(self._bridge.run(write))
        beside = await _spin(lambda: not writing.done())
        await writing
        usual = _between(usual, await _spin(_for(_SPIN)))
        return self._cleaned({"seconds": 1.0, **_slowdown(usual, beside)})

    async def save_rival(self, name: str) -> Figures:
        """Save by one of torch's asynchronous checkpointers, once it is warm."""
        await self._close_ours()  # it has memory that the rival may need
        rival: RivalSave = RIVALS[name]()
        try:
            await self._bridge.run(rival.save, self._state, self._place / "warm")
            usual = await _spin(_for(_SPIN))
            clean(self._place)
            self._settle()
            found = await self._bridge.run(
                rival.begin, self._state, self._place / "step-1"
            )
            beside = await _spin(lambda: not rival.done())
            found |= await self._bridge.run(rival.finish)
            usual = _between(usual, await _spin(_for(_SPIN)))
            found |= _slowdown(usual, beside)
        finally:
            await self._bridge.run(rival.close)
        return self._cleaned(found)

    async def save_here(self) -> Figures:
        """Save by the synchronous checkpointer, without fsync."""
        config = CheckpointerConfig(writer_config=CheckpointWriterConfig(fsync=False))
        with make_sync_checkpointer(config, RankInfo(0, 1)) as ours:
            work = partial(ours.save, self._state, self._place / "step-1")
            self._settle()
            return self._cleaned({"seconds": timed_call(work)})

    async def write_whole(self, how: str) -> Figures:
        """Save to one file by torch or by safetensors."""
        self._settle()
        seconds = write_whole(how, self._state, self._place / "file")
        return self._cleaned({"seconds": seconds})

    async def killed(self) -> Figures:
        """Kill the process that writes; how long until that is known here."""
        process = CheckpointProcess(RankInfo(0, 1))
        await process.ready()
        submission = await process.submit(self._state, str(self._place / "step-1"), {})
        await submission.settled()
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        started = time.perf_counter()
        await asyncio.wait({submission.ended})
        seconds = time.perf_counter() - started
        await process.close()
        return self._cleaned({"seconds": seconds})

    # ----------------------------------------------------------------- loading

    async def keep(self) -> None:
        """Save what is loaded from then on; it stays in the system's cache."""
        layers = self._flat.tensor_split(_LAYERS)
        with make_sync_checkpointer(rank_info=RankInfo(0, 1)) as ours:
            ours.save(self._state, self._place / "whole")
            layered = {str(number): layer for number, layer in enumerate(layers)}
            ours.save(layered, self._place / "layers")

    async def load(self, how: str) -> Figures:
        """Load it: ``whole``, ``mapped``, or ``one`` key."""
        known: dict[str, tuple[str, dict[str, Any]]] = {
            "whole": ("whole", {}),
            "mapped": ("whole", {"mmap": True, "verify": "none"}),
            "one": ("layers", {"select": [str(_LAYERS // 2)]}),
        }
        name, options = known[how]
        if how == "whole":
            warm_host(self._flat.nbytes)
        else:  # they need next to none, and the host has taken what was freed by then
            await asyncio.sleep(_PAUSE)
        with make_sync_checkpointer(rank_info=RankInfo(0, 1)) as ours:
            return {
                "seconds": timed_call(partial(ours.load, self._place / name, **options))
            }

    async def clean(self) -> None:
        """Remove what was saved."""
        clean(self._place)

    def _settle(self, copies: int = 1) -> None:
        settle(copies * self._flat.nbytes)

    def _cleaned(self, found: Figures) -> Figures:
        clean(self._place)
        return found

    @asynccontextmanager
    async def _checkpointer(
        self, *, first: bool, nice: int = _NICE
    ) -> AsyncIterator[Any]:
        """Give a checkpointer that has never saved, or one that has, twice."""
        if first:
            async with _checkpointer(nice) as new:
                await _ready(new)
                yield new
            return
        if nice not in self._ours:
            ours = self._ours[nice] = _checkpointer(nice)
            await _ready(ours)
            await (await ours.save(self._state, self._place / "warm")).written()
            clean(self._place)
        yield self._ours[nice]


def _checkpointer(nice: int) -> Any:
    config = CheckpointerConfig(process_config=CheckpointProcessConfig(nice=nice))
    return make_async_checkpointer(config, RankInfo(0, 1))


async def _ready(checkpointer: Any) -> None:
    """Wait until its process runs, as it does when training gets to its first save."""
    await checkpointer._writer.ready()  # noqa: SLF001 - users have no need of this


def _for(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


def _between(
    before: tuple[float, float], after: tuple[float, float]
) -> tuple[float, float]:
    """Return the means: cores are faster at one moment than at another."""
    return (before[0] + after[0]) / 2, (before[1] + after[1]) / 2


def _slowdown(usual: tuple[float, float], beside: tuple[float, float]) -> Figures:
    """Return in % how much slower it was, and why.

    ``interference`` is how much slower while it ran, and ``waited`` how much of the
    time it did not run, since others had its core or its interpreter's lock.
    """
    wall, cpu = (100 * (1 - b / u) for u, b in zip(usual, beside, strict=True))
    waited = 100 * (1 - beside[0] / beside[1])
    return {"slowdown": wall, "interference": cpu, "waited": max(waited, 0.0)}


async def _spin(going: Callable[[], bool]) -> tuple[float, float]:
    """Count in plain Python, as a training loop computes.

    Returns the speed, and the speed while the loop had a core.
    """
    count, started, had = 0, time.perf_counter(), time.thread_time()
    while going():
        until = time.perf_counter() + _SLICE
        while time.perf_counter() < until:
            for _ in range(1000):
                count += 1
        await asyncio.sleep(0)
    seconds, cpu = time.perf_counter() - started, time.thread_time() - had
    return count / seconds, count / max(cpu, 1e-6)
