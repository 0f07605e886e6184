"""Writes a Hugging Face directory, as ``aiockpt convert --hf`` does.

The headers of the source say which tensors there are, so the output files are planned
before a tensor is read: see `tensors.py`. Then one output file after the other is
written, part by part. So the memory is that of one output file at most, however many
ranks saved the checkpoint, and however they cut it. `write_plain` also writes the file
of ``aiockpt convert`` to a plain safetensors file.

Everything is written into a directory of another name. Each file is synced, read back
and compared, and then the directory gets its name in one step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Final

import torch

from aiockpt.checkpointers.reader import unite_all
from aiockpt.checkpointers.sources import Reading, open_sources
from aiockpt.cli.tensors import CODE_OF, TensorToWrite, tensors_of
from aiockpt.cli.text import counted
from aiockpt.errors import StateDictError, StorageError
from aiockpt.format.chunks import BLOCK, ChunkGrid, ChunkHasher, digest
from aiockpt.format.dtypes import itemsize
from aiockpt.format.entries import Bytes, Entries, Entry
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import share_out
from aiockpt.state.catalogue import Piece
from aiockpt.state.reshard import Policy, RankValues, United
from aiockpt.state.segment import Segment
from aiockpt.storage.boxes import BoxSource
from aiockpt.storage.checkpoint_file import LocalFile
from aiockpt.storage.directory import resolve_target
from aiockpt.storage.files import (
    exchange,
    in_place,
    named,
    open_regular,
    rename_to_new,
    reserve,
    saying_what_is_free,
    set_aside,
    start_writeback,
    sync_directory,
    write_at,
)
from aiockpt.storage.lock import SaveLock
from aiockpt.storage.partfile import TAKEN
from aiockpt.storage.placement import Placement
from aiockpt.storage.read import LoadSource
from aiockpt.storage.write import plain_header

_INDEX: Final = "model.safetensors.index.json"
_OUTPUT: Final = re.compile(
    r"model(-[0-9]+-of-[0-9]+)?\.safetensors|" + re.escape(_INDEX)
)
_CONFIG: Final = "config.json"
_BESIDE: Final = (
    *(_CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json"),
)
_SMALL_BYTES: Final = 64 << 20  # of memory that may be used in any case
_COUNTED_ELEMENTS: Final = 1 << 18  # at once, so that temporary tensors are small
_ALIGN_BYTES: Final = 64
_MAX_FILE_BYTES: Final = 5 * 1000**3  # as of transformers


def export(arguments: argparse.Namespace, rank_values: RankValues) -> None:
    """Write a Hugging Face directory, as the arguments of ``convert`` ask for it.

    Raises:
        StorageError: the source cannot be read, the disk is full or has failed, or the
            target is there already.
        RankValuesError: the ranks saved different values.
        StateDictError: a value is no tensor, or has no name in such a directory.
    """
    source: str = arguments.source
    place = _free_place(arguments.target, overwrite=arguments.overwrite)
    rank: int | None = arguments.rank
    reading = Reading(
        rank=rank or 0,
        world_size=1 if rank is None else None,
        rank_values=rank_values,
        limits=FILE_LIMITS,
        allow_pickle=False,
        verify="full",
        mmap=True,  # files of torch.save; others are read
        on_bytes=None,
    )
    with open_sources(source, reading) as found:
        policy = Policy(
            is_foreign=found.is_foreign,
            rank_values=rank_values,
            distributed="full" if rank is None else "local",
            select=arguments.select,
            name=source,
        )
        sources, united = unite_all(found, policy, reading)
        tensors = tensors_of(
            source,
            sources,
            united,
            select=arguments.select,
            rename=arguments.rename or (),
            dtype=arguments.dtype,
        )
        files = _files_of(tensors, arguments.max_shard_size or _MAX_FILE_BYTES)
        with _new_directory(place, overwrite=arguments.overwrite) as made:
            for name, shard in files.items():
                some = in_order(shard)
                with named(place / name), open(made / name, "x+b", 0) as file:
                    fill = partial(_fill, some, sources)
                    write_plain(place / name, file.fileno(), some, fill)
            if len(files) > 1:
                _write_new(made / _INDEX, _index_of(files))
            _bring_along(Path(source), place, made, arguments.dtype)


def _free_place(target: Path, *, overwrite: bool) -> Path:
    """Return the directory to make, which is free or may be replaced.

    Raises:
        StorageError: it is neither.
    """
    if not os.path.lexists(target):
        return resolve_target(target)
    if not overwrite:
        raise StorageError(str(target), TAKEN)
    place = resolve_target(target)
    with named(target):
        held = sorted(place.iterdir())
    if not {"model.safetensors", _INDEX} & {each.name for each in held}:
        detail = "it is no Hugging Face directory, and --overwrite replaces only those"
        raise StorageError(str(target), detail)
    for each in held:
        if not each.is_file() or not (_OUTPUT.fullmatch(each.name) or _is_beside(each)):
            detail = f"convert did not write {each.name!r} in it, which would be lost"
            raise StorageError(str(target), f"{detail}; move it away")
    return place


def _is_beside(path: Path) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in _BESIDE)


# -------------------------------------------------------------------------- the files


def _files_of(
    tensors: Sequence[TensorToWrite], max_bytes: int
) -> dict[str, Sequence[TensorToWrite]]:
    """Distribute tensors over files as transformers does: in order, each file full."""
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def in_order(tensors: Iterable[TensorToWrite]) -> list[TensorToWrite]:
    """Return tensors in the order of a file: aligned without gaps, by dtype."""
    return sorted(tensors, key=lambda each: -itemsize(each.cast))


def write_plain(
    path: Path,
    fd: int,
    tensors: Sequence[TensorToWrite],
    fill: Callable[[Output, Bytes], object],
) -> None:
    """Write a safetensors file without our metadata; sync, read back, and compare it.

    Args:
        path: What the file is going to be called, for errors.
        fd: The empty file.
        tensors: What it gets, in the order of `in_order`.
        fill: Writes the header, and the elements of the tensors.

    Raises:
        StorageError: the disk is full or has failed; or the file is not what was
            written.
    """
    entries = _entries_of(tensors)
    header = plain_header(entries).header
    size = len(header) + entries.nbytes
    with named(path):
        with saying_what_is_free(path, fd, size):
            reserve(fd, size)
            output = Output(fd, size)
            fill(output, header)
            os.fsync(fd)
        file = LocalFile(path, fd)
        same = _by_name(file.header(limits=FILE_LIMITS).entries) == _by_name(entries)
        if not same or digest(file.blocks(0, size)) != output.digest:
            detail = "the disk does not hold what was written to it"
            raise StorageError(str(path), detail)


class Output:
    """Writes a file from its first byte to its last one, and digests it.

    Attributes:
        digest: The digest of the whole file, once its last byte is written.
    """

    digest = ""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._hasher = fd, ChunkHasher(ChunkGrid(size, size))

    def write(self, views: Iterable[memoryview]) -> None:
        """Write some bytes after those before them."""
        start = self._hasher.position
        for view in views:
            for at in range(0, view.nbytes, BLOCK):
                block, position = view[at : at + BLOCK], self._hasher.position
                for whole in self._hasher.update(position, block):
                    self.digest = whole.digest
                write_at(self._fd, [block], position)
        start_writeback(self._fd, start, self._hasher.position - start)


def _fill(
    tensors: Sequence[TensorToWrite],
    sources: Sequence[LoadSource],
    output: Output,
    header: Bytes,
) -> None:
    """Write a file: each part while the one behind it is read."""
    views = [memoryview(header)]
    parts = [*_parts_of(tensors)]
    size = max(_laid_out(part)[1] for part in parts)
    # Page faults would take longer than the copies, so both are used in turn.
    arenas = cycle([Arena(size), Arena(size)])
    for part, arena in zip(parts, arenas, strict=False):
        loaded: list[memoryview] = []
        load = partial(_load, part, sources, arena, loaded)
        share_out(lambda work: work(), [load, partial(output.write, views)])
        views = loaded
    output.write(views)


def _by_name(entries: Entries) -> dict[str, Entry]:
    found = entries.between(0, len(entries))
    return dict(zip(entries.names, found, strict=True))


def _entries_of(tensors: Iterable[TensorToWrite]) -> Entries:
    entries: dict[str, Entry] = {}
    stop = 0
    for tensor in tensors:
        code, shape = CODE_OF[tensor.cast], tensor.shape
        if code == "F4":  # two elements in a byte, of which torch makes one
            shape = (*shape[:-1], 2 * shape[-1])
        start, stop = stop, stop + tensor.nbytes
        entries[tensor.name] = Entry(code, shape, (start, stop))
    return Entries.of(entries)


def _parts_of(tensors: Sequence[TensorToWrite]) -> Iterator[list[TensorToWrite]]:
    """Yield tensors, or rows of them, that are read at once.

    Two such parts need as much memory as the file is large, or a little.
    """
    most = max(_SMALL_BYTES, sum(tensor.nbytes for tensor in tensors)) // 2
    part: list[TensorToWrite] = []
    memory = 0
    for each in chain.from_iterable(_cut(tensor, most) for tensor in tensors):
        if part and memory + each.memory > most:
            yield part
            part, memory = [], 0
        part.append(each)
        memory += each.memory
    yield part


def _cut(tensor: TensorToWrite, most: int) -> Iterator[TensorToWrite]:
    """Yield rows of a tensor that needs more memory than ``most``; else the tensor."""
    if tensor.memory <= most:
        yield tensor
        return
    count = tensor.shape[0]
    rows = max(most * count // tensor.memory, 1)
    for first in range(0, count, rows):
        yield tensor.rows(first, min(first + rows, count))


def _laid_out(tensors: Sequence[TensorToWrite]) -> tuple[list[tuple[int, int]], int]:
    """Return where tensors that are read lie in memory, and how long that is."""
    places: list[tuple[int, int]] = []
    stop = 0
    for tensor in tensors:
        start = -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES
        stop = start + tensor.source_bytes
        places.append((start, stop))
    return places, stop


def _load(
    tensors: Sequence[TensorToWrite],
    sources: Sequence[LoadSource],
    arena: Arena,
    loaded: list[memoryview],
) -> None:
    """Read tensors; append their bytes as they are written."""
    places, nbytes = _laid_out(tensors)
    united = United(
        None,
        _memory_of(nbytes),
        [
            # Without flags: nothing is conjugated or negated.
            Piece(len(sources), number, *place, each.dtype, each.shape, (), flags=0)
            for number, (place, each) in enumerate(zip(places, tensors, strict=True))
        ],
        [tensor.boxes for tensor in tensors],
        [tensor.path for tensor in tensors],
        "",
    )
    made = BoxSource(united, sources, limits=FILE_LIMITS)
    made.segment = Segment(united.manifest, arena=arena)
    if nbytes:
        made.read(Placement(made.segment, [(0, nbytes)]), verify="full")
    for (start, stop), tensor in zip(places, tensors, strict=True):
        if start < stop:
            loaded.append(_cast(arena.buffer[start:stop], tensor))


def _memory_of(nbytes: int) -> Manifest:
    """Return the manifest of nothing but memory."""
    return Manifest(
        step=0,
        snapshot_id="",
        chunk_bytes=max(nbytes, 1),
        algorithm="",
        digests=(),
        entries=Entries.of({"0": Entry("U8", (nbytes,), (0, nbytes))}),
        views=(),
        tree=None,
        header=b"",
        header_bytes=0,
    )


def _cast(data: memoryview, tensor: TensorToWrite) -> memoryview:
    """Return the elements in some bytes as they are written.

    Raises:
        StateDictError: the dtype that they are cast to has no such large numbers.
    """
    if tensor.cast == tensor.dtype:
        return data
    found = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))
    cast = found.to(getattr(torch, tensor.cast))
    parts = (
        slice(at, at + _COUNTED_ELEMENTS)
        for at in range(0, len(found), _COUNTED_ELEMENTS)
    )
    if any(found[part].isinf().sum() != cast[part].isinf().sum() for part in parts):
        raise StateDictError(
            f"{tensor.path} has numbers that are too large for {tensor.cast}: cast to "
            "another --dtype, or leave it out"
        )
    return cast.view(torch.uint8).numpy().data


def _index_of(files: Mapping[str, Sequence[TensorToWrite]]) -> bytes:
    """Return the index: the file of each tensor, and the bytes of all of them."""
    size = sum(each.nbytes for each in chain.from_iterable(files.values()))
    holders = {each.name: file for file, some in files.items() for each in some}
    index = {"metadata": {"total_size": size}, "weight_map": holders}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- the directory


@contextmanager
def _new_directory(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """Make a directory that gets its name at the end of the block.

    Raises:
        StorageError: another process is writing it, the name is taken, or the disk has
            failed.
    """
    with named(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    with named(place), SaveLock(place, wait=0) as lock:
        made = lock.temporary
        made.mkdir()
        try:
            yield made
            sync_directory(made)
            if os.path.lexists(place) and overwrite:
                _free_place(
                    place, overwrite=True
                )  # others may have put something there
                if not exchange(made, place):
                    _replace(made, place)
            else:
                rename_to_new(made, place)
            with in_place(place):
                sync_directory(place.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _replace(made: Path, place: Path) -> None:
    """Replace a directory on a file system that cannot exchange two names."""
    old = set_aside(place, "trash")
    try:
        os.rename(made, place)
    except BaseException:
        os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _bring_along(source: Path, place: Path, made: Path, dtype: str | None) -> None:
    """Copy the model's configuration and tokenizer from beside the checkpoint.

    The configuration gets the dtype that was asked for. What only the directory has
    that is replaced stays in it.
    """
    beside = source if source.is_dir() else source.parent
    brought = 0
    for directory in (beside, place):
        if not directory.is_dir():
            continue
        with named(directory):
            held = sorted(each for each in directory.iterdir() if each.is_file())
        for each in filter(_is_beside, held):
            if not (made / each.name).exists():
                with named(each), open(open_regular(each), "rb") as file:
                    data = file.read()
                if each.name == _CONFIG and dtype:
                    data = _with_dtype(data, dtype)
                _write_new(made / each.name, data)
                brought += directory is beside
    if brought:
        print(
            f"aiockpt: {counted(brought, 'file')} beside the checkpoint came along",
            file=sys.stderr,
        )


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """Return a configuration that says which dtype the tensors have."""
    try:
        said = json.loads(config)
    except ValueError:
        return config
    keys = ("dtype", "torch_dtype")  # of transformers 5, and of older ones
    if not isinstance(said, dict) or not any(key in said for key in keys):
        return config
    said |= {key: dtype for key in keys if key in said}
    return json.dumps(said, indent=2).encode() + b"\n"
