"""``aiockpt convert``: a checkpoint as another kind of file, exactly or not at all.

The files of several ranks are joined: the result has full tensors. What was written is
read back and compared: a file before it gets its name, a checkpoint directory after its
commit. A plain safetensors file has no place for strides, ties and flags, so it gets
the values: each name with its dtype, its logical shape and its elements.
`huggingface.py` writes a Hugging Face directory.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from aiockpt.checkpointers.config import CheckpointWriterConfig, RankInfo
from aiockpt.checkpointers.reader import CheckpointReader
from aiockpt.checkpointers.writer import CheckpointWriter
from aiockpt.cli import huggingface
from aiockpt.cli.arguments import UsageError
from aiockpt.cli.paths import for_a_command, holds_shards, pointing_below
from aiockpt.cli.tensors import TensorToWrite, has_code, is_name
from aiockpt.errors import (
    RankValuesError,
    StateDictError,
    StorageError,
    WorldSizeMismatchError,
)
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.entries import Bytes
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.runtime.words import command_line, printable
from aiockpt.state.equality import assert_same
from aiockpt.state.flatten import describe
from aiockpt.state.leaves import DTYPE_NAMES
from aiockpt.state.reshard import RankValues
from aiockpt.storage.dcp import is_dcp
from aiockpt.storage.directory import expanded, is_address, step_in
from aiockpt.storage.files import in_place, named, rename_to_new, sync_directory
from aiockpt.storage.interface import find_checkpoint, storage_at
from aiockpt.storage.lock import SaveLock
from aiockpt.storage.partfile import TAKEN, check_target

_ALONE = RankInfo(0, 1)
_MAX_PATHS_SHOWN = 5


def run(arguments: argparse.Namespace) -> int:
    """Write what the source holds, in the form that the target's name asks for.

    Raises:
        StorageError: it cannot be read or written, or the target is there already.
        StateDictError: the other form cannot hold it exactly, or the ranks saved
            different values; nothing was written.
        UsageError: an option means nothing here.
    """
    target: Path = arguments.target
    is_file = target.suffix.lower() in (".pt", ".safetensors")
    _check_options(arguments, is_file=is_file)
    if arguments.hf:
        with _joining(arguments.source):
            huggingface.export(arguments, _rank_values(arguments))
    elif is_file:
        _to_file(arguments)
    else:
        _to_directory(arguments)
    print(f"wrote {printable(expanded(target))}", file=sys.stderr)
    return 0


def _check_options(arguments: argparse.Namespace, *, is_file: bool) -> None:
    """Refuse options that mean nothing for the source or the target.

    Raises:
        UsageError: there is one.
    """
    if arguments.rank is not None and storage_at(arguments.source).kind() == "file":
        raise UsageError("--rank is for checkpoint directories")
    if arguments.step is not None and (is_file or arguments.hf):
        raise UsageError("--step is for checkpoint directories")
    if arguments.hf and is_file:
        raise UsageError(
            f"--hf writes a directory, and {arguments.target} is the name of a file"
        )
    if (is_file or arguments.hf) and is_address(str(arguments.target)):
        raise UsageError(
            "an object store gets checkpoint directories only: write to a disk, and "
            "copy the result"
        )
    for option in () if arguments.hf else ("dtype", "max_shard_size", "rename"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option.replace('_', '-')} needs --hf, too")


def _to_directory(arguments: argparse.Namespace) -> None:
    """Write a checkpoint directory."""
    target, step = arguments.target, arguments.step
    _check_directory(target, replace=arguments.overwrite)
    state = _load(arguments)
    writer = CheckpointWriter(CheckpointWriterConfig(), _ALONE)
    writer.write(target, state, step=step)
    _compare(target, state)
    if step is None and step_in(target) is None:
        print(
            f"aiockpt: {printable(target.name)} has no step in its name, so it is "
            "step 0; --step gives another",
            file=sys.stderr,
        )


def _check_directory(target: Path, *, replace: bool) -> None:
    if not os.path.lexists(target) and storage_at(target).kind() is None:
        return
    if not replace:
        raise StorageError(expanded(target), TAKEN)
    if find_checkpoint(target) is None:
        detail = "it is no checkpoint, and --overwrite replaces nothing else"
        raise StorageError(expanded(target), detail)


def _to_file(arguments: argparse.Namespace) -> None:
    """Write a file under another name, and rename it when it is found to be exact.

    Raises:
        StateDictError: it cannot hold the state dict; the message has the command that
            writes a checkpoint directory.
    """
    source, target, replace = arguments.source, arguments.target, arguments.overwrite
    file = check_target(target, replace=replace)
    state = _load(arguments)
    is_plain = target.suffix.lower() == ".safetensors"
    try:
        if is_plain:
            state = _logical(state)
        with new_file(file, replace=replace) as (temporary, fd):
            if is_plain:
                _write_plain(file, fd, state)
            else:
                _write_torch(file, fd, state)
                _compare(temporary, state)
                os.fsync(fd)
    except StateDictError as error:
        place = target.with_suffix("")
        if os.path.lexists(place):
            place = target.with_name(f"{place.name}-checkpoint")
        command = ["aiockpt", "convert", source, str(place), *_again(arguments)]
        how = f"to convert it to a checkpoint directory: {command_line(*command)}"
        raise StateDictError(f"{source}: {error}; {how}") from error


def _again(arguments: argparse.Namespace) -> list[str]:
    """Return the options that say what is read, for the command of a message."""
    found: list[str] = []
    for option in ("rank", "rank_values"):
        if (value := getattr(arguments, option)) is not None:
            found += [f"--{option.replace('_', '-')}", f"{value}"]
    for path in arguments.select or ():
        found += ["--select", path]
    for module in arguments.imports:
        found += ["--import", module]
    return found


def _rank_values(arguments: argparse.Namespace) -> RankValues:
    chosen: int | None = arguments.rank_values
    return "error" if chosen is None else chosen


def _load(arguments: argparse.Namespace) -> Any:
    source: str = arguments.source
    with _joining(source):
        # Strict only says that every selected path must be there.
        return CheckpointReader(_ALONE).read(
            source,
            mmap=not _is_cut(source),
            rank=arguments.rank,
            rank_values=_rank_values(arguments),
            select=arguments.select,
            strict=arguments.select is not None,
        )[0]


def _is_cut(source: str) -> bool:
    """Say whether a checkpoint may have tensors that are put together from parts."""
    found = find_checkpoint(source)
    if is_dcp(Path(source)) or (found is not None and found.world_size > 1):
        return True
    return holds_shards(source if found is None else found.file_of(0))


@contextmanager
def _joining(source: str) -> Iterator[None]:
    """Say which options help where the files of several ranks cannot be joined."""
    try:
        with pointing_below(source), for_a_command("convert"):
            yield
    except RankValuesError as error:
        raise StateDictError(
            f"{source}: its ranks saved different values at {differing(error)}: take "
            "those of one rank with --rank-values 0, choose other paths with --select, "
            "or convert the part of one rank with --rank 0"
        ) from error
    except WorldSizeMismatchError as error:
        raise UsageError(
            f"{error.saved} ranks wrote {source}: choose one with --rank"
        ) from error


def differing(error: RankValuesError) -> str:
    """Return the first paths at which ranks differ, and how many more there are."""
    more = len(error.paths) - _MAX_PATHS_SHOWN
    shown = ", ".join(path or "the whole" for path in error.paths[:_MAX_PATHS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


@contextmanager
def new_file(file: Path, *, replace: bool) -> Iterator[tuple[Path, int]]:
    """Give a new file under another name, which it changes when the block ends.

    Raises:
        StorageError: the system says why it cannot be.
    """
    with named(file), SaveLock(file, wait=0) as lock, _made(lock.temporary) as fd:
        yield lock.temporary, fd
        (os.replace if replace else rename_to_new)(lock.temporary, file)
        with in_place(file):
            sync_directory(file.parent)


@contextmanager
def _made(temporary: Path) -> Iterator[int]:
    """Make a new file, which only this process knows; remove it if the block fails."""
    with open(temporary, "x+b", 0) as file:
        try:
            yield file.fileno()
        finally:
            with suppress(OSError):
                temporary.unlink()


class _Noting(io.FileIO):
    """A file that remembers why it could not be written: torch says something else."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError as error:
            self.failure = error
            raise
        return len(memoryview(data).cast("B"))


def _write_torch(path: Path, fd: int, state: Any) -> None:
    with named(path), _Noting(fd, "wb", closefd=False) as file:
        try:
            torch.save(state, file)  # noqa: TID251 - somebody else's format was asked for
        except Exception as error:
            # Taken from the file, which torch keeps for ever after a failure.
            failure, file.failure = file.failure, None
            if failure is not None:
                raise failure from None
            raise StateDictError(f"torch cannot save it: {error}") from error


def _logical(state: Any) -> dict[str, torch.Tensor]:
    """Return a dense tensor with memory of its own for each name.

    Only tensors that are not dense, or share memory with another one, are copied.

    Raises:
        StateDictError: a value is no tensor that a plain file can hold.
    """
    describe(state, limits=FILE_LIMITS)  # refuses a cycle and the like
    if type(state) not in (dict, OrderedDict):
        kind = type(state).__name__
        detail = f"a plain safetensors file holds a dict of tensors, this is a {kind}"
        raise StateDictError(detail)
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        _check_plain(name, value)
        found[name] = _dense(value.detach())
    reach = changed = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_ptr()):
        if tensor.nbytes and tensor.data_ptr() < reach:
            found[name] = tensor.clone()
        reach = max(reach, tensor.data_ptr() + tensor.nbytes)
        given = state[name]
        changed += found[name].data_ptr() != given.data_ptr()
        changed += given.requires_grad or type(given) is torch.nn.Parameter
    if changed:
        print(
            "aiockpt: a plain safetensors file says nothing of strides, Parameters and "
            "tensors that share memory: it gets the values alone",
            file=sys.stderr,
        )
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if DTYPES[DTYPE_NAMES[tensor.dtype]][1] is None:  # torch may lack a copy of it
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.resolve_conj().resolve_neg().contiguous()


def _check_plain(name: object, value: Any) -> None:
    no_place = "a plain safetensors file has no place for it"
    kind, fault = type(name).__name__, ""
    if type(name) is not str:
        fault = f"the key {name!r} has the type {kind}, not str: {no_place}"
    elif not is_name(name):
        fault = f"{name!r} cannot be the name of a tensor in a plain safetensors file"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(value).__name__
        fault = f"{name!r} has the type {kind}, not Tensor: {no_place}"
    elif not has_code(DTYPE_NAMES.get(value.dtype, ""), value.shape):
        fault = f"{name!r} has the dtype {value.dtype} and the shape "
        fault += f"{[*value.shape]}, which safetensors cannot say"
    if fault:
        raise StateDictError(fault)


def _write_plain(path: Path, fd: int, state: dict[str, torch.Tensor]) -> None:
    tensors = huggingface.in_order(
        TensorToWrite(name, name, dtype, (*tensor.shape,), (), dtype)
        for name, tensor in state.items()
        for dtype in [DTYPE_NAMES[tensor.dtype]]
    )

    def fill(output: huggingface.Output, header: Bytes) -> None:
        data = (_bytes_of(state[each.name]) for each in tensors)
        output.write([memoryview(header), *data])

    huggingface.write_plain(path, fd, tensors, fill)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor; torch calls one element so at any stride."""
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _compare(path: Path, state: Any) -> None:
    try:
        assert_same(CheckpointReader(_ALONE).read(path, mmap=True)[0], state)
    except (AssertionError, RecursionError, StorageError) as error:
        why = error.detail if isinstance(error, StorageError) else error
        detail = f"that form cannot hold it exactly: {why}"
        raise StateDictError(detail) from error
