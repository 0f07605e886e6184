"""Headers to test with: a real one, and forged ones whose snapshot id is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from aiockpt.format.chunks import ChunkGrid, digest
from aiockpt.format.header import ID_SLICE, PREFIX, build_manifest, snapshot_id_of
from aiockpt.format.manifest import Manifest, TensorSpec
from tests.support.headers import entries_of

CHUNK_BYTES = 64 * 1024
Forge = Callable[..., bytes]


@pytest.fixture
def manifest() -> Manifest:
    """A small checkpoint with two entries, a view, and all that a header can say."""
    entries = entries_of(
        ("layer.weight", "F32", (2, 3), 24),
        ("layer.scale", "BF16", (4,), 8),
    )
    tree = ["dict", ["layer", "step"], [["tensors", ["weight", "t"], [0, 2]], 7]]
    return build_manifest(
        step=7,
        chunk_bytes=CHUNK_BYTES,
        entries=entries,
        views=[TensorSpec(0, "float32", (3, 2), (1, 3), 0, 3)],
        tree=tree,  # type: ignore[arg-type]
        digests=[digest([bytes(32)])],
    )


@pytest.fixture
def forge() -> Forge:
    """Make a header with a valid snapshot id from changes to a valid one."""
    return forged


WEIGHT = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}


def forged(
    *,
    entries: object = WEIGHT,
    metadata: Mapping[str, object] | None = None,
    manifest: bytes | None = None,
    padding: bytes = b" ",
    **members: object,
) -> bytes:
    """Return a header that is valid, but for what the arguments say.

    ``members`` replace those of the manifest; None leaves one out, and ``count`` is
    its number of entries. ``entries`` and ``manifest`` may be JSON, to say what an
    encoder would not.
    """
    given = isinstance(entries, bytes)
    valid = default_document(WEIGHT if given else entries)
    if "count" in members:
        valid["entries"] = members.pop("count")
    valid |= members
    document = {key: valid[key] for key in valid if valid[key] is not None}
    text = msgspec.json.encode(document) if manifest is None else manifest
    facts = {"aiockpt.snapshot": "0" * 32, "format": "pt", "aiockpt": text.decode()}
    head = msgspec.json.encode(facts | dict(metadata or {}))
    rest = entries if isinstance(entries, bytes) else msgspec.json.encode(entries)
    return sealed(b'{"__metadata__":' + head + b"," + rest[1:], padding)


def default_document(entries: Any) -> dict[str, object]:
    """Return the manifest that fits entries, its members in their order."""
    size = 0
    for entry in entries.values():
        with suppress(TypeError, KeyError, IndexError):
            size = int(entry["data_offsets"][1])
    chunks = len(ChunkGrid(size, CHUNK_BYTES)) if 0 < size < 1 << 30 else 0
    return {
        "version": 1,
        "step": 7,
        "chunk_bytes": CHUNK_BYTES,
        "algorithm": "xxh3-128",
        "digests": "ab" * 16 * chunks,
        "entries": len(entries),
        "views": None,
        "tree": ["list", []],
    }


def sealed(header: bytes, padding: bytes = b" ") -> bytes:
    """Pad a header, fill in its snapshot id (where it has a place), add its length."""
    header += padding * (-(8 + len(header)) % 64)
    if header.startswith(PREFIX):
        found = snapshot_id_of(header).encode()
        header = header[: ID_SLICE.start] + found + header[ID_SLICE.stop :]
    return len(header).to_bytes(8, "little") + header
