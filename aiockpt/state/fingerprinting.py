"""Makes the fingerprint of a state dict, or of a data segment in memory.

Both are a tree and numbered tensors. The tree has the layouts of distributed tensors,
which say what a local tensor holds of the full one, and which replica that is. A tensor
that the tree names twice has two records, and is summed once.

Values that are no tensors are not covered. The tensors inside a registered leaf are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from aiockpt.errors import RemoteProtocolError, UnsupportedLeafError
from aiockpt.format.fingerprint import (
    MAX_DIMENSIONS,
    MAX_PATH_CHARACTERS,
    NOTHING,
    Fingerprint,
    ReplicaPart,
    TensorSums,
    format_sums,
)
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, dense_stride
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import references, registered
from aiockpt.format.tree import remedy_for, unsupported
from aiockpt.memory.multilinear import HeldTensor, word_sums
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.system import collector_paused
from aiockpt.state.distributed import LayoutReader
from aiockpt.state.flatten import ODD, survey
from aiockpt.state.leaves import DTYPE_NAMES, extension
from aiockpt.state.mesh import ShardRuns, block, shape_of, shard_of, whole
from aiockpt.state.rebuild import parts_over, tensors_over
from aiockpt.state.sharding import (
    LAYOUTS,
    DTensorLayout,
    Layout,
    Partial,
    Replicate,
    ShardedLayout,
)


def fingerprint_of(state_dict: object, *, limits: Limits) -> Fingerprint:
    """Return the fingerprint of what this rank has of a state dict.

    Raises:
        UnsupportedLeafError: a tensor cannot be covered.
        LimitExceededError: too deep or too many nodes, also because of a cycle.
        StateDictError: reading a tensor or a registered type failed.
    """
    odd: list[object] = []
    found = survey(
        state_dict, limits=limits, allow_pickle=False, writing=False, odd=odd
    )
    if odd:
        _refuse_tensors(found.tree, odd)
    return _fingerprint(found.tree, found.tensors, limits)


def fingerprint_of_segment(
    manifest: Manifest, buffer: memoryview, *, limits: Limits
) -> Fingerprint:
    """Return the fingerprint of a data segment, whose tensors are made for it only.

    Raises:
        RemoteProtocolError: the manifest is malformed.
        LimitExceededError: a layout is too large.
    """
    return _fingerprint(manifest.tree, tensors_over(manifest, buffer), limits)


def fingerprint_of_snapshot(snapshot: Snapshot, *, limits: Limits) -> bytes:
    """Return the fingerprint of a snapshot as JSON.

    Raises:
        LocalProtocolError: its memory is a state dict's own, which has changed.
    """
    manifest = snapshot.manifest
    entries = manifest.entries
    if (arena := snapshot.arena) is not None:
        tensors = tensors_over(manifest, arena.buffer)
    else:
        data: dict[int, torch.Tensor] = {}
        for entry, (start, stop) in enumerate(
            zip(entries.starts, entries.stops, strict=True)
        ):
            views = snapshot.buffers(start, stop)
            view = views[0] if len(views) == 1 else bytearray().join(views)
            if start < stop:
                data[entry] = torch.frombuffer(view, dtype=torch.uint8)
        every, none = {*range(manifest.tensor_count)}, memoryview(b"")
        made = parts_over(
            manifest, none, parts=set(), blobs=set(), fresh=every, on_device=data
        )
        tensors = [made[number] for number in range(manifest.tensor_count)]
    found = _fingerprint(manifest.tree, tensors, limits)
    snapshot.check(0, manifest.segment_bytes)
    return found.to_json()


def _refuse_tensors(tree: Node, odd: Sequence[object]) -> None:
    """Refuse values that cannot travel and have tensors.

    Raises:
        UnsupportedLeafError: there is one; the error names it.
    """
    for path, tag, number in _all_registered(tree):
        if tag != ODD or not isinstance(number, int):
            continue
        value = odd[number]
        if isinstance(value, torch.Tensor):
            extension(value, path, allow_pickle=False)  # raises for a plain type
            raise unsupported(value, format_path(path), "")
        if remedy := remedy_for(value):
            raise unsupported(value, format_path(path), remedy)


def _all_registered(tree: Node) -> Iterator[tuple[Path, str, Any]]:
    """Yield path, tag and payload of every registered leaf, also inside of others."""
    todo: list[tuple[Path, Node]] = [((), tree)]
    while todo:
        above, node = todo.pop()
        for path, tag, payload in registered(node):
            at = (*above, *path)
            yield at, tag, payload
            if tag not in LAYOUTS and tag != ODD:
                todo.append((at, payload))


class _TensorLeaf(NamedTuple):
    """A tensor that a tree names: its local tensors, and its layout if it has one."""

    path: Path
    numbers: Sequence[int]
    layout: Layout | None


def _leaves(tree: Node, limits: Limits) -> Iterator[_TensorLeaf]:
    """Yield all tensors of a tree."""
    layouts, found = LayoutReader(limits), set[Path]()
    for path, tag, payload in _all_registered(tree):
        if tag in LAYOUTS:
            found.add(path)
            yield _TensorLeaf(path, *layouts.read(path, tag, payload))
    for path, kind, number, leaf in references(tree):
        is_part = leaf is not None and any(
            path[:length] in found for length in range(len(path))
        )
        if kind == "tensor" and not is_part:
            yield _TensorLeaf(path, [number], None)


class _HeldParts:
    """What local tensors hold of full ones; each is summed once.

    Args:
        tensors: The local tensors, by number.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._shards: dict[int, tuple[list[ShardRuns | None], list[int]]] = {}
        self._numbers: dict[object, int] = {}
        self.held: list[HeldTensor] = []

    def parts_of(self, leaf: _TensorLeaf) -> list[tuple[int, int, int | None]]:
        """Return replica, count and number in ``held`` of each local tensor.

        The last one is None if there is no element.

        Raises:
            UnsupportedLeafError: the tensor is a sum that was not made yet.
            RemoteProtocolError: a local tensor does not fit its layout.
        """
        found: list[tuple[int, int, int | None]] = []
        runs, replicas = self._shards_of(leaf)
        for number, held, replica in zip(leaf.numbers, runs, replicas, strict=True):
            tensor = self._tensors[number]
            if held is None or not tensor.numel():
                found.append((replica, 0, None))
                continue
            if shape_of(held) != tuple(tensor.shape):
                where = format_path(leaf.path)[:200] or "the root"
                raise RemoteProtocolError(
                    f"the local tensor at {where} has the shape {[*tensor.shape]}, and "
                    "its layout says otherwise"
                )
            shape = tuple(tensor.shape) if leaf.layout is None else leaf.layout.shape
            at = self._numbers.setdefault((number, shape, held), len(self.held))
            if at == len(self.held):
                self.held.append(HeldTensor(tensor, shape, held))
            found.append((replica, tensor.numel(), at))
        return found

    def _shards_of(self, leaf: _TensorLeaf) -> tuple[list[ShardRuns | None], list[int]]:
        """Return what each local tensor holds, and the number of its replica."""
        layout = leaf.layout
        if layout is None:
            return [whole(self._tensors[leaf.numbers[0]].shape)], [0]
        if id(layout) not in self._shards:
            self._shards[id(layout)] = _shards_of(layout, leaf.path)
        return self._shards[id(layout)]


def _shards_of(layout: Layout, path: Path) -> tuple[list[ShardRuns | None], list[int]]:
    """Return what each local tensor of a layout holds, and its replica's number.

    The number of a replica is the lowest rank that holds a part of it. So the replicas
    of two meshes without a common rank, which are parts of a larger mesh, differ, too.
    """
    if isinstance(layout, ShardedLayout):
        copies, lowest = list[int](), dict[int, int]()  # equal shards are replicas
        seen = Counter[object]()
        for each in layout.shards:
            copies.append(nth := seen[each.offsets, each.sizes])
            seen[each.offsets, each.sizes] += 1
            lowest[nth] = min(lowest.get(nth, each.rank), each.rank)
        own = [layout.shards[index] for index in layout.held]
        runs = [block(each.offsets, each.sizes) for each in own]
        return [*runs], [lowest[copies[index]] for index in layout.held]
    if any(isinstance(each, Partial) for each in layout.placements):
        remedy = "each rank has a term of it: redistribute it first"
        raise UnsupportedLeafError(format_path(path), "partial DTensor", remedy)
    try:
        shard = shard_of(layout)
    except ValueError as error:
        where = format_path(path)[:200] or "the root"
        raise RemoteProtocolError(
            f"malformed layout at {where}: no mesh splits a tensor like this: {error}"
        ) from error
    return [shard], [_replica_of(layout)]


def _replica_of(layout: DTensorLayout) -> int:
    """Return the lowest rank that holds a part of this rank's replica."""
    grid = layout.mesh.grid
    ranks = grid.ranks[:1] if grid.strides is not None else grid.ranks
    strides = grid.strides or dense_stride(grid.sizes)
    first, spread = 0, [0]  # positions in the grid, or ranks if it is regular
    for size, stride, at, placement in zip(
        grid.sizes,
        strides,
        layout.coordinate or (0,) * len(grid.sizes),
        layout.placements,
        strict=True,
    ):
        if isinstance(placement, Replicate):
            first += stride * at
        elif grid.strides is not None:
            first += min(stride * (size - 1), 0)
        else:
            spread = [each + stride * step for each in spread for step in range(size)]
    if grid.strides is not None:
        return max(ranks[0] + first, 0)
    return min(ranks[first + each] for each in spread)


def _fingerprint(
    tree: Node, tensors: Sequence[torch.Tensor], limits: Limits
) -> Fingerprint:
    parts = _HeldParts(tensors)
    with collector_paused():
        rows = [(leaf, parts.parts_of(leaf)) for leaf in _leaves(tree, limits)]
    sums = [format_sums(*each) for each in word_sums(parts.held)]
    found: dict[str, TensorSums] = {}
    names = _names([leaf.path for leaf, _ in rows])
    for name, (leaf, own) in zip(names, rows, strict=True):
        layout = leaf.layout
        if len(name) > MAX_PATH_CHARACTERS:
            remedy = f"a fingerprint's paths have {MAX_PATH_CHARACTERS} characters"
            kind = f"tensor with a path of {len(name)} characters"
            raise UnsupportedLeafError(f"{name[:200]}...", kind, remedy)
        if leaf.numbers:
            dtype = DTYPE_NAMES[tensors[leaf.numbers[0]].dtype]
        else:
            assert isinstance(layout, ShardedLayout)  # a rank without a shard
            dtype = layout.dtype
        shape = layout.shape if layout else tuple(tensors[leaf.numbers[0]].shape)
        if len(shape) > MAX_DIMENSIONS:
            remedy = f"a fingerprint's tensors have at most {MAX_DIMENSIONS}"
            kind = f"tensor with {len(shape)} dimensions"
            raise UnsupportedLeafError(name, kind, remedy)
        found[name] = TensorSums.of(
            name,
            dtype,
            shape,
            [
                ReplicaPart(replica, count, NOTHING if at is None else sums[at])
                for replica, count, at in own
            ],
            plain=layout is None,
        )
    return Fingerprint(found)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return how each path reads. Of those that read alike, all but one get a number.

    The numbers do not depend on the order of the paths, which is that of dicts.
    """
    found = [*map(format_path, paths)]
    if len({*found}) == len(found):
        return found
    used = set[str]()
    keys = [(name, [*map(repr, path)]) for name, path in zip(found, paths, strict=True)]
    for at in sorted(range(len(found)), key=keys.__getitem__):
        again, name = 2, found[at]
        while found[at] in used:
            found[at], again = f"{name}#{again}", again + 1
        used.add(found[at])
    return found
