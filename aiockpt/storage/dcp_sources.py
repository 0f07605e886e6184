"""The data files of a DCP directory as sources that a load reads from.

Each file with elements of tensors gets a manifest without digests, whose data segment
is the file from its first byte on. Its entries are where the elements of the shards
lie. Its tree has the paths of their tensors:

- A tensor that one shard covers is a plain tensor.
- Any other tensor is a ``torch.ShardedTensor``. Its layout lists the shards that lie in
  this file, and no others.
- A list has its full length. None stands for each item that is elsewhere.

Values that are no tensors are read here; see `DcpSources.values`. Everything here
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from aiockpt.errors import StorageError
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.entries import Entries
from aiockpt.format.limits import OF_A_FILE, Limits, advising, enforce
from aiockpt.format.manifest import Manifest, TensorSpec, dense_stride
from aiockpt.format.paths import Node
from aiockpt.format.registry import Registry
from aiockpt.format.tree import encode_tree
from aiockpt.runtime.system import collector_paused
from aiockpt.state import leaves
from aiockpt.state.sharding import Ranks, Shard, ShardedLayout, encode_layout
from aiockpt.storage.checkpoint_file import OpenFile, opened
from aiockpt.storage.dcp import (
    DcpCheckpoint,
    DcpElements,
    DcpShard,
    DcpTensor,
    DcpValue,
    elements_of,
    read_dcp,
    value_of,
)
from aiockpt.storage.statefile import NeedsCodeError

_ONE: Final = Ranks((1,), (0,), (0,))  # a layout names the ranks, and DCP does not

_SHOWN_CHARACTERS: Final = 200

_Steps: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DcpSources:
    """What a DCP directory holds, for a load.

    Attributes:
        files: Each file with elements of tensors, and its manifest; a `FileSource`
            takes them.
        values: The values that are no tensors, and the tensors without elements, in
            dicts and lists. None stands for each item of a list that is elsewhere.
        left_out: The paths of values that only running pickled code would bring back,
            with the reason.
    """

    files: list[tuple[OpenFile, Manifest]]
    values: dict[str, Any]
    left_out: dict[_Steps, str]


def dcp_sources(directory: Path, files: ExitStack, *, limits: Limits) -> DcpSources:
    """Return the sources of a DCP directory.

    It reads the metadata, the values, and the records around the elements of each
    shard: file by file, in the order of the bytes. It reads no elements of a large one.

    Args:
        directory: The directory.
        files: Gets the open data files.
        limits: Bound the metadata, the trees and the values. ``max_header_bytes``
            bounds the size of all values together.

    Raises:
        CheckpointNotFoundError: there is no metadata, or a data file is missing.
        StorageError: the directory is malformed, or a file cannot be read; see
            `read_dcp`, `elements_of` and `value_of`.
        LimitExceededError: it is larger than the limits allow.
    """
    with collector_paused():
        return _sources(read_dcp(directory, limits=limits), files, limits)


def _sources(found: DcpCheckpoint, files: ExitStack, limits: Limits) -> DcpSources:
    trees = _Trees(found, limits)
    made: dict[str, Any] = {}
    left_out: dict[_Steps, str] = {}
    sources: list[tuple[OpenFile, Manifest]] = []
    with advising(OF_A_FILE):
        values = [each for each in found.leaves.values() if isinstance(each, DcpValue)]
        enforce(
            "the size of the values that are no tensors",
            sum(each.archive.nbytes for each in values),
            limits.max_header_bytes,
            "max_header_bytes",
        )
        for path, stored in _by_file(found).items():
            file = files.enter_context(opened(path))
            for value in stored.values:
                try:
                    made[value.name] = value_of(file, value, limits=limits)
                except NeedsCodeError as error:
                    left_out[value.path] = str(error)
            held = [
                _StoredShard(tensor, shard, elements_of(file, tensor, shard))
                for tensor, shard in stored.shards
            ]
            if held:
                sources.append((file, _manifest(path, held, trees)))
        for name, leaf in found.leaves.items():
            if isinstance(leaf, DcpTensor) and not leaf.shards:
                made[name] = torch.empty(leaf.shape, dtype=leaves.DTYPES[leaf.dtype])
        return DcpSources(sources, trees.nested(made), left_out)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file holds, in the order of its bytes."""

    values: list[DcpValue] = field(default_factory=list)
    shards: list[tuple[DcpTensor, DcpShard]] = field(default_factory=list)


def _by_file(found: DcpCheckpoint) -> dict[Path, _Stored]:
    """Return what each file holds. It may have two names in the metadata."""
    stored = {path: _Stored() for path in sorted({*found.files.values()})}
    for leaf in found.leaves.values():
        if isinstance(leaf, DcpValue):
            stored[found.files[leaf.archive.file]].values.append(leaf)
            continue
        for shard in leaf.shards:
            stored[found.files[shard.archive.file]].shards.append((leaf, shard))
    for each in stored.values():
        each.values.sort(key=lambda value: value.archive.start)
        each.shards.sort(key=lambda pair: pair[1].archive.start)
    return stored


# ----------------------------------------------------------------------- manifests


@dataclass(frozen=True, slots=True)
class _StoredShard:
    """A shard of a tensor in a file, and where its elements lie."""

    tensor: DcpTensor
    shard: DcpShard
    at: DcpElements

    @property
    def facts(self) -> tuple[object, ...]:
        """All that says how its bytes are read."""
        return self.tensor.dtype, self.shard.sizes, self.at

    @property
    def code(self) -> str | None:
        """The code of an entry that is this shard, in order; None if none is."""
        sizes, stride = self.shard.sizes, self.at.stride
        rows = zip(sizes, stride, dense_stride(sizes), strict=True)
        if all(size == 1 or one == other for size, one, other in rows):
            return DTYPES[self.tensor.dtype][1]
        return None


def _manifest(path: Path, held: list[_StoredShard], trees: _Trees) -> Manifest:
    """Return the manifest of a file that holds some shards.

    Raises:
        StorageError: two of them share bytes in a way that no two tensors do.
    """
    held = sorted(held, key=lambda each: (each.at.start, each.at.stop))
    entries, views = Entries(), list[TensorSpec]()
    numbers: list[int] = []  # of the tensors in the manifest; views count down from -1
    for group in _groups(held):
        first, entry = group[0], len(entries)
        start, stop = first.at.start, max(each.at.stop for each in group)
        code, shape = first.code, first.shard.sizes
        if code is not None and {each.facts for each in group} == {first.facts}:
            numbers += [entry] * len(group)
        else:
            code, shape = "U8", (stop - start,)
            for each in group:
                numbers.append(~len(views))
                views.append(_view(path, each, entry, start))
        entries.names.append(f"{first.tensor.name}{[*first.shard.offsets]}")
        entries.dtypes.append(code)
        entries.shapes.append(shape)
        entries.starts.append(start)
        entries.stops.append(stop)
    count = len(entries)
    numbers = [number if number >= 0 else count + ~number for number in numbers]
    return Manifest(
        step=0,
        snapshot_id="",
        chunk_bytes=entries.nbytes,
        algorithm="",
        digests=(),
        entries=entries,
        views=(*views,),
        tree=trees.encoded(zip(held, numbers, strict=True)),
        header=b"",
        header_bytes=0,
    )


def _groups(held: Sequence[_StoredShard]) -> Iterator[list[_StoredShard]]:
    """Yield the shards whose bytes overlap together; most of them are alone."""
    group: list[_StoredShard] = []
    stop = 0
    for each in held:
        if group and each.at.start >= stop:
            yield group
            group = []
        group.append(each)
        stop = max(stop, each.at.stop)
    yield group


def _view(path: Path, held: _StoredShard, entry: int, start: int) -> TensorSpec:
    dtype, sizes = held.tensor.dtype, held.shard.sizes
    offset, odd = divmod(held.at.start - start, DTYPES[dtype][0])
    if odd:
        name = held.tensor.name[:_SHOWN_CHARACTERS]
        detail = f"the elements of {name!r} begin within those of another tensor; "
        detail += "copy the file again, or load another checkpoint"
        raise StorageError(str(path), detail)
    return TensorSpec(entry, dtype, sizes, held.at.stride, offset, 0)


# --------------------------------------------------------------------------- trees


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands for the shards of a tensor that a file holds, with their numbers."""

    tensor: DcpTensor
    shards: list[tuple[DcpShard, int]]

    def layout(self) -> ShardedLayout:
        """Return the layout of these shards."""
        return ShardedLayout(
            held=(*range(len(self.shards)),),
            shards=tuple(Shard(s.offsets, s.sizes, 0, "cpu") for s, _ in self.shards),
            size=self.tensor.shape,
            dtype=self.tensor.dtype,
            group=_ONE,
            rank=0,
            flags=0,
        )


class _Trees:
    """Makes trees that have some of a checkpoint's leaves, at their paths.

    Args:
        found: The checkpoint.
        limits: Bound each tree, and the items of the lists of all trees together.
    """

    def __init__(self, found: DcpCheckpoint, limits: Limits) -> None:
        self._found, self._limits, self._items = found, limits, 0
        self._order = {name: number for number, name in enumerate(found.leaves)}
        self._layouts: dict[str, list[Node]] = {}  # the nodes of each distinct one

    def nested(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by name in dicts and lists, in the order of the metadata."""
        root: dict[str, Any] = {}
        for name in sorted(made, key=self._order.__getitem__):
            *above, last = self._found.leaves[name].path
            node: Any = root
            like: Any = self._found.tree
            for step in above:
                like = like[step]
                inner = node.get(step) if type(node) is dict else node[step]
                if inner is None:
                    inner = node[step] = self._empty(like)
                node = inner
            node[last] = made[name]
        return root

    def _empty(self, like: Any) -> dict[str, Any] | list[Any]:
        if type(like) is dict:
            return {}
        self._items += len(like)
        limit = self._limits.max_nodes
        enforce("the number of items in lists", self._items, limit, "max_nodes")
        return [None] * len(like)

    def encoded(self, numbered: Iterable[tuple[_StoredShard, int]]) -> Node:
        """Return the tree of a manifest, which has these tensors by number."""
        found: dict[str, _Leaf] = {}
        for held, number in numbered:
            leaf = found.setdefault(held.tensor.name, _Leaf(held.tensor, []))
            leaf.shards.append((held.shard, number))
        return self._node(self.nested(found))

    def _node(self, value: object) -> Node:
        registry, limits = Registry(), self._limits
        return encode_tree(value, registry=registry, leaf=self._leaf, limits=limits)

    def _leaf(self, leaf: object, _: object) -> Node:
        assert isinstance(leaf, _Leaf)
        held: list[Node] = [["tensor", number] for _, number in leaf.shards]
        if len(leaf.tensor.shards) == 1:
            return held[0]
        boxes = [(shard.offsets, shard.sizes) for shard, _ in leaf.shards]
        facts = f"{leaf.tensor.dtype} {leaf.tensor.shape} {boxes}"  # its hash is random
        if facts not in self._layouts:  # those of many layers are equal
            node: Any = self._node(encode_layout(leaf.layout()))
            self._layouts[facts] = node[1]
        payload: list[Node] = [["tuple", held], *self._layouts[facts]]
        return ["ext", ShardedLayout.tag, ["tuple", payload]]
