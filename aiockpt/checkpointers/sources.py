"""What a path to load from means: which files, of which kind, or which peer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aiockpt.content import Content, content_of_file, manifest_of_file
from aiockpt.directory import (
    MARKER,
    StrPath,
    checkpoint_at,
    old_of,
    rank_file,
    settle,
)
from aiockpt.errors import CheckpointNotFoundError, IntegrityError, StorageError
from aiockpt.rangefile import OnBytes, Verify
from aiockpt.statefile import is_torch_file, load_torch
from aiockpt.storage import named
from aiockpt.wire.limits import Limits
from aiockpt.wire.manifest import Manifest

__all__ = ["Loaded", "Reading", "is_url", "open_sources"]

_PEER = re.compile(r"https?://", re.IGNORECASE)
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one load reads."""

    rank: int
    limits: Limits
    allow_pickle: bool
    verify: Verify
    mmap: bool
    on_bytes: OnBytes | None


class Loaded:
    """The contents that a load reads from; of torch's own files, the values are."""

    def __init__(self, contents: Sequence[Content], values: object | None = None):
        self.contents = contents
        self._values = values

    def state(self) -> Any:
        """Return the state dict, over memory that may not be filled yet."""
        if not self.contents:
            return self._values
        first, *others = (content.assemble() for content in self.contents)
        for other in others:  # shards of another tool's: flat dicts of tensors
            assert isinstance(first, dict)
            assert isinstance(other, dict)
            first.update(other)
        return first


def is_url(path: StrPath) -> bool:
    """Say whether a path names a peer."""
    return _PEER.match(os.fspath(path)) is not None


@contextmanager
def open_sources(path: StrPath, reading: Reading) -> Iterator[Loaded]:
    """Find what is at a path, and read the headers.

    Raises:
        CheckpointNotFoundError: no whole checkpoint is there.
        StorageError, IntegrityError: something is, but it cannot be read.
    """
    if is_url(path):
        from aiockpt.checkpointers.peer import open_peer

        with open_peer(os.fspath(path), reading) as content:
            yield Loaded([content])
        return
    place = settle(path)
    if place.is_file():
        yield _of_file(place, reading)
    else:
        yield _of_directory(place, reading)


def _of_file(path: Path, reading: Reading) -> Loaded:
    if is_torch_file(path):
        return Loaded([], load_torch(path))
    return Loaded(
        [_content(path, manifest_of_file(path, limits=reading.limits), reading)]
    )


def _content(path: Path, manifest: Manifest, reading: Reading) -> Content:
    return content_of_file(
        path,
        manifest,
        limits=reading.limits,
        allow_pickle=reading.allow_pickle,
        mapped=reading.mmap,
    )


def _of_directory(place: Path, reading: Reading) -> Loaded:
    """Read the rank's file, which is ours, the seed's; or another tool's shards."""
    if (place / MARKER).exists() or not place.exists() or old_of(place).exists():
        return _of_checkpoint(place, reading)
    legacy = place / f"checkpoint_{reading.rank}.pt"
    if legacy.is_file():
        return _of_file(legacy, reading)
    shards = _shards(place)
    if not shards or (place / rank_file(reading.rank)).exists():
        return _of_checkpoint(place, reading)  # it says what is wrong
    manifests = [manifest_of_file(each, limits=reading.limits) for each in shards]
    if len(shards) > 1 and any(manifest.digests for manifest in manifests):
        raise CheckpointNotFoundError(
            str(place), "it holds several files, and no marker that says which belong"
        )
    pairs = zip(shards, manifests, strict=True)
    return Loaded([_content(path, manifest, reading) for path, manifest in pairs])


def _of_checkpoint(place: Path, reading: Reading) -> Loaded:
    checkpoint = checkpoint_at(place)
    path = checkpoint.file_of(reading.rank)
    manifest = manifest_of_file(path, limits=reading.limits)
    expected = checkpoint.files[path.name].snapshot
    if manifest.snapshot_id != expected:
        actual = manifest.snapshot_id
        raise IntegrityError(expected=expected, actual=actual, url=str(path))
    return Loaded([_content(path, manifest, reading)])


def _shards(place: Path) -> list[Path]:
    """Return the safetensors files of a directory: those of its index, if there is one.

    Raises:
        StorageError: the index is malformed, or names what is not there.
    """
    with named(place):
        names = sorted(each.name for each in os.scandir(place) if each.is_file())
    found = [name for name in names if name.endswith(_SUFFIX)]
    for index in (name for name in names if name.endswith(_INDEX)):
        listed = _listed(place / index)
        if lost := sorted(listed.difference(found)):
            raise StorageError(
                str(place / index), f"it names {lost[0]}, which is missing"
            )
        found = sorted(listed)
        break
    return [place / name for name in found]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _listed(index: Path) -> set[str]:
    with named(index):
        text = index.read_bytes()
    try:
        return {*msgspec.json.decode(text, type=_Index).weight_map.values()}
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise StorageError(str(index), f"it is no index of shards: {error}") from error
