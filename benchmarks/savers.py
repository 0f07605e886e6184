"""What a training process does when it saves and loads: commands of a worker."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.checkpointers import (
    CheckpointerConfig,
    CheckpointProcessConfig,
    CheckpointWriterConfig,
    RankInfo,
)
from benchmarks.measures import Sample, spent, spent_since
from benchmarks.memory import State, bytes_of, cut, numbered, ready
from benchmarks.references import copy, in_thread, write_raw
from benchmarks.training import Training, progress

_RANK = RankInfo(0, 1)
_LAYERS = 256  # tensors of the file from which one is loaded


class Saver:
    """Has a state dict, and saves it below a directory."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._place = Path()
        self._rest = 0.0
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._state: State = {}
        self._savers: dict[str, Any] = {}
        self._synchronize: Callable[[], object] = lambda: None

    async def prepare(self, *, count: int, each: int, place: str, rest: float) -> None:
        """Build the state dict; save in ``place``, after ``rest`` seconds each time."""
        flat = numbered(count * each)
        self.hold(flat, cut(flat, count), Path(place), rest)

    def hold(
        self,
        flat: torch.Tensor,
        state: State,
        place: Path,
        rest: float = 0.0,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        """Have a state dict of as many bytes as ``flat``; see `prepare`.

        ``synchronize`` waits until the device that has the state dict is idle.
        """
        self._flat, self._state = flat, state
        self._place, self._rest = place, rest
        self._synchronize = synchronize

    async def release(self) -> None:
        """Close the checkpointers, and forget everything."""
        savers, self._savers = self._savers, {}
        for each in savers.values():
            await each.close()
        self._state, self._flat = {}, torch.empty(0, dtype=torch.uint8)

    async def clean(self) -> None:
        """Remove what was saved, and wait until the disk has nothing left to do."""
        for each in self._place.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        os.sync()

    def _settle(self, copies: int = 1) -> None:
        """Have the disk idle, and after a rest memory for the system's cache."""
        os.sync()
        if self._rest:
            time.sleep(self._rest)
            ready("warm", copies * self._flat.nbytes)

    async def copy(self, *, kind: str) -> Sample:
        """Copy the bytes in one thread to memory of a kind."""
        return _cost(copy(kind, bytes_of(self._flat)))

    # ------------------------------------------------------------------- saving

    async def write(self, *, how: str) -> Sample:
        """Save in the calling thread in one of several ways, without fsync or with."""
        state, path = dict(self._state), self._place / "step-1"
        fast = CheckpointerConfig(writer_config=CheckpointWriterConfig(fsync=False))
        ways: dict[str, Callable[[], object]] = {
            "raw": lambda: write_raw(path, bytes_of(self._flat), fsync=False),
            "raw, fsync": lambda: write_raw(path, bytes_of(self._flat), fsync=True),
            "torch.save": lambda: torch.save(state, path),
            "safetensors": lambda: _safetensors("save_file")(state, path),
            "aiockpt": lambda: sync.save(state, path),
        }
        with aiockpt.make_sync_checkpointer(fast, _RANK) as sync:
            self._settle()
            found = _cost(ways[how])
        await self.clean()
        return found

    async def save(self, *, by: str, first: float = 0.0, beside: float = 0.0) -> Sample:
        """Save in the background by a checkpointer, ours or one of torch's.

        ``staged`` is how long the caller waits, ``seconds`` until it is durable, or
        written by those of torch. A state on a device is staged when all copies from
        the device have ended, which the staging future of ``_experimental`` does not
        wait for. ``first`` is for how many seconds a new checkpointer
        exists before it saves. With ``beside``, a training loop runs meanwhile, and for
        so many seconds before and after; the figures say what it lost.
        """
        if first:
            saver = await in_thread(_SAVERS[by])
            await asyncio.sleep(first)
        else:
            saver = await self._warm(by)
        try:
            before = await self._train(beside) if beside else 0.0
            self._settle(2 if first else 1)  # the first one needs an arena too
            if beside:
                self._training.begin()
            used, started = spent(), time.monotonic()
            write = await saver.save(self._state, self._place / "step-1")
            self._synchronize()
            staged = time.monotonic()
            await write
            ended = time.monotonic()
            found = {"staged": staged - started, "seconds": ended - started}
            found |= spent_since(used)
            if beside:
                meanwhile = progress(self._training.end(), staged, ended)
                usual = (before + await self._train(beside)) / 2
                found["slowdown"] = 100 * (1 - meanwhile["speed"] / usual)
                found["waited"] = 100 * meanwhile["waited"]
                del found["cpu"]  # most of it was training
        finally:
            if first:
                await saver.close()
        await self.clean()
        return found

    async def _warm(self, by: str) -> Any:
        if by not in self._savers:
            self._savers[by] = await in_thread(_SAVERS[by])
            await (await self._savers[by].save(self._state, self._place / "warm"))
            await self.clean()
        return self._savers[by]

    async def _train(self, seconds: float) -> float:
        self._training.begin()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        return progress(self._training.end(), began, ended)["speed"]

    # ------------------------------------------------------------------ loading

    async def keep(self) -> None:
        """Save what is loaded from then on; it stays in the system's cache."""
        await self.clean()
        layers = self._flat.tensor_split(_LAYERS)
        with aiockpt.make_sync_checkpointer(rank_info=_RANK) as ours:
            ours.save(self._state, self._place / "whole")
            layered = {str(number): layer for number, layer in enumerate(layers)}
            ours.save(layered, self._place / "layers")
        torch.save(dict(self._state), self._place / "torch")
        _safetensors("save_file")(dict(self._state), self._place / "safetensors")
        os.sync()

    async def load(self, *, how: str) -> Sample:
        """Load what is kept, in one of several ways."""
        place = self._place
        ways: dict[str, Callable[[], object]] = {
            "aiockpt": lambda: ours.load(place / "whole"),
            "mapped": lambda: ours.load(place / "whole", mmap=True, verify="none"),
            "one": lambda: ours.load(place / "layers", select=[str(_LAYERS // 2)]),
            "torch.load": lambda: torch.load(place / "torch"),
            "safetensors": lambda: {
                name: each.clone()  # it maps the file
                for name, each in _safetensors("load_file")(
                    place / "safetensors"
                ).items()
            },
        }
        if how in {"mapped", "one"}:  # they need next to no memory
            await asyncio.sleep(self._rest)
        else:
            ready("warm", self._flat.nbytes)
        with aiockpt.make_sync_checkpointer(rank_info=_RANK) as ours:
            return _cost(ways[how])


def _cost(work: Callable[[], object]) -> Sample:
    before, started = spent(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **spent_since(before)}


def _safetensors(name: str) -> Any:
    return getattr(import_module("safetensors.torch"), name)


# ------------------------------------------- checkpointers that save in the background


class _Background:
    """A checkpointer that saves in the background, behind one interface."""

    def __init__(
        self, save: Callable[[State, Path], Any], close: Callable[[], object]
    ) -> None:
        self._save, self._close = save, close

    async def save(self, state: State, path: Path) -> asyncio.Future[Any]:
        """Return when the state may be mutated, with what ends when it is written."""
        write = await in_thread(self._save, state, path)
        return asyncio.ensure_future(in_thread(write.result))

    async def close(self) -> None:
        """End its threads and processes."""
        await in_thread(self._close)


def _ours(nice: int | None = None) -> _Background:
    default = CheckpointProcessConfig()
    process = CheckpointProcessConfig(nice=default.nice if nice is None else nice)
    config = CheckpointerConfig(process_config=process)
    made = aiockpt.make_background_checkpointer(config, _RANK)
    return _Background(made.save, made.close)


def _experimental(*, threaded: bool, pinned: bool = False) -> _Background:
    """``torch.distributed.checkpoint._experimental``; pinned: from an accelerator."""
    name = "torch.distributed.checkpoint._experimental"
    staging = import_module(f"{name}.staging").CheckpointStagerConfig(
        use_pinned_memory=pinned,
        use_async_staging=threaded,
        use_non_blocking_copy=pinned,
    )
    config = import_module(f"{name}.config").CheckpointerConfig(staging_config=staging)
    made = import_module(f"{name}.builder").make_async_checkpointer(config)

    def save(state: State, path: Path) -> Any:
        staged, write = made.save(str(path), dict(state))
        if staged is not None:
            staged.result()
        return write

    return _Background(save, made.close)


def _async_save(kind: str, *, pinned: bool = False) -> _Background:
    """``torch.distributed.checkpoint.async_save``; pinned: from an accelerator."""
    saver = import_module("torch.distributed.checkpoint.state_dict_saver")
    group = torch.distributed
    if not group.is_initialized():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        # The process of its own wants a group, and finds it by the environment.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        group.init_process_group("gloo")
    options = {"async_checkpointer_type": saver.AsyncCheckpointerType[kind]}
    if pinned:
        staging = import_module("torch.distributed.checkpoint.staging")
        stager = staging.DefaultStager(staging.StagingOptions())
        options["async_stager"] = stager
        # torch 2.11 closes this after each save, and the next save fails with KeyError
        # (pytorch/pytorch#183413). Later releases keep it, and its page-locked memory.
        kept = stager._state_dict_stager  # noqa: SLF001 - torch has no public name
        kept.close = lambda: None

    def save(state: State, path: Path) -> Any:
        write = saver.async_save(dict(state), checkpoint_id=path, **options)
        if not pinned:
            return write
        write.staging_completion.result()
        return write.upload_completion

    def close() -> None:
        if pinned:
            del kept.close
            stager.close()
        if group.is_initialized():
            group.destroy_process_group()

    return _Background(save, close)


TORCH_SAVERS: Mapping[str, Callable[[], _Background]] = {
    "async_save, thread": partial(_async_save, "THREAD"),
    "async_save, process": partial(_async_save, "PROCESS"),
    "_experimental, staging thread": partial(_experimental, threaded=True),
    "_experimental, staging in the caller": partial(_experimental, threaded=False),
}
"""torch's own ways to save in the background, by name."""

_SAVERS: Mapping[str, Callable[[], _Background]] = {
    "aiockpt": _ours,
    "aiockpt, nice=0": partial(_ours, 0),
    **TORCH_SAVERS,
    "async_save, pinned": partial(_async_save, "THREAD", pinned=True),
    "_experimental, pinned": partial(_experimental, threaded=True, pinned=True),
}
