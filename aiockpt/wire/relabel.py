"""The same checkpoint under another step, or with its digests filled in.

A snapshot that is staged in a hurry gets its digests later, perhaps in another
process: until then its manifest has zeros in their place, so that its header is as
long as it will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiockpt.wire.chunks import DIGEST_DIGITS
from aiockpt.wire.layout import Entry, Storage
from aiockpt.wire.manifest import Manifest, build_manifest

__all__ = ["UNSEALED", "with_digests", "with_step"]

UNSEALED: Final = "0" * DIGEST_DIGITS
"""What stands for a digest that is not known yet."""


def with_step(manifest: Manifest, step: int) -> Manifest:
    """Return the manifest of the same memory under another step."""
    return _rebuilt(manifest, step, manifest.digests)


def with_digests(manifest: Manifest, digests: Sequence[str]) -> Manifest:
    """Return the manifest with the chunks' digests; its header is as long."""
    return _rebuilt(manifest, manifest.step, digests)


def _rebuilt(manifest: Manifest, step: int, digests: Sequence[str]) -> Manifest:
    return build_manifest(
        step=step,
        chunk_bytes=manifest.chunk_bytes,
        storages=[
            Storage(name, entry.dtype, entry.shape, _length(entry), align=1)
            for name, entry in zip(manifest.names, manifest.entries, strict=True)
        ],
        views=manifest.views,
        tree=manifest.tree,
        digests=digests,
    )


def _length(entry: Entry) -> int:
    start, stop = entry.data_offsets
    return stop - start
