"""Resolves a path to load from: its files, their kind, or a peer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
from aiockpt.format.paths import format_path
from aiockpt.runtime.bridge import share_out
from aiockpt.runtime.system import collector_paused, raise_descriptor_limit
from aiockpt.state.reshard import RankValues
from aiockpt.storage.boxes import LoadedSource, LoadSource
from aiockpt.storage.checkpoint_file import blaming_file, contents, opened
from aiockpt.storage.dcp import is_dcp
from aiockpt.storage.dcp_sources import dcp_sources
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

logger = logging.getLogger("aiockpt")

_PEER = re.compile(r"https?://", re.IGNORECASE)
_SEED = re.compile(r"checkpoint_[0-9]+\.pt")
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_TRIES: Final = 10  # while others replace it
_MOST_FILES: Final = 4096
_MANY_FILES: Final = 128  # as many descriptors as a small limit leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The rank of one load, and the number of loading ranks (None: any number)."""

    rank: int
    world_size: int | None
    rank_values: RankValues
    limits: Limits
    allow_pickle: bool
    verify: Verify
    mmap: bool
    on_bytes: OnBytes | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a load reads from.

    Attributes:
        sources: The sources: all of them, or that of this rank.
        rest: Opens the sources of all ranks, if ``sources`` is only that of this rank,
            which is number ``own`` of them.
        own: The number of this rank's source; None if another number of ranks saved.
        is_foreign: Whether another tool has saved it; see `Policy`.
    """

    sources: Sequence[LoadSource]
    rest: Callable[[], Sequence[LoadSource]] | None = None
    own: int | None = None
    is_foreign: bool = False

    def every(self) -> Sequence[LoadSource]:
        """Return the sources of all ranks.

        Raises:
            StorageError, IntegrityError: a file cannot be read, or is damaged.
        """
        return self.sources if self.rest is None else self.rest()


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
        values = load_torch(path, fd, mapped=reading.mmap)
        return Found([LoadedSource(values, limits=reading.limits)])
    source = _source(path, fd, reading)
    return Found([source], is_foreign=not source.segment.manifest.snapshot_id)


def _of_directory(place: Path, reading: Reading, files: ExitStack) -> Found:
    """Read the rank's file, which is ours, the seed's; or another tool's shards."""
    if (place / MARKER).exists() or not place.exists() or old_of(place).exists():
        return _of_checkpoint(place, reading, files)
    legacy = place / f"checkpoint_{reading.rank}.pt"
    if legacy.is_file():
        _check_seed(place, reading)
        return _of_file(legacy, reading, files)
    if is_dcp(place):
        return _of_dcp(place, reading, files)
    names, index = _shards(place, reading.limits)
    if not names or (place / rank_file(reading.rank)).exists():
        return _of_checkpoint(place, reading, files)  # raises the error
    shards = [_open(place / each, reading, files) for each in names]
    if len(shards) > 1 and any(each.segment.manifest.digests for each in shards):
        raise CheckpointNotFoundError(
            str(place), "it holds several files, and no marker that says which belong"
        )
    _check_shards(place, dict(zip(names, shards, strict=True)), index)
    return Found(shards, is_foreign=True)


def _of_dcp(place: Path, reading: Reading, files: ExitStack) -> Found:
    """Open a checkpoint of torch.distributed.checkpoint."""
    found = dcp_sources(place, files, limits=reading.limits)
    if reading.verify != "none":
        logger.warning(
            "%s is a checkpoint of torch.distributed.checkpoint, which has no digests: "
            "its bytes are not verified",
            place,
        )
    for path, why in found.left_out.items():
        logger.warning("%s: %s is left out: %s", place, format_path(path), why)
    sources: list[LoadSource] = [
        FileSource(*each, mapped=reading.mmap) for each in found.files
    ]
    if found.values or not sources:
        sources.append(LoadedSource(found.values, limits=reading.limits))
    return Found(sources, is_foreign=True)


def _check_seed(place: Path, reading: Reading) -> None:
    """Refuse a directory with the files of more ranks than load it."""
    saved = sum(_SEED.fullmatch(each) is not None for each in os.listdir(place))
    loading = reading.world_size
    if loading is not None and saved > loading:
        raise WorldSizeMismatchError(str(place), saved=saved, loading=loading)


def _of_checkpoint(place: Path, reading: Reading, files: ExitStack) -> Found:
    checkpoint = checkpoint_at(place)
    saved, loading = checkpoint.world_size, reading.world_size
    if isinstance(reading.rank_values, int):
        checkpoint.file_of(reading.rank_values)  # or there is no such rank
    if loading is None:
        return Found(_rank_files(place, reading, files, only=reading.rank))
    if saved == 1 or loading != saved:
        return Found(_rank_files(place, reading, files))
    own = _rank_files(place, reading, files, only=reading.rank)
    rest = partial(_rank_files, place, reading, files)
    return Found(own, rest, reading.rank)


def _rank_files(
    place: Path, reading: Reading, files: ExitStack, only: int | None = None
) -> list[FileSource]:
    """Open the files of all ranks, or of one, that the marker names.

    Raises:
        CheckpointNotFoundError: one is missing.
        IntegrityError: another file has the name of one.
    """
    for _ in range(_TRIES):
        before = identity(place)
        try:
            return _opened_ranks(place, reading, files, only)
        except (StorageError, IntegrityError):
            if identity(place) == before:  # else it was replaced meanwhile
                raise
    raise StorageError(str(place), "it is replaced faster than it can be read")


def _opened_ranks(
    place: Path, reading: Reading, files: ExitStack, only: int | None
) -> list[FileSource]:
    checkpoint = checkpoint_at(place)
    ranks = range(checkpoint.world_size) if only is None else (only,)
    if len(ranks) > _MOST_FILES:
        detail = f"{len(ranks)} ranks saved it, and {_MOST_FILES} files can be read"
        raise StorageError(str(place), detail)
    if len(ranks) > _MANY_FILES:
        raise_descriptor_limit()
    paths = [*map(checkpoint.file_of, ranks)]
    fds = [files.enter_context(opened(path)) for path in paths]
    sources = _sources(paths, fds, reading)
    for path, source in zip(paths, sources, strict=True):
        expected = checkpoint.files[path.name].snapshot
        actual = source.segment.manifest.snapshot_id
        if actual != expected:
            raise IntegrityError(expected=expected, actual=actual, url=str(path))
    return sources


def _sources(
    paths: Sequence[Path], fds: Sequence[int], reading: Reading
) -> list[FileSource]:
    """Read the headers of open files."""
    found: dict[int, FileSource] = {}

    def read(at: int) -> None:
        found[at] = _source(paths[at], fds[at], reading)

    if len(paths) == 1:  # most have no other
        read(0)
    else:
        with collector_paused():  # their trees are large
            share_out(read, range(len(paths)))
    return [found[at] for at in range(len(paths))]


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
