"""What torch (and safetensors) have for the same purpose, behind a few calls."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from aiockpt.bench.disk import Figures, timed_call

__all__ = ["RIVALS", "RivalSave", "write_whole"]

State = Mapping[str, torch.Tensor]


class RivalSave(Protocol):
    """One way to save in the background; every method blocks."""

    def save(self, state: State, path: Path) -> None:
        """Save, and wait until it is written."""

    def begin(self, state: State, path: Path) -> Figures:
        """Start a save; say how long until the state may be mutated."""

    def done(self) -> bool:
        """Tell whether it is written."""

    def finish(self) -> Figures:
        """Wait for the end; say how long the save took."""

    def close(self) -> None:
        """End its threads and processes."""


class _Saving:
    """What they have in common."""

    def __init__(self) -> None:
        self._started = 0.0
        self._ended = 0.0
        self._write: Any = None

    def save(self, state: State, path: Path) -> None:
        self.begin(state, path)
        self.finish()

    def begin(self, state: State, path: Path) -> Figures:
        self._started = time.perf_counter()
        self._write = self._start(state, path)
        return {"staged": time.perf_counter() - self._started}

    def done(self) -> bool:
        finished = bool(self._write.done())
        if finished and not self._ended:
            self._ended = time.perf_counter()
        return finished

    def finish(self) -> Figures:
        self._write.result()
        ended, self._ended = self._ended or time.perf_counter(), 0.0
        return {"seconds": ended - self._started}

    def _start(self, state: State, path: Path) -> Any:
        raise NotImplementedError


class _Experimental(_Saving):
    """``torch.distributed.checkpoint._experimental``, without an accelerator."""

    def __init__(self, *, threaded: bool) -> None:
        super().__init__()
        module = import_module("torch.distributed.checkpoint._experimental")
        staging = import_module(f"{module.__name__}.staging")
        options = staging.CheckpointStagerConfig(
            use_pinned_memory=False,
            use_async_staging=threaded,
            use_non_blocking_copy=False,
        )
        config = import_module(f"{module.__name__}.config")
        builder = import_module(f"{module.__name__}.builder")
        self._made = builder.make_async_checkpointer(
            config.CheckpointerConfig(staging_config=options)
        )

    def close(self) -> None:
        self._made.close()

    def _start(self, state: State, path: Path) -> Any:
        staged, write = self._made.save(str(path), dict(state))
        if staged is not None:
            staged.result()
        return write


class _AsyncSave(_Saving):
    """``torch.distributed.checkpoint.async_save``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._module = import_module("torch.distributed.checkpoint")
        self._saver = import_module(f"{self._module.__name__}.state_dict_saver")
        self._kind = self._saver.AsyncCheckpointerType[kind]
        self._group = import_module("torch.distributed")
        # The process of its own wants a group, and finds it by the environment.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        self._group.init_process_group("gloo")

    def close(self) -> None:
        self._group.destroy_process_group()

    def _start(self, state: State, path: Path) -> Any:
        return self._saver.async_save(
            dict(state), checkpoint_id=path, async_checkpointer_type=self._kind
        )


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


RIVALS: Mapping[str, Callable[[], RivalSave]] = {
    "AsyncCheckpointer, staging thread": lambda: _Experimental(threaded=True),
    "AsyncCheckpointer, staging in the caller": lambda: _Experimental(threaded=False),
    "async_save, thread": lambda: _AsyncSave("THREAD"),
    "async_save, process": lambda: _AsyncSave("PROCESS"),
}
"""By name; those that need a second state dict for the first save have had it."""


def write_whole(how: str, state: State, path: Path) -> float:
    """Write one file; return the seconds."""
    if how == "torch.save":
        return timed_call(lambda: torch.save(dict(state), path))  # noqa: TID251 - a rival
    save_file = import_module("safetensors.torch").save_file
    return timed_call(lambda: save_file(dict(state), path))
