"""Reads directories of torch.distributed.checkpoint, by our sources and by torch."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.registry import Registry
from aiockpt.format.tree import decode_tree
from aiockpt.state.leaves import DTYPES
from aiockpt.state.rebuild import tensors_over
from aiockpt.state.sharding import ShardedLayout, parse_layout
from aiockpt.storage.dcp_sources import dcp_sources
from aiockpt.storage.placement import Placement
from aiockpt.storage.read import FileSource
from aiockpt.testing import assert_same


@dataclass
class Boxes:
    """Some shards of a tensor: for each file, a layout and its local tensors."""

    parts: list[tuple[ShardedLayout, tuple[torch.Tensor, ...]]]

    @classmethod
    def of(cls, payload: Any) -> Boxes:
        """Read the payload of a node."""
        layout = parse_layout(ShardedLayout, payload)
        assert isinstance(layout, ShardedLayout)
        assert len(layout.held) == len(payload[0]) == len(layout.shards)
        return cls([(layout, payload[0])])

    def full(self) -> torch.Tensor:
        """Return the full tensor, of which each element is there once."""
        layout = self.parts[0][0]
        full = torch.zeros(layout.size, dtype=DTYPES[layout.dtype])
        count = torch.zeros(layout.size, dtype=torch.int64)
        for each, tensors in self.parts:
            assert (each.size, each.dtype) == (layout.size, layout.dtype)
            for index, tensor in zip(each.held, tensors, strict=True):
                shard = each.shards[index]
                assert tensor.shape == shard.sizes
                assert tensor.dtype == full.dtype
                pairs = zip(shard.offsets, shard.sizes, strict=True)
                box = tuple(slice(first, first + size) for first, size in pairs)
                full[box] = tensor
                count[box] += 1
        assert (count == 1).all()
        return full


def assert_as_torch_loads(directory: Path) -> dict[str, Any]:
    """Compare what the sources give with what torch loads, bit for bit; return it.

    The order of keys, and strides, may differ.
    """
    expected = loaded_by_torch(directory)
    found = _like(rebuilt(directory), expected)
    assert_same(found, expected)
    assert isinstance(found, dict)
    return found


def rebuilt(directory: Path) -> dict[str, Any]:
    """Return the full state dict, put together from the sources."""
    registry = Registry()
    registry.register(ShardedLayout.tag, Boxes, lambda each: each, Boxes.of)
    trees: list[Any] = []
    with ExitStack() as stack:
        found = dcp_sources(directory, stack, limits=FILE_LIMITS)
        assert found.left_out == {}
        for file, manifest in found.files:
            source = FileSource(file, manifest, mapped=False)
            entries = manifest.entries
            ranges = [*zip(entries.starts, entries.stops, strict=True)]
            assert all(first < last for first, last in ranges)
            assert ranges == sorted(ranges)
            assert all(one[1] <= other[0] for one, other in pairwise(ranges))
            source.read(Placement(source.segment, ranges), verify="full")
            tree = decode_tree(
                manifest.tree,
                registry=registry,
                tensors=tensors_over(manifest, source.segment.buffer),
                limits=FILE_LIMITS,
            )
            trees.append(tree)
    united = found.values
    for tree in trees:
        united = _united(united, tree)
    whole: dict[str, Any] = _whole(united)
    return whole


def _united(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    assert type(one) is type(other)
    if isinstance(one, Boxes):
        return Boxes([*one.parts, *other.parts])
    if isinstance(one, dict):
        both = one.keys() & other.keys()
        return {**one, **other, **{key: _united(one[key], other[key]) for key in both}}
    assert isinstance(one, list)
    return [_united(*pair) for pair in zip(one, other, strict=True)]


def _whole(node: Any) -> Any:
    match node:
        case Boxes():
            return node.full()
        case dict():
            return {key: _whole(each) for key, each in node.items()}
        case list():
            return [*map(_whole, node)]
    return node


def _like(found: Any, expected: Any) -> Any:
    """Return the same with the keys in another order, and with dense tensors."""
    if isinstance(found, dict) and isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return {key: _like(found[key], each) for key, each in expected.items()}
    if isinstance(found, list) and isinstance(expected, list):
        return [_like(*pair) for pair in zip(found, expected, strict=True)]
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return torch.empty_like(expected).copy_(found)
    return found


def loaded_by_torch(directory: Path) -> dict[str, Any]:
    """Return the state dict that torch itself makes of a directory."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(directory),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    return state
