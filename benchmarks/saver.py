"""The training process of the checkpointer's case: it saves, loads and computes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import aiockpt
import aiockpt.checkpointers
from benchmarks.references import in_thread, memcpy, write_raw
from benchmarks.state import (
    TOUCHED,
    State,
    bytes_of,
    cut,
    fresh,
    numbered,
    shape_of,
    touch,
    warm_host,
)

__all__ = ["NICE", "TORCH_SAVERS", "Figures", "Saver"]

Figures = dict[str, float]
"""What one measurement found, by name; ``seconds`` is always there."""

# In older source trees `aiockpt` itself has the parts and options.
_LIBRARY: Any = (
    aiockpt.checkpointers if hasattr(aiockpt.checkpointers, "RankInfo") else aiockpt
)

NICE: int = _LIBRARY.CheckpointProcessConfig().nice

_RANK: Any = _LIBRARY.RankInfo(0, 1)
_SPIN = 1.0  # seconds of computing before and after
_PAUSE = 0.3  # seconds in which the disk and the host come to rest
_START = 3.0  # seconds in which a checkpoint process starts, as before a first save
_SLICE = 0.02  # seconds of computing between looks at the loop
_LAYERS = 256  # tensors of the file from which one is loaded
_ATTEMPTS = 50


class Saver:
    """The commands that the process obeys; see ``benchmarks.worker``."""

    def __init__(self) -> None:
        self._place = Path()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: State = {}
        self._warm: dict[int, Any] = {}  # checkpointers by their processes' niceness

    async def prepare(self, key: str, size: int, place: str) -> None:
        """Build the state dict; save in ``place``."""
        self._place = Path(place)
        shape = shape_of(key, size)
        self._flat = numbered(shape.nbytes)
        self._state = cut(self._flat, shape)

    async def release(self) -> None:
        """Close the checkpointers, and forget everything."""
        await self._close_warm()
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)

    async def _close_warm(self) -> None:
        warm, self._warm = self._warm, {}
        for each in warm.values():
            await each.close()

    async def clean(self) -> None:
        """Remove what was saved, and wait until the disk has nothing left to do."""
        for each in self._place.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        os.sync()

    def _settle(self, copies: int = 1) -> None:
        """Have the disk idle, and memory at hand for the system's cache.

        Both are what the candidate before may have left to the next one.
        """
        os.sync()
        time.sleep(_PAUSE)
        warm_host(copies * self._flat.nbytes)

    # ------------------------------------------------------------------ references

    async def memcpy(self, kind: str) -> Figures:
        """Copy the same bytes in one thread."""
        warm_host(self._flat.nbytes)
        memory = fresh(kind, self._flat.nbytes)
        if kind == TOUCHED:
            touch(memory)
        return {"seconds": memcpy(memory, bytes_of(self._flat))}

    async def write_raw(self, *, fsync: bool) -> Figures:
        """Write the same bytes to a plain file."""
        self._settle()
        path, memory = self._place / "raw", bytes_of(self._flat)
        found = {"seconds": write_raw(path, memory, fsync=fsync)}
        await self.clean()
        return found

    async def write_whole(self, how: str) -> Figures:
        """Save to one file by torch or by safetensors."""
        self._settle()
        path, state = self._place / "file", dict(self._state)
        if how == "torch.save":
            seconds = _seconds(partial(torch.save, state, path))
        else:
            save_file = import_module("safetensors.torch").save_file
            seconds = _seconds(partial(save_file, state, path))
        await self.clean()
        return {"seconds": seconds}

    # ---------------------------------------------------------------------- saving

    async def save(self, *, first: bool) -> Figures:
        """Save in the background: until it may be mutated, until it is durable."""
        async with self._checkpointer(first=first) as ours:
            self._settle(1 + first)  # the first one needs an arena too
            started = time.perf_counter()
            handle = await ours.save(self._state, self._place / "step-1")
            staged = time.perf_counter() - started
            await handle.written()
            seconds = time.perf_counter() - started
        await self.clean()
        return {"staged": staged, "seconds": seconds}

    async def save_here(self) -> Figures:
        """Save by the synchronous checkpointer, without fsync."""
        config = _LIBRARY.CheckpointerConfig(
            writer_config=_LIBRARY.CheckpointWriterConfig(fsync=False)
        )
        with aiockpt.make_sync_checkpointer(config, _RANK) as ours:
            self._settle()
            path = self._place / "step-1"
            seconds = _seconds(partial(ours.save, self._state, path))
        await self.clean()
        return {"seconds": seconds}

    async def spin_beside(self, *, nice: int) -> Figures:
        """Compute in plain Python while a save is written; what that costs, in %."""
        async with self._checkpointer(first=False, nice=nice) as ours:
            usual = await _spin(_for(_SPIN))
            self._settle()
            handle = await ours.save(self._state, self._place / "step-1")
            return await self._slowed(usual, handle.done)

    async def spin_beside_raw(self) -> Figures:
        """Compute likewise while a thread writes a plain file and syncs it."""
        usual = await _spin(_for(_SPIN))
        self._settle()
        path, memory = self._place / "raw", bytes_of(self._flat)
        write = partial(write_raw, path, memory, fsync=True)
        writing = asyncio.create_task(in_thread(write))
        found = await self._slowed(usual, writing.done)
        await writing
        return found

    async def save_torch(self, name: str) -> Figures:
        """Save by one of torch's asynchronous checkpointers, once it is warm."""
        await self._close_warm()  # it has memory that the rival may need
        rival = TORCH_SAVERS[name]()
        try:
            await in_thread(rival.save, self._state, self._place / "warm")
            usual = await _spin(_for(_SPIN))
            await self.clean()
            self._settle()
            path = self._place / "step-1"
            found: Figures = await in_thread(rival.begin, self._state, path)
            slowed = await self._slowed(usual, rival.done)
            return slowed | found | await in_thread(rival.finish)
        finally:
            await in_thread(rival.close)
            await self.clean()

    async def _slowed(
        self, usual: tuple[float, float], done: Callable[[], bool]
    ) -> Figures:
        """Compute until ``done()``; return in % how much slower that was, and why.

        ``interference`` is how much slower the loop was while it ran, and ``waited``
        how much of the time it did not run, since others had its core or its
        interpreter's lock. It is compared with before and after: cores are faster at
        one moment than at another.
        """
        beside = await _spin(lambda: not done())
        after = await _spin(_for(_SPIN))
        await self.clean()
        usual = (usual[0] + after[0]) / 2, (usual[1] + after[1]) / 2
        wall, cpu = (100 * (1 - b / u) for u, b in zip(usual, beside, strict=True))
        waited = max(100 * (1 - beside[0] / beside[1]), 0.0)
        return {
            "seconds": 1.0,
            "slowdown": wall,
            "interference": cpu,
            "waited": waited,
        }

    async def killed(self) -> Figures:
        """Kill the process that writes; return how long until that is known here."""
        others = _children()
        ours = _make(NICE)
        try:
            await (await ours.save(self._state, self._place / "warm")).written()
            (child,) = _children() - others
            for attempt in range(_ATTEMPTS):
                handle = await ours.save(self._state, self._place / f"step-{attempt}")
                os.kill(child, signal.SIGSTOP)
                if not handle.done():
                    break
                os.kill(child, signal.SIGCONT)  # it was faster than we: again
            os.kill(child, signal.SIGKILL)
            started = time.perf_counter()
            with suppress(aiockpt.AiockptError):
                await handle.written()
            return {"seconds": time.perf_counter() - started}
        finally:
            await ours.close()
            await self.clean()

    @asynccontextmanager
    async def _checkpointer(
        self, *, first: bool, nice: int = NICE
    ) -> AsyncIterator[Any]:
        """Give a checkpointer that has never saved, or one that has."""
        if first:
            async with _make(nice) as new:
                await asyncio.sleep(_START)
                yield new
            return
        if nice not in self._warm:
            ours = self._warm[nice] = _make(nice)
            await (await ours.save(self._state, self._place / "warm")).written()
            await self.clean()
        yield self._warm[nice]

    # --------------------------------------------------------------------- loading

    async def keep(self) -> None:
        """Save what is loaded from then on; it stays in the system's cache."""
        layers = self._flat.tensor_split(_LAYERS)
        with aiockpt.make_sync_checkpointer(rank_info=_RANK) as ours:
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
        else:  # it needs next to none, and the host has taken what was freed by then
            await asyncio.sleep(_PAUSE)
        with aiockpt.make_sync_checkpointer(rank_info=_RANK) as ours:
            load = partial(ours.load, self._place / name, **options)
            return {"seconds": _seconds(load)}


def _make(nice: int) -> Any:
    process = _LIBRARY.CheckpointProcessConfig(nice=nice)
    config = _LIBRARY.CheckpointerConfig(process_config=process)
    return aiockpt.make_async_checkpointer(config, _RANK)


def _children() -> set[int]:
    """Return the processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {
        int(pid) for task in tasks for pid in (task / "children").read_text().split()
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _for(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


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
    return count / max(seconds, 1e-6), count / max(cpu, 1e-6)


# ------------------------------------------------------ torch's own, behind few calls


class _TorchSaver:
    """One of torch's ways to save in the background; every method blocks."""

    _write: Any = None
    _started = _ended = 0.0

    def save(self, state: State, path: Path) -> None:
        """Save, and wait until it is written."""
        self.begin(state, path)
        self.finish()

    def begin(self, state: State, path: Path) -> Figures:
        """Start a save; say how long until the state may be mutated."""
        self._started, self._ended = time.perf_counter(), 0.0
        self._write = self.start(state, path)
        return {"staged": time.perf_counter() - self._started}

    def done(self) -> bool:
        """Tell whether it is written."""
        finished = bool(self._write.done())
        if finished and not self._ended:
            self._ended = time.perf_counter()
        return finished

    def finish(self) -> Figures:
        """Wait for the end; say how long the save took."""
        self._write.result()
        return {"seconds": (self._ended or time.perf_counter()) - self._started}

    def start(self, state: State, path: Path) -> Any:
        """Start it; return what can be waited for."""
        raise NotImplementedError

    def close(self) -> None:
        """End its threads and processes."""
        raise NotImplementedError


class _Experimental(_TorchSaver):
    """``torch.distributed.checkpoint._experimental``, without an accelerator."""

    def __init__(self, *, threaded: bool) -> None:
        name = "torch.distributed.checkpoint._experimental"
        options = import_module(f"{name}.staging").CheckpointStagerConfig(
            use_pinned_memory=False,
            use_async_staging=threaded,
            use_non_blocking_copy=False,
        )
        config = import_module(f"{name}.config").CheckpointerConfig(
            staging_config=options
        )
        self._made = import_module(f"{name}.builder").make_async_checkpointer(config)

    def start(self, state: State, path: Path) -> Any:
        staged, write = self._made.save(str(path), dict(state))
        if staged is not None:
            staged.result()
        return write

    def close(self) -> None:
        self._made.close()


class _AsyncSave(_TorchSaver):
    """``torch.distributed.checkpoint.async_save``."""

    def __init__(self, kind: str) -> None:
        self._saver = import_module("torch.distributed.checkpoint.state_dict_saver")
        self._kind = self._saver.AsyncCheckpointerType[kind]
        self._group = import_module("torch.distributed")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        # The process of its own wants a group, and finds it by the environment.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        self._group.init_process_group("gloo")

    def start(self, state: State, path: Path) -> Any:
        return self._saver.async_save(
            dict(state), checkpoint_id=path, async_checkpointer_type=self._kind
        )

    def close(self) -> None:
        self._group.destroy_process_group()


TORCH_SAVERS: Mapping[str, Callable[[], _TorchSaver]] = {
    "AsyncCheckpointer, staging thread": partial(_Experimental, threaded=True),
    "AsyncCheckpointer, staging in the caller": partial(_Experimental, threaded=False),
    "async_save, thread": partial(_AsyncSave, "THREAD"),
    "async_save, process": partial(_AsyncSave, "PROCESS"),
}
"""By name; those that need a second state dict for the first save have had it."""
