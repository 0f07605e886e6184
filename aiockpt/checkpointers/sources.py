"""Resolves a path to load from: its files, their kind, or a peer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
from aiockpt.storage.boxes import LoadedSource
from aiockpt.storage.checkpoint_file import (
    LocalFile,
    OpenFile,
    blaming_file,
    contents,
)
from aiockpt.storage.dcp import METADATA
from aiockpt.storage.dcp_sources import dcp_sources
from aiockpt.storage.directory import StrPath, expanded, rank_file, text_of
from aiockpt.storage.interface import Storage, storage_at
from aiockpt.storage.read import (
    FileSource,
    LoadSource,
    OnBytes,
    Verify,
    manifest_of_file,
)
from aiockpt.storage.statefile import load_torch

logger = logging.getLogger("aiockpt")

_PEER = re.compile(r"https?://", re.IGNORECASE)
_SEED = re.compile(r"checkpoint_[0-9]+\.pt")
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_MAX_TRIES: Final = 10  # while others replace it
_MAX_FILES: Final = 4096
_MANY_FILES: Final = 128  # as many descriptors as a small limit leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The options of one load.

    Attributes:
        rank: The rank whose file is read first.
        world_size: How many ranks load the checkpoint; None: that does not matter.
        rank_values, verify, mmap, on_bytes: See :meth:`.CheckpointReader.read`.
        limits, allow_pickle: See :class:`.CheckpointReader`.
    """

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
    where = storage_at(path)
    with blaming_file(str(where)), ExitStack() as files:
        if where.was_saved():
            yield _of_checkpoint(where, reading, files)
        elif (kind := where.kind()) == "file":
            yield _of_file(files.enter_context(where.open()), reading)
        elif kind is None:
            yield _of_checkpoint(where, reading, files)  # raises the error
        else:
            yield _of_directory(where, reading, files)


def _source(file: OpenFile, reading: Reading) -> FileSource:
    manifest = manifest_of_file(file, limits=reading.limits)
    mapped = reading.mmap and isinstance(file, LocalFile)  # an object is read
    return FileSource(file, manifest, mapped=mapped)


def _of_file(file: OpenFile, reading: Reading) -> Found:
    if file.is_of_torch():
        values = load_torch(file, mapped=reading.mmap)
        return Found([LoadedSource(values, limits=reading.limits)])
    source = _source(file, reading)
    return Found([source], is_foreign=not source.segment.manifest.snapshot_id)


def _of_directory(directory: Storage, reading: Reading, files: ExitStack) -> Found:
    """Read the rank's file, which is ours, the seed's; or another tool's shards."""
    held, _ = directory.listed()
    if (legacy := f"checkpoint_{reading.rank}.pt") in held:
        _check_seed(directory, held, reading)
        return _of_file(files.enter_context(directory.open(legacy)), reading)
    if METADATA in held:
        return _of_dcp(directory, reading, files)
    names, index = _shards(directory, held, reading.limits)
    if not names or rank_file(reading.rank) in held:
        return _of_checkpoint(directory, reading, files)  # raises the error
    shards = [
        _source(files.enter_context(directory.open(each)), reading) for each in names
    ]
    if len(shards) > 1 and any(each.segment.manifest.digests for each in shards):
        raise CheckpointNotFoundError(
            str(directory),
            "it holds several files, and no marker that says which belong",
        )
    _check_shards(directory, dict(zip(names, shards, strict=True)), index)
    return Found(shards, is_foreign=True)


def _of_dcp(directory: Storage, reading: Reading, files: ExitStack) -> Found:
    """Open a checkpoint of torch.distributed.checkpoint."""
    found = dcp_sources(directory.local(), files, limits=reading.limits)
    if reading.verify != "none":
        logger.warning(
            "%s is a checkpoint of torch.distributed.checkpoint, which has no digests: "
            "its bytes are not verified",
            directory,
        )
    for path, why in found.left_out.items():
        logger.warning("%s: %s is left out: %s", directory, format_path(path), why)
    sources: list[LoadSource] = [
        FileSource(*each, mapped=reading.mmap) for each in found.files
    ]
    if found.values or not sources:
        sources.append(LoadedSource(found.values, limits=reading.limits))
    return Found(sources, is_foreign=True)


def _check_seed(directory: Storage, names: Sequence[str], reading: Reading) -> None:
    """Refuse a directory with the files of more ranks than load it."""
    saved = sum(_SEED.fullmatch(each) is not None for each in names)
    loading = reading.world_size
    if loading is not None and saved > loading:
        raise WorldSizeMismatchError(str(directory), saved=saved, loading=loading)


def _of_checkpoint(directory: Storage, reading: Reading, files: ExitStack) -> Found:
    checkpoint = directory.checkpoint()
    saved, loading = checkpoint.world_size, reading.world_size
    if isinstance(reading.rank_values, int):
        checkpoint.file_of(reading.rank_values)  # or there is no such rank
    if loading is None:
        return Found(_rank_files(directory, reading, files, only=reading.rank))
    if saved == 1 or loading != saved:
        return Found(_rank_files(directory, reading, files))
    own = _rank_files(directory, reading, files, only=reading.rank)
    rest = partial(_rank_files, directory, reading, files)
    return Found(own, rest, reading.rank)


def _rank_files(
    directory: Storage, reading: Reading, files: ExitStack, only: int | None = None
) -> list[FileSource]:
    """Open the files of all ranks, or of one, that the marker names.

    Raises:
        CheckpointNotFoundError: one is missing.
        IntegrityError: another file has the name of one.
    """
    for _ in range(_MAX_TRIES):
        before = directory.version()
        try:
            return _opened_ranks(directory, reading, files, only)
        except (StorageError, IntegrityError):
            if directory.version() == before:  # else it was replaced meanwhile
                raise
    raise StorageError(str(directory), "it is replaced faster than it can be read")


def _opened_ranks(
    directory: Storage, reading: Reading, files: ExitStack, only: int | None
) -> list[FileSource]:
    checkpoint = directory.checkpoint()
    ranks = range(checkpoint.world_size) if only is None else (only,)
    if len(ranks) > _MAX_FILES:
        detail = f"{len(ranks)} ranks saved it, and {_MAX_FILES} files can be read"
        raise StorageError(str(directory), detail)
    if len(ranks) > _MANY_FILES:
        raise_descriptor_limit()
    paths = [*map(checkpoint.file_of, ranks)]
    # Not below the directory: during a replacement, it may have another name.
    opened = [files.enter_context(storage_at(path).open()) for path in paths]
    sources = _sources(opened, reading)
    for path, source in zip(paths, sources, strict=True):
        expected = checkpoint.files[path.name].snapshot
        actual = source.segment.manifest.snapshot_id
        if actual != expected:
            raise IntegrityError(expected=expected, actual=actual, url=expanded(path))
    return sources


def _sources(opened_files: Sequence[OpenFile], reading: Reading) -> list[FileSource]:
    """Read the headers of open files."""
    if len(opened_files) == 1:  # most have no other
        return [_source(opened_files[0], reading)]
    found: dict[OpenFile, FileSource] = {}

    def read(file: OpenFile) -> None:
        found[file] = _source(file, reading)

    with collector_paused():  # their trees are large
        share_out(read, opened_files, at_once=opened_files[0].readers)
    return [found[file] for file in opened_files]


def _shards(
    directory: Storage, names: Sequence[str], limits: Limits
) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files of a directory: those of its index, if there is one.

    The index comes second: the name of a tensor -> its file.

    Raises:
        StorageError: the index is malformed, or names a missing file.
        LimitExceededError: the index is larger than a header may be.
    """
    found = [name for name in names if name.endswith(_SUFFIX)]
    for index in (name for name in names if name.endswith(_INDEX)):
        with directory.open(index) as file:
            listed = _listed(file, limits)
        if lost := sorted({*listed.values()}.difference(found)):
            raise StorageError(str(file.path), f"it names {lost[0]}, which is missing")
        return sorted({*listed.values()}), listed
    return found, {}


def _check_shards(
    directory: Storage, shards: Mapping[str, FileSource], index: Mapping[str, str]
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
                raise StorageError(str(directory), detail)
    for name, file in index.items():
        if holders.get(name) != file:
            detail = f"its index names {name!r} in {file}, which does not hold it"
            raise StorageError(str(directory), detail)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX_JSON: Final = msgspec.json.Decoder(_Index)


def _listed(index: OpenFile, limits: Limits) -> dict[str, str]:
    text = contents(index, limits=limits)
    try:
        return _INDEX_JSON.decode(text).weight_map
    except (msgspec.MsgspecError, UnicodeError) as error:
        detail = f"it is no index of shards: {error}"
        raise StorageError(str(index.path), detail) from error
