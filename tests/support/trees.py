"""Manifests and trees as a sender could write them, over a few counted bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiockpt.format.chunks import digest
from aiockpt.format.header import build_manifest
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, TensorSpec
from aiockpt.format.paths import Node
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from headers import entries_of
from pipeline import LIMITS

SIZE: Node = ["ext", "torch.Size", ["tuple", [2, 2]]]


def manifest_of(
    tree: Node,
    *,
    segment: bytes = bytes(range(16)),
    code: str = "U8",
    shape: tuple[int, ...] = (16,),
    views: Sequence[TensorSpec] = (),
) -> Manifest:
    """Return the manifest of one entry of 16 bytes."""
    return build_manifest(
        step=1,
        chunk_bytes=64 << 10,
        entries=entries_of(*[("t", code, shape, len(segment))] if segment else []),
        views=views,
        tree=tree,
        digests=[digest([segment])] if segment else [],
    )


def value_of(
    tree: Node, *, allow_pickle: bool = False, limits: Limits = LIMITS, **options: Any
) -> Any:
    """Return what a receiver makes of a tree over 16 counted bytes."""
    manifest = manifest_of(tree, **options)
    tensors = tensors_over(manifest, memoryview(bytearray(range(16))))
    return assemble(
        Frame.of(manifest), tensors, limits=limits, allow_pickle=allow_pickle
    )


def view(**changes: Any) -> TensorSpec:
    """Return a view of four floats."""
    facts = {
        "storage": 0,
        "dtype": "float32",
        "shape": (4,),
        "stride": (1,),
        "offset": 0,
        "flags": 0,
    }
    return TensorSpec(**{**facts, **changes})
