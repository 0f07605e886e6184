"""The same checkpoint under another step, or with its digests filled in.

A snapshot that is staged in a hurry gets its digests later, perhaps in another
process: until then its manifest has zeros in their place, so that its header is as
long as it will be, and differs in the digests and in the snapshot id alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aiockpt.format.chunks import DIGEST_DIGITS
from aiockpt.format.layout import (
    ID_SLICE,
    LENGTH_BYTES,
    Entry,
    Storage,
    snapshot_id_of,
)
from aiockpt.format.manifest import Manifest, build_manifest

__all__ = ["UNSEALED", "digests_at", "with_digests", "with_step"]

UNSEALED: Final = "0" * DIGEST_DIGITS
"""What stands for a digest that is not known yet."""

_BEFORE_DIGESTS: Final = rb"\"digests\":\""


def with_step(manifest: Manifest, step: int) -> Manifest:
    """Return the manifest of the same memory under another step."""
    return build_manifest(
        step=step,
        chunk_bytes=manifest.chunk_bytes,
        storages=[
            Storage(name, entry.dtype, entry.shape, _length(entry), align=1)
            for name, entry in zip(manifest.names, manifest.entries, strict=True)
        ],
        views=manifest.views,
        tree=manifest.tree,
        digests=manifest.digests,
    )


def with_digests(manifest: Manifest, digests: Sequence[str]) -> Manifest:
    """Return the manifest with the chunks' digests; its header is as long."""
    header = bytearray(manifest.header)
    header[digests_at(manifest)] = "".join(digests).encode()
    text = memoryview(header)[LENGTH_BYTES:]
    snapshot_id = snapshot_id_of(text)
    text[ID_SLICE] = snapshot_id.encode()
    return replace(
        manifest,
        snapshot_id=snapshot_id,
        digests=tuple(digests),
        header=bytes(header),
    )


def digests_at(manifest: Manifest) -> slice:
    """Return where in the header the digests stand, one after the other."""
    # What stands before them, in canonical form, is numbers and a known algorithm.
    start = manifest.header.find(_BEFORE_DIGESTS)
    assert start >= 0, "a manifest without its header"
    start += len(_BEFORE_DIGESTS)
    return slice(start, start + DIGEST_DIGITS * len(manifest.digests))


def _length(entry: Entry) -> int:
    start, stop = entry.data_offsets
    return stop - start
