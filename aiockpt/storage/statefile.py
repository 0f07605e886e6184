"""Reads a state dict from a file: safetensors (ours or another tool's) or torch's."""

from __future__ import annotations

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from aiockpt.errors import StorageError
from aiockpt.format.limits import Limits
from aiockpt.state.load_plan import state_over
from aiockpt.state.segment import check_memory
from aiockpt.storage.checkpoint_file import ZIP_MAGIC, OpenFile, blaming_file, opened
from aiockpt.storage.files import named
from aiockpt.storage.placement import Placement
from aiockpt.storage.read import FileSource, manifest_of_file


class NeedsCodeError(StorageError):
    """A value needs a class, which only running pickled code would bring back."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The state dict of a file, and its step or None if the file has none."""

    state: object
    step: int | None


def read_state_file(path: Path, *, limits: Limits) -> StateFile:
    """Return the state dict of a file, in new memory.

    The digests of our files are those of the bytes in this memory: a later change of
    the file does not matter. The memory is that of the file's tensors.

    Raises:
        StorageError: the file cannot be read, is of no known kind, or was changed
            while it was read.
        LimitExceededError: this host lacks the memory.
        IntegrityError: a chunk or the header of our file is damaged.
        UnsupportedLeafError: the tree has a leaf type that this process has not
            registered.
    """
    with opened(path) as file:
        if file.is_of_torch():
            return StateFile(load_torch(file, mapped=False), None)
        manifest = manifest_of_file(file, limits=limits)
        step = manifest.step if manifest.snapshot_id else None
        size = manifest.segment_bytes
        ranges = [(0, size)] if size else []
        with blaming_file(path):
            check_memory(ranges, limits)
            source = FileSource(file, manifest, mapped=False)
            if ranges:
                source.read(Placement(source.segment, ranges), verify="full")
            made = state_over([source.segment], limits=limits, allow_pickle=False)
            return StateFile(made, step)


def load_torch(file: OpenFile, *, mapped: bool) -> object:
    """Return the contents of an open file of ``torch.save``.

    Args:
        file: The file.
        mapped: Whether tensors lie over a mapping of the file, if it has the form of a
            zip file. The file must not be truncated meanwhile.

    Raises:
        StorageError: the file is damaged, was changed while it was read, or reading it
            would run code.
    """
    with file.unchanged():
        is_zip = file.start().startswith(ZIP_MAGIC)
        if is_zip:
            _check_zip(file)
        # By its descriptor: another file may have got the name meanwhile.
        source = f"/proc/self/fd/{file.fileno()}"
        return unpickled(file.path, source, mapped=is_zip and mapped)


def unpickled(
    path: Path | str, source: str | IO[bytes], *, mapped: bool, what: str = "it"
) -> object:
    """Return what ``torch.save`` wrote. It must not be compressed.

    Args:
        path: The name of the file, for errors.
        source: The file, or its bytes.
        mapped: Whether tensors lie over a mapping of the file.
        what: What is read, for errors.

    Raises:
        NeedsCodeError: reading it would run code.
        StorageError: it is damaged.
    """
    try:
        return torch.load(  # noqa: TID251 - weights_only unpickles no code
            source, map_location="cpu", mmap=mapped, weights_only=True
        )
    except Exception as error:  # a damaged file makes torch raise anything
        text = str(error)
        if found := re.search(r"GLOBAL (\S+)", text):
            detail = f"{what} holds a {found[1]}, which only running pickled code "
            detail += "brings back; save tensors and plain values"
            raise NeedsCodeError(str(path), detail) from error
        raise StorageError(str(path), _reason(what, text)) from error


def _check_zip(file: OpenFile) -> None:
    """Refuse compressed entries. Torch writes none, and they could expand hugely."""
    path = file.path
    with named(path):
        try:
            fd = os.dup(file.fileno())
            with os.fdopen(fd, "rb") as raw, zipfile.ZipFile(raw) as found:
                entries = found.infolist()
        except OSError:
            raise
        except Exception as error:  # a damaged file makes it raise anything
            raise StorageError(str(path), f"torch cannot read it: {error}") from error
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise StorageError(str(path), "it is compressed, as no file of torch is")


def _reason(what: str, text: str) -> str:
    """Return the part of torch's long message that says what is wrong."""
    # Torch begins with advice to unpickle without weights_only.
    found = re.search(r"WeightsUnpickler error:\s*(\S.*)", text)
    lines = [found[1]] if found else text.strip().splitlines()
    return f"torch cannot read {what}: {lines[0] if lines else '?'}"
