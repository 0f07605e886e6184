"""Directories of torch.distributed.checkpoint (DCP): what they hold, and where it is.

A directory has a file ``.metadata``, which is a pickle, and data files. They hold a
tensor as *shards*: boxes of its elements, which DCP calls chunks. Each shard, and each
value that is no tensor, is an *archive*: what ``torch.save`` wrote, at an offset of a
data file.

Nothing here runs what a pickle asks for; see `aiockpt.format.pickles`. What is returned
was checked: each file is in the directory and has the bytes, each element of a tensor
lies in exactly one shard, and no two leaves have one path. The elements themselves have
no digests, so nobody can verify them. Everything here blocks.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aiockpt.errors import CheckpointNotFoundError, RemoteProtocolError, StorageError
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.limits import OF_A_FILE, Limits, advising, enforce
from aiockpt.format.pickles import PERSISTENT, Global, Made, PickledDict, read_pickle
from aiockpt.runtime.words import clipped, command_line
from aiockpt.storage.checkpoint_file import OpenFile, contents, opened
from aiockpt.storage.files import named
from aiockpt.storage.statefile import unpickled

METADATA: Final = ".metadata"
"""The file that makes a directory a checkpoint of DCP; it is written last."""

_OF_A_RANK: Final = "__0.metadata"  # of a save without collectives

_DCP: Final = "torch.distributed.checkpoint"
_METADATA: Final = f"{_DCP}.metadata.Metadata"
_TENSOR: Final = f"{_DCP}.metadata.TensorStorageMetadata"
_VALUE: Final = f"{_DCP}.metadata.BytesStorageMetadata"
_CHUNK: Final = f"{_DCP}.metadata.ChunkStorageMetadata"
_PROPERTIES: Final = f"{_DCP}.metadata.TensorProperties"
_INDEX: Final = f"{_DCP}.metadata.MetadataIndex"
_INFO: Final = f"{_DCP}.filesystem._StorageInfo"
_LAYOUT: Final = "torch.serialization._get_layout"
_DTYPES: Final = {f"torch.{name}": name for name in DTYPES}
_IN_METADATA: Final = {
    *(_METADATA, _TENSOR, _VALUE, _CHUNK, _PROPERTIES, _INDEX, _INFO, _LAYOUT),
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    *("collections.OrderedDict", "torch.Size"),
    *_DTYPES,
}

_STORAGES: Final = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
}
_UNTYPED: Final = "torch.storage.UntypedStorage"
_REBUILD: Final = "torch._utils._rebuild_tensor_v2"
_REBUILD_UNTYPED: Final = "torch._utils._rebuild_tensor_v3"
_IN_ARCHIVE: Final = {
    *(PERSISTENT, _REBUILD, _REBUILD_UNTYPED, _UNTYPED, "collections.OrderedDict"),
    *_STORAGES,
    *_DTYPES,
}

_MAX_FIELDS: Final = 32  # of an object; torch's have at most 5
_MAX_DIMS: Final = 64
_MAX_NUMBER: Final = 2**63 - 1
_MAX_ELEMENTS: Final = 2**56
_PRIME: Final = 2**127 - 1
_SHOWN_CHARACTERS: Final = 200
_EDGE_BYTES: Final = 4 << 10  # torch's seven records without the elements, and a list
_RECORD_BYTES: Final = 64 << 10  # of a tensor without its elements, at most


@dataclass(frozen=True, slots=True)
class DcpArchive:
    """What ``torch.save`` wrote for one shard or value: a range of bytes of a file.

    Attributes:
        file: The file, a key of `DcpCheckpoint.files`.
        start: The first byte of the archive there.
        nbytes: Its length.
    """

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpShard:
    """A box of a tensor's elements, at least one of them.

    Attributes:
        offsets: The global index of its first element.
        sizes: How many elements it has along each dimension.
        archive: Where it lies; see `elements_of`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    archive: DcpArchive


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: Its name in the checkpoint, with dots.
        path: The keys and list indices that lead to it. DCP makes strings of all keys.
        dtype: Torch's name of the dtype.
        shape: The global shape.
        shards: The shards, each element in exactly one; none if it has no elements.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[DcpShard, ...]


@dataclass(frozen=True, slots=True)
class DcpValue:
    """A value that is no tensor; see `value_of`. Its fields are as in `DcpTensor`.

    DCP stores one value for each name, whichever rank had it.
    """

    name: str
    path: tuple[str | int, ...]
    archive: DcpArchive


DcpLeaf: TypeAlias = DcpTensor | DcpValue


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """The description of a directory.

    Attributes:
        directory: The directory, without symbolic links.
        leaves: The tensors and values by name, in the order of the metadata.
        tree: The leaves in dicts and lists, as their paths say. DCP leaves empty dicts
            out; None stands for such an item of a list.
        files: The data files by their names in the metadata.
    """

    directory: Path
    leaves: Mapping[str, DcpLeaf]
    tree: dict[str, Any]
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class DcpElements:
    """Where the elements of a shard lie in its file.

    Attributes:
        start: The first byte of the first element.
        stop: The end of the last one.
        stride: The strides, in elements. Torch keeps a transposed tensor transposed.
    """

    start: int
    stop: int
    stride: tuple[int, ...]


# ------------------------------------------------------------------------ metadata


def is_dcp(directory: Path) -> bool:
    """Say whether a directory is a checkpoint of DCP."""
    return os.path.lexists(directory / METADATA)


def read_dcp(directory: Path, *, limits: Limits) -> DcpCheckpoint:
    """Return what a directory holds, and where, from its ``.metadata``.

    The data files are looked at, and not opened. The metadata says the path of each
    leaf, if DCP's planner nested them; otherwise a path is the name alone.

    Raises:
        CheckpointNotFoundError: there is no metadata, or a data file is missing.
        StorageError: the metadata is malformed, or mentions a class that does not
            belong there; or a file ends too early, or is outside of the directory; or
            elements of a tensor are missing, or there twice.
        LimitExceededError: the metadata is larger than the limits allow.
    """
    root = directory.resolve()
    if not is_dcp(root):
        detail = "it has no .metadata, which DCP writes last: the save did not end"
        if (root / _OF_A_RANK).exists():
            detail = "each rank has a metadata file of its own: save with collectives"
        raise CheckpointNotFoundError(str(directory), detail)
    path = _file_in(root, METADATA)
    with _blaming(path, root):
        with opened(path) as file:
            text = contents(file, limits=limits)
        found = read_pickle(text, _IN_METADATA, limits=limits)
        metadata = _fields(found, _METADATA)
        stored = _stored(metadata.get("storage_data"))
        paths = _paths(metadata.get("planner_data"), limits)
        found = metadata.get("state_dict_metadata")
        leaves = dict(_leaves(found, stored, paths, limits))
        tree = _tree(leaves.values(), limits)
    needed: dict[str, int] = {}
    for leaf in leaves.values():
        for archive in _archives(leaf):
            end = archive.start + archive.nbytes
            needed[archive.file] = max(end, needed.get(archive.file, 0))
    files = {name: _file_in(root, name, end) for name, end in needed.items()}
    return DcpCheckpoint(root, leaves, tree, files)


class _LackingError(RemoteProtocolError):
    """Elements or values are missing, or there twice. Torch would not notice it."""


@contextmanager
def _blaming(path: Path, directory: Path) -> Iterator[None]:
    """Say what to do about metadata that cannot be read here."""
    try:
        with advising(OF_A_FILE):
            yield
    except _LackingError as error:
        detail = f"{error}; load another checkpoint, or save it again"
        raise StorageError(str(directory), detail) from error
    except RemoteProtocolError as error:
        tool = f"python -m {_DCP}.format_utils dcp_to_torch"
        detail = (
            f"it cannot be read: {error}; if you trust who made it, so that it may run "
            f"code, {tool} {command_line(str(directory))} FILE.pt makes a file to load"
        )
        raise StorageError(str(path), detail) from error


def _file_in(root: Path, name: str, size: int = 0) -> Path:
    """Return a file of the directory, which must have ``size`` bytes.

    Raises:
        CheckpointNotFoundError: it is missing.
        StorageError: it is too short, is no file, or is not in the directory.
    """
    shown = clipped(name, _SHOWN_CHARACTERS)
    try:
        found = (root / name).resolve()
        inside = found.is_relative_to(root) and not os.path.isabs(name)
    except (OSError, RuntimeError, ValueError) as error:  # no name of a file, or a loop
        raise StorageError(str(root), f"{shown} is no file: {error}") from error
    if not inside:
        detail = f"{shown} is not in the directory: copy it there, if it belongs to it"
        raise StorageError(str(root), detail)
    with named(found):
        try:
            actual = found.stat()
        except FileNotFoundError:
            detail = f"the file {shown} is missing: copy the whole directory"
            raise CheckpointNotFoundError(str(root), detail) from None
    if not stat.S_ISREG(actual.st_mode):
        raise StorageError(str(found), "it is not a regular file")
    if actual.st_size < size:
        detail = f"it is truncated: {actual.st_size} of at least {size} bytes; copy it "
        raise StorageError(str(found), f"{detail}again, or load an older checkpoint")
    return found


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of a class."""
    if type(value) is not Made or value.name != name or value.args:
        raise RemoteProtocolError(f"no {name} where one belongs")
    if value.state is None:
        return {}
    if type(value.state) is not PickledDict or len(value.state) > 2 * _MAX_FIELDS:
        raise RemoteProtocolError(f"a {name} with other attributes")
    return value.state.by_name()


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise RemoteProtocolError("no number where one belongs, or one out of range")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise RemoteProtocolError("no string where one belongs")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return a size or an index: one number for each dimension."""
    if type(value) is not tuple or len(value) > _MAX_DIMS:
        raise RemoteProtocolError("no size or index where one belongs")
    return (*map(_number, value),)


def _dict(value: Any, what: str) -> PickledDict:
    if type(value) is not PickledDict:
        raise RemoteProtocolError(f"{what} is no dict")
    return value


_Stored: TypeAlias = dict[tuple[str, str], DcpArchive]
"""The archives by name and offsets. The offsets are text, whose hash is random."""


def _stored(found: Any) -> _Stored:
    stored: _Stored = {}
    for key, info in _dict(found, "storage_data").items():
        index, facts = _fields(key, _INDEX), _fields(info, _INFO)
        name, offsets = _text(index.get("fqn")), index.get("offset")
        where = name, "" if offsets is None else str(_numbers(offsets))
        if facts.get("transform_descriptors"):
            detail = "was transformed as it was written, for example compressed"
            raise RemoteProtocolError(f"{_quoted(name)} {detail}")
        file, length = _text(facts.get("relative_path")), _number(facts.get("length"))
        archive = DcpArchive(file, _number(facts.get("offset")), length)
        if stored.setdefault(where, archive) != archive:
            raise _LackingError(f"{_quoted(name)} is stored twice")
    return stored


def _paths(found: Any, limits: Limits) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each leaf by its name; none if the planner did not nest."""
    if found is None:
        return {}
    paths = _dict(found, "planner_data").by_name()
    for name, path in paths.items():
        if type(path) is not tuple or not path:
            raise RemoteProtocolError(f"{_quoted(name)} has no path")
        enforce("the depth of the tree", len(path), limits.max_depth, "max_depth")
        if type(path[0]) is not str or not {*map(type, path)} <= {str, int}:
            raise RemoteProtocolError(f"the path of {_quoted(name)} is malformed")
    return paths


def _leaves(
    found: Any, stored: _Stored, paths: Mapping[str, Any], limits: Limits
) -> Iterator[tuple[str, DcpLeaf]]:
    """Yield the leaves by name.

    Raises:
        RemoteProtocolError: one is malformed, or elements are missing or there twice.
    """
    leaves = _dict(found, "state_dict_metadata").by_name()
    enforce("the number of tensors", len(leaves), limits.max_tensors, "max_tensors")
    count = 0
    for name, value in leaves.items():
        path = paths.get(name, (name,))
        if type(value) is Made and value.name == _VALUE:
            if (archive := stored.get((name, ""))) is None:
                raise _LackingError(f"no file has the value {_quoted(name)}")
            yield name, DcpValue(name, path, archive)
            continue
        facts = _fields(value, _TENSOR)
        chunks, shape = facts.get("chunks"), _numbers(facts.get("size"))
        if type(chunks) is not list or prod(n or 1 for n in shape) >= _MAX_ELEMENTS:
            raise RemoteProtocolError(f"{_quoted(name)} is no tensor")
        count += len(chunks)  # one list may be that of many tensors
        enforce("the number of shards", count, limits.max_nodes, "max_nodes")
        dtype = _dtype(name, facts.get("properties"))
        shards = _shards(name, shape, chunks, stored)
        yield name, DcpTensor(name, path, dtype, shape, shards)


def _dtype(name: str, properties: Any) -> str:
    """Return the dtype of a tensor, which must be dense."""
    match properties:
        case Made(
            name=kind, state=(Global(name=dtype), Made(name=layout, args=args), *_)
        ) if (kind, layout) == (_PROPERTIES, _LAYOUT) and dtype in _DTYPES:
            if args == ("torch.strided",):
                return _DTYPES[dtype]
            raise RemoteProtocolError(f"{_quoted(name)} is no dense tensor")
    raise RemoteProtocolError(f"the properties of {_quoted(name)} are malformed")


def _shards(
    name: str, shape: tuple[int, ...], chunks: list[Any], stored: _Stored
) -> tuple[DcpShard, ...]:
    shards: dict[str, DcpShard] = {}
    for chunk in chunks:
        facts = _fields(chunk, _CHUNK)
        offsets, sizes = _numbers(facts.get("offsets")), _numbers(facts.get("sizes"))
        ends = (*map(int.__add__, offsets, sizes),)
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(map(int.__gt__, ends, shape)):
            detail = f"has a shard at {offsets} of {sizes}, outside of {shape}"
            raise RemoteProtocolError(f"{_quoted(name)} {detail}")
        if 0 in sizes:
            continue
        if (archive := stored.get((name, str(offsets)))) is None:
            detail = f"no file has the shard of {_quoted(name)} at {offsets}"
            raise _LackingError(detail)
        shard = DcpShard(offsets, sizes, archive)
        if shards.setdefault(str(offsets), shard) != shard:
            raise _LackingError(f"two shards of {_quoted(name)} are at {offsets}")
    found = (*shards.values(),)
    held, full = sum(prod(shard.sizes) for shard in found), prod(shape)
    if held < full:
        detail = f"no file has {full - held} of the {full} elements of {_quoted(name)}"
        raise _LackingError(detail)
    if found and not _tile(shape, found):
        raise _LackingError(f"shards of {_quoted(name)} overlap")
    return found


def _tile(shape: tuple[int, ...], shards: Sequence[DcpShard]) -> bool:
    """Say whether each element of a tensor lies in exactly one shard.

    The element (i, j) has the term ``x**i * y**j``. The terms of a box add up to a
    product of geometric series. If the shards have each element once, their sums add up
    to that of the tensor. Otherwise these are different polynomials, which have equal
    values at a random point with a probability below 2**-60. To compare each shard with
    each other one would take too long for metadata that is made for that.
    """
    cut = [n for n, size in enumerate(shape) if any(s.sizes[n] != size for s in shards)]
    bases = [(n, 2 + secrets.randbelow(_PRIME - 2)) for n in cut]

    def total(first: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for n, base in bases:
            # Each series lacks the factor 1 / (base - 1), on both sides.
            series = pow(base, first[n], _PRIME) * (pow(base, sizes[n], _PRIME) - 1)
            product = product * series % _PRIME
        return product

    found = sum(total(shard.offsets, shard.sizes) for shard in shards)
    return found % _PRIME == total([0] * len(shape), shape)


def _tree(leaves: Iterable[DcpLeaf], limits: Limits) -> dict[str, Any]:
    """Return the leaves in dicts and lists.

    Raises:
        RemoteProtocolError: two leaves have one path, or one lies below another; or a
            container has both keys and indices.
    """
    root: dict[Any, Any] = {}
    for leaf in leaves:
        *above, last = leaf.path
        node: Any = root
        for step in above:
            node = node.setdefault(step, {}) if type(node) is dict else None
        if type(node) is not dict or last in node:
            raise RemoteProtocolError(f"the path of {_quoted(leaf.name)} is taken")
        node[last] = leaf
    items = 0

    def with_lists(node: Any) -> Any:
        nonlocal items
        if type(node) is not dict:
            return node
        if {*map(type, node)} == {str}:
            return {key: with_lists(each) for key, each in node.items()}
        if {*map(type, node)} != {int} or min(node) < 0:
            raise RemoteProtocolError("a container has both keys and indices")
        items += max(node) + 1
        enforce("the number of items in lists", items, limits.max_nodes, "max_nodes")
        return [with_lists(node.get(index)) for index in range(max(node) + 1)]

    return {key: with_lists(node) for key, node in root.items()}


def _archives(leaf: DcpLeaf) -> list[DcpArchive]:
    if isinstance(leaf, DcpValue):
        return [leaf.archive]
    return [shard.archive for shard in leaf.shards]


def _quoted(name: str) -> str:
    return f"'{clipped(name, _SHOWN_CHARACTERS)}'"


# ------------------------------------------------------------------------ archives


def elements_of(file: OpenFile, tensor: DcpTensor, shard: DcpShard) -> DcpElements:
    """Return where the elements of a shard lie in an open data file.

    This reads the other records of the archive, and no elements of a large one.

    Args:
        file: The data file.
        tensor: The tensor.
        shard: One of its shards.

    Raises:
        StorageError: there is no archive of such a tensor, or the file cannot be read.
    """
    with _naming(file.path, f"{_quoted(tensor.name)} at {shard.offsets}"):
        archive = _OpenArchive(file, shard.archive)
        pickled = archive.content("data.pkl")
        key, dtype, count, first, stride = _storage_of(pickled, shard.sizes)
        if dtype != tensor.dtype:
            raise RemoteProtocolError(f"its dtype there is {dtype}, not {tensor.dtype}")
        if archive.content("byteorder", b"little") != b"little":
            raise RemoteProtocolError("its bytes have another order than here")
        at, size = archive.find(f"data/{key}")
        steps = (step * (n - 1) for step, n in zip(stride, shard.sizes, strict=True))
        last, itemsize = first + sum(steps) + 1, DTYPES[dtype][0]
        if size != count * itemsize or max(last, prod(shard.sizes)) > count:
            raise RemoteProtocolError(f"{size} bytes do not hold its elements")
    base = shard.archive.start + at
    return DcpElements(base + first * itemsize, base + last * itemsize, stride)


def value_of(file: OpenFile, value: DcpValue, *, limits: Limits) -> Any:
    """Return a value that is no tensor, from an open data file. No code is run.

    Args:
        file: The data file.
        value: The value.
        limits: ``max_header_bytes`` bounds the size of its archive.

    Raises:
        StorageError: the file cannot be read; or the value needs a class, which only
            running pickled code would bring back.
        LimitExceededError: it is too large.
    """
    archive, what = value.archive, f"the value {_quoted(value.name)}"
    with advising(OF_A_FILE):
        limit = limits.max_header_bytes
        enforce(f"the size of {what}", archive.nbytes, limit, "max_header_bytes")
    with _naming(file.path, what):
        _OpenArchive(file, archive)  # refuses what is compressed
    data = io.BytesIO(file.bytes_at(archive.start, archive.nbytes))
    return unpickled(file.path, data, mapped=False, what=what)


@contextmanager
def _naming(path: Path | str, what: str) -> Iterator[None]:
    """Say which tensor or value has an archive that cannot be read."""
    try:
        yield
    except (RemoteProtocolError, struct.error) as error:
        detail = f"{what} cannot be read there: {error}; copy the file again, or load "
        raise StorageError(str(path), f"{detail}another checkpoint") from error


class _TensorStorage(NamedTuple):
    """What a pickled tensor says of its storage."""

    key: str
    dtype: str
    size: int
    first: int
    stride: tuple[int, ...]


@lru_cache(maxsize=64)
def _storage_of(pickled: bytes, sizes: tuple[int, ...]) -> _TensorStorage:
    """Return what a pickled tensor says of its storage.

    It is remembered, since the shards of a layer in all layers and ranks, and those of
    an optimizer's moments, have equal pickles.

    Raises:
        RemoteProtocolError, LimitExceededError: it is no dense tensor of these sizes.
    """
    match read_pickle(pickled, _IN_ARCHIVE, limits=Limits()):
        case Made(
            name=rebuild,
            args=(
                Made(args=(("storage", Global(name=kind), str(key), _, numel),)),
                offset,
                size,
                stride,
                _,
                _,
                *more,
            ),
        ):
            pass
        case _:
            raise RemoteProtocolError("it is no plain tensor")
    count, dtype = _number(numel), _STORAGES.get(kind)
    if (rebuild, kind) == (_REBUILD_UNTYPED, _UNTYPED) and more:
        dtype = _DTYPES.get(more.pop(0).name) if type(more[0]) is Global else None
        count //= DTYPES[dtype][0] if dtype else 1
    if dtype is None or more:  # more: it is conjugated, or negated
        raise RemoteProtocolError("it is no plain tensor of a dtype that is known here")
    steps = _numbers(stride)
    if _numbers(size) != sizes or len(steps) != len(sizes):
        raise RemoteProtocolError(f"its shape there is not {sizes}")
    return _TensorStorage(key, dtype, count, _number(offset), steps)


class _OpenArchive:
    """An archive in an open file: a zip file that compresses nothing.

    Raises:
        RemoteProtocolError, struct.error: it is no such file.
    """

    def __init__(self, file: OpenFile, archive: DcpArchive) -> None:
        self._file, self._archive = file, archive
        size = min(archive.nbytes, _EDGE_BYTES)
        self._base = archive.nbytes - size
        # All that is read of a large archive, if torch wrote it.
        self._head = self._tail = file.bytes_at(archive.start, size)
        if self._base:
            self._tail = file.bytes_at(archive.start + self._base, size)
        self._records: dict[str, tuple[int, int]] = {}
        for name, header, length in self._listed():
            # The name without that of the archive, which is its first directory.
            short = name.partition(b"/")[2].decode("ascii", "replace")
            if self._records.setdefault(short, (header, length)) != (header, length):
                raise RemoteProtocolError("two records have one name")

    def find(self, name: str) -> tuple[int, int]:
        """Return where a record lies in the archive, and its length."""
        if name not in self._records:
            raise RemoteProtocolError(
                f"there is no record {clipped(name, _SHOWN_CHARACTERS)}"
            )
        at, size = self._records[name]
        sign, *lengths = struct.unpack("<4s22x2H", self._read(at, 30))
        start = at + 30 + sum(lengths)
        if sign != b"PK\3\4" or start + size > self._archive.nbytes:
            raise RemoteProtocolError(
                f"no record {clipped(name, _SHOWN_CHARACTERS)} is there"
            )
        return start, size

    def content(self, name: str, default: bytes | None = None) -> bytes:
        """Return a short record; the default if there is none."""
        if default is not None and name not in self._records:
            return default
        return self._read(*self.find(name))

    def _read(self, at: int, size: int) -> bytes:
        if not 0 <= at <= self._archive.nbytes - size:
            raise RemoteProtocolError("a record is not in the archive")
        if size > _RECORD_BYTES:
            raise RemoteProtocolError(f"a record has {size} bytes")
        if at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._base:
            return self._tail[at - self._base : at - self._base + size]
        return self._file.bytes_at(self._archive.start + at, size)

    def _listed(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the name, the position of the header, and the length of each record."""
        tail = self._tail
        if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0":
            raise RemoteProtocolError("torch.save wrote no archive there")
        count, size, at = struct.unpack("<10xHLL2x", tail[-22:])
        if tail[-42:-38] == b"PK\6\7":
            (end,) = struct.unpack("<8xQ4x", tail[-42:-22])
            sign, count, size, at = struct.unpack("<4s28x3Q", self._read(end, 56))
            if sign != b"PK\6\6":
                raise RemoteProtocolError("the end of the archive is malformed")
        listing = memoryview(self._read(at, size))
        for _ in range(count):
            sign, flags, method, packed, length, *sizes, header = struct.unpack_from(
                "<4s4x2H8x2L3H8xL", listing
            )
            name, extra = 46 + sizes[0], 46 + sizes[0] + sizes[1]
            wide = _wide([packed, length, header], listing[name:extra])
            packed, length, header = wide
            if sign != b"PK\1\2" or flags & 1 or method or packed != length:
                raise RemoteProtocolError("a record is compressed, or malformed")
            yield bytes(listing[46:name]), header, length
            listing = listing[46 + sum(sizes) :]


def _wide(numbers: list[int], extra: memoryview) -> list[int]:
    """Return numbers of 4 bytes; those that need 8 are in the extra field 1."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, 4))
            return [next(wide, _MAX_NUMBER) if n == 2**32 - 1 else n for n in numbers]
        extra = extra[4 + size :]
    return numbers
