"""Conversions between kinds of files; each result is read back and compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.cli.rankfiles import one_file
from aiockpt.directory import MARKER
from aiockpt.errors import StateDictError, StorageError
from aiockpt.livestate import LiveState
from aiockpt.memory import Arena, ArenaPool
from aiockpt.plainfile import PlainSource
from aiockpt.snapshotfile import write_source
from aiockpt.storage import named, sync_directory
from aiockpt.testing.equality import assert_same

__all__ = ["convert"]

_ALONE = RankInfo(0, 1)


def convert(source: Path, target: Path, *, rank: int | None, step: int | None) -> None:
    """Write what ``source`` holds to ``target``, in the form that its name asks for.

    Raises:
        StorageError: it cannot be read or written, or ``target`` is there already.
        StateDictError: the other form cannot hold it exactly; nothing was written.
    """
    if target.exists() or target.is_symlink():
        raise StorageError(str(target), "it is there already; choose another name")
    state = _load(source, rank)
    if target.suffix == ".pt":
        _write_file(target, state, _write_torch)
    elif target.suffix == ".safetensors":
        _write_file(target, state, _write_plain)
    else:
        writer = CheckpointWriter(CheckpointWriterConfig(), _ALONE)
        writer.write(target, state, **({} if step is None else {"step": step}))
        _compare(target, state)


def _load(source: Path, rank: int | None) -> Any:
    if (source / MARKER).exists():
        source = one_file(source, rank)
    return _read(source, rank=rank)


def _read(path: Path, *, rank: int | None = None) -> Any:
    return CheckpointReader(_ALONE).read(path, mmap=True, rank=rank)[0]


def _write_file(
    target: Path, state: Any, write: Callable[[Path, int, Any], None]
) -> None:
    """Write a file under another name, and rename it when it is found to be exact."""
    temporary = target.with_name(f".{target.name}.tmp")
    with named(target):
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        write(temporary, fd, state)
        _compare(temporary, state)
        with named(target):
            os.fsync(fd)
            os.rename(temporary, target)
            sync_directory(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write_torch(path: Path, fd: int, state: Any) -> None:
    with named(path), os.fdopen(fd, "wb", closefd=False) as file:
        try:
            torch.save(state, file)  # noqa: TID251 - somebody else's format was asked for
        except Exception as error:
            raise StateDictError(f"torch cannot save it: {error}") from error


def _write_plain(path: Path, fd: int, state: Any) -> None:
    pool = ArenaPool(shared=False, keep=0, dispose=Arena.close)
    with LiveState(
        state, step=0, chunk_bytes=1 << 20, allow_pickle=False, pool=pool
    ) as live:
        write_source(path, fd, PlainSource(live, state), durable=False)


def _compare(path: Path, state: Any) -> None:
    try:
        found = _read(path)
        if path.name.endswith(".safetensors.tmp"):  # its tensors have no order
            found = {name: found[name] for name in state}
        assert_same(found, state)
    except (AssertionError, StorageError) as error:
        detail = f"that form cannot hold it exactly: {error}"
        raise StateDictError(detail) from error
