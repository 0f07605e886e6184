"""Resolves a path to load from: its files, their kind, or a peer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from aiockpt.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    StorageError,
    WorldSizeMismatchError,
)
from aiockpt.format.limits import Limits
from aiockpt.format.references import references
from aiockpt.state.segment import Segment
from aiockpt.state.sharding import LAYOUTS
from aiockpt.storage.checkpoint_file import blaming_file, contents, opened
from aiockpt.storage.directory import (
    MARKER,
    StrPath,
    checkpoint_at,
    identity,
    old_of,
    rank_file,
    resolve_target,
    text_of,
)
from aiockpt.storage.files import named
from aiockpt.storage.read import FileSource, OnBytes, Verify, manifest_of_file
from aiockpt.storage.statefile import is_torch_file, load_torch

__all__ = ["Found", "Reading", "is_url", "open_sources"]

_PEER = re.compile(r"https?://", re.IGNORECASE)
_SEED = re.compile(r"checkpoint_[0-9]+\.pt")
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_TRIES: Final = 10  # while others replace it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The rank of one load, and the number of loading ranks (None: any number)."""

    rank: int
    world_size: int | None
    limits: Limits
    allow_pickle: bool
    verify: Verify
    mmap: bool
    on_bytes: OnBytes | None


@dataclass(frozen=True, slots=True)
class Found:
    """The files that a load reads from, or the ``values`` of a file of torch."""

    sources: Sequence[FileSource]
    values: object | None = None

    @property
    def segments(self) -> list[Segment]:
        """The data segment of each source."""
        return [source.segment for source in self.sources]


def is_url(path: StrPath) -> bool:
    """Say whether a path names a peer."""
    return _PEER.match(text_of(path)) is not None


@contextmanager
def open_sources(path: StrPath, reading: Reading) -> Iterator[Found]:
    """Open the files of the checkpoint at a path, and read their headers.

    What the block finds wrong with the decoded files is the files' fault, too.

    Raises:
        CheckpointNotFoundError: the path has no complete checkpoint.
        StorageError, IntegrityError: a file cannot be read, or is damaged.
        UnsupportedLeafError: a leaf has a type that this process does not know.
    """
    place = resolve_target(path)
    with blaming_file(place), ExitStack() as files:
        with named(place):
            found = _of_file if place.is_file() else _of_directory
            loaded = found(place, reading, files)
        yield loaded


def _open(path: Path, reading: Reading, files: ExitStack) -> FileSource:
    """Open a safetensors file, once only, as another file may replace it."""
    return _source(path, files.enter_context(opened(path)), reading)


def _source(path: Path, fd: int, reading: Reading) -> FileSource:
    return FileSource(
        path,
        fd,
        manifest_of_file(path, fd, limits=reading.limits),
        mapped=reading.mmap,
    )


def _of_file(path: Path, reading: Reading, files: ExitStack) -> Found:
    fd = files.enter_context(opened(path))
    if is_torch_file(path, fd):
        return Found([], load_torch(path, fd, mapped=reading.mmap))
    return Found([_source(path, fd, reading)])


def _of_directory(place: Path, reading: Reading, files: ExitStack) -> Found:
    """Read the rank's file, which is ours, the seed's; or another tool's shards."""
    if (place / MARKER).exists() or not place.exists() or old_of(place).exists():
        return _of_checkpoint(place, reading, files)
    legacy = place / f"checkpoint_{reading.rank}.pt"
    if legacy.is_file():
        _check_seed(place, reading)
        return _of_file(legacy, reading, files)
    names, index = _shards(place, reading.limits)
    if not names or (place / rank_file(reading.rank)).exists():
        return _of_checkpoint(place, reading, files)  # raises the error
    shards = [_open(place / each, reading, files) for each in names]
    if len(shards) > 1 and any(each.segment.manifest.digests for each in shards):
        raise CheckpointNotFoundError(
            str(place), "it holds several files, and no marker that says which belong"
        )
    _check_shards(place, dict(zip(names, shards, strict=True)), index)
    return Found(shards)


def _check_seed(place: Path, reading: Reading) -> None:
    """Refuse a directory with the files of more ranks than load it."""
    saved = sum(_SEED.fullmatch(each) is not None for each in os.listdir(place))
    loading = reading.world_size
    if loading is not None and saved > loading:
        raise WorldSizeMismatchError(str(place), saved=saved, loading=loading)


def _of_checkpoint(place: Path, reading: Reading, files: ExitStack) -> Found:
    for _ in range(_TRIES):
        before = identity(place)
        try:
            return Found([_rank_file(place, reading, files)])
        except (StorageError, IntegrityError):
            if identity(place) == before:  # else it was replaced meanwhile
                raise
    raise StorageError(str(place), "it is replaced faster than it can be read")


def _rank_file(place: Path, reading: Reading, files: ExitStack) -> FileSource:
    """Open the file that the marker names.

    Raises:
        IntegrityError: another file has its name.
        WorldSizeMismatchError: another number of ranks has written it.
    """
    checkpoint, loading = checkpoint_at(place), reading.world_size
    if loading not in (None, checkpoint.world_size):
        assert loading is not None
        saved = checkpoint.world_size
        first = _open(checkpoint.file_of(0), reading, files)
        raise WorldSizeMismatchError(
            str(place), saved=saved, loading=loading, sharded=_has_shards(first)
        )
    path = checkpoint.file_of(reading.rank)
    found = _open(path, reading, files)
    expected = checkpoint.files[path.name].snapshot
    actual = found.segment.manifest.snapshot_id
    if actual != expected:
        raise IntegrityError(expected=expected, actual=actual, url=str(path))
    return found


def _has_shards(source: FileSource) -> bool:
    """Say whether a file has shards of tensors, which a mesh of ranks makes whole."""
    found = references(source.segment.manifest.tree)
    return any(each.leaf is not None and each.leaf[1] in LAYOUTS for each in found)


def _shards(place: Path, limits: Limits) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files of a directory: those of its index, if there is one.

    The index comes second: the name of a tensor -> its file.

    Raises:
        StorageError: the index is malformed, or names a missing file.
        LimitExceededError: the index is larger than a header may be.
    """
    with named(place):
        names = sorted(each.name for each in place.iterdir() if each.is_file())
    found = [name for name in names if name.endswith(_SUFFIX)]
    for index in (name for name in names if name.endswith(_INDEX)):
        listed = _listed(place / index, limits)
        if lost := sorted({*listed.values()}.difference(found)):
            raise StorageError(
                str(place / index), f"it names {lost[0]}, which is missing"
            )
        return sorted({*listed.values()}), listed
    return found, {}


def _check_shards(
    place: Path, shards: Mapping[str, FileSource], index: Mapping[str, str]
) -> None:
    """Check that each tensor is in one file, and in that of the index.

    Raises:
        StorageError: it is not.
    """
    holders: dict[str, str] = {}
    for file, source in shards.items():
        for name in source.segment.manifest.names:
            if (other := holders.setdefault(name, file)) != file:
                detail = f"{other} and {file} both hold {name!r}: remove one of them"
                raise StorageError(str(place), detail)
    for name, file in index.items():
        if holders.get(name) != file:
            detail = f"its index names {name!r} in {file}, which does not hold it"
            raise StorageError(str(place), detail)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _listed(index: Path, limits: Limits) -> dict[str, str]:
    text = contents(index, limits=limits)
    try:
        return msgspec.json.decode(text, type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise StorageError(str(index), f"it is no index of shards: {error}") from error
