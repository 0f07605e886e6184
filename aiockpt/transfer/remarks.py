"""Warns a sender of what receivers, or loads, will refuse of a good checkpoint.

The sender can do something about it before anybody needs the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from aiockpt.events import TransferEvent, emit
from aiockpt.format.header import LENGTH_BYTES, VALUES_PER_TENSOR
from aiockpt.format.limits import FILE_LIMITS, Limits, count_values
from aiockpt.format.manifest import Manifest
from aiockpt.format.paths import Path, format_path
from aiockpt.format.tree import children_of, rebuilding, type_of

_SHOWN: Final = 10
_SCALARS: Final = {"tensor", "blob", "int", "float", "complex", "str", "bytes"}


class Remarks:
    """Gives each warning once, for as long as it stays the same.

    Args:
        readers: The limits that readers have by default: `FILE_LIMITS` for files.
        own: The limits within which the checkpoint was described.
    """

    def __init__(self, readers: Limits, own: Limits) -> None:
        self._readers, self._own = readers, own
        self._told: dict[str, object] = {}

    def on(
        self, manifest: Manifest, strangers: Mapping[str, Path], *, step: int
    ) -> None:
        """Warn about a checkpoint whose manifest was just built."""
        if strangers:
            self._say("types", {*strangers}, _on_types(strangers), step)
        for option, what, actual in _beyond(manifest, self._readers, self._own):
            limit = getattr(self._readers, option)
            files = self._readers == FILE_LIMITS
            who = "a load" if files else "a receiver with default limits"
            how = "CheckpointReader(limits=" if files else "limits="
            how += f"Limits({option}={actual}){')' if files else ''}"
            detail = f"{what} is {actual}, and {who} refuses more than {limit}: say "
            detail += f"{how} there"
            self._say(option, detail, detail, step)

    def _say(self, kind: str, facts: object, detail: str, step: int) -> None:
        if self._told.get(kind) != facts:
            self._told[kind] = facts
            emit(
                TransferEvent(
                    stop="stage", step=step, detail=detail, level=logging.WARNING
                )
            )


def _on_types(strangers: Mapping[str, Path]) -> str:
    where = ", ".join(
        f"{format_path(path) or 'the state dict'} is a {type_of(tag)}"
        for tag, path in islice(strangers.items(), _SHOWN)
    )
    more = len(strangers) - _SHOWN
    where += f" and {more} more types" if more > 0 else ""
    return (
        f"{where}: only a process that knows the type rebuilds it; "
        f"{rebuilding(next(iter(strangers)))} there, or use a template that has one"
    )


def _beyond(
    manifest: Manifest, limits: Limits, own: Limits
) -> Iterator[tuple[str, str, int]]:
    """Yield each limit that the manifest exceeds: option, what it bounds, value."""
    length = manifest.header_bytes - LENGTH_BYTES
    tensors = manifest.tensor_count
    if length > limits.max_header_bytes:
        yield "max_header_bytes", "the length of the header", length
    if tensors > limits.max_tensors:
        yield "max_tensors", "the number of tensors", tensors
    # A value takes two bytes, so the header of most checkpoints rules this out.
    if length > 2 * limits.max_nodes:
        nodes = count_values(msgspec.json.encode(manifest.tree))
        most = limits.max_nodes + VALUES_PER_TENSOR * limits.max_tensors
        rest = count_values(manifest.header) - most
        if nodes > limits.max_nodes or rest > 0:
            yield (
                "max_nodes",
                "the number of values in the tree",
                max(nodes, limits.max_nodes + rest),
            )
    if length > limits.max_text_bytes:
        longest = _longest_text(manifest.tree)
        if longest > limits.max_text_bytes:
            yield "max_text_bytes", "the length of a string", longest
    if own.max_depth > limits.max_depth:
        depth = _depth(manifest.tree)
        if depth > limits.max_depth:
            yield "max_depth", "the nesting of the tree", depth


def _longest_text(tree: Any) -> int:
    longest, level = 0, [tree]
    while level:
        texts = [each for each in level if type(each) is str]
        if texts:
            longest = max(longest, len(msgspec.json.encode(max(texts, key=len))))
        level = [each for node in level if type(node) is list for each in node]
    return longest


def _depth(tree: Any) -> int:
    depth, level = 0, [tree]
    while level := [n for n in level if type(n) is list and n[0] not in _SCALARS]:
        depth += 1
        level = [child for node in level for _, child in children_of(node)]
    return depth
