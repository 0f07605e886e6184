"""Headers of the wire format: valid ones in small pieces, and forged ones."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.entries import Entries, lay_out
from aiockpt.format.header import CHECK_SLICE, PREFIX, snapshot_id_of
from aiockpt.format.paths import format_path
from aiockpt.format.references import references

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.format.paths import Node

CHUNK_BYTES = 64 * 1024
Row: TypeAlias = tuple[str, str, tuple[int, ...], int]
"""An entry's name, code, shape and bytes."""


def entries_of(*rows: Row) -> Entries:
    """Return the entries of these rows, one after the other, whatever they say."""
    if not rows:
        return Entries()
    names, codes, shapes, sizes = zip(*rows, strict=True)
    return lay_out(names, codes, shapes, sizes, [1] * len(rows))[1]


def sealed(header: bytes, padding: bytes = b" ") -> bytes:
    """Pad a header, fill in its snapshot id if it has a place, prepend its length."""
    header += padding * (-(8 + len(header)) % 64)
    if header.startswith(PREFIX):
        found = snapshot_id_of(header).encode()
        header = header[: CHECK_SLICE.start] + found + header[CHECK_SLICE.stop :]
    return prefixed(header)


def prefixed(text: bytes) -> bytes:
    """Put its length before the JSON of a header."""
    return len(text).to_bytes(8, "little") + text


def parts_of(header: bytes) -> tuple[Any, Any]:
    """Return a header's manifest and its entries."""
    entries = msgspec.json.decode(header[8:])
    return msgspec.json.decode(entries.pop("__metadata__")["aiockpt"]), entries


def header_of(manifest: Any, entries: Any) -> bytes:
    """Return the canonical header of a manifest and entries, right but for them."""
    text = msgspec.json.encode(manifest).decode()
    facts = {"aiockpt.snapshot": "0" * 32, "format": "pt", "aiockpt": text}
    rest = msgspec.json.encode(entries)
    start = b'{"__metadata__":' + msgspec.json.encode(facts)
    return sealed(start + (b"," if len(rest) > 2 else b"") + rest[1:])


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
    valid = forged_manifest(WEIGHT if given else entries)
    if "count" in members:
        valid["entries"] = members.pop("count")
    valid |= members
    document = {key: valid[key] for key in valid if valid[key] is not None}
    text = msgspec.json.encode(document) if manifest is None else manifest
    facts = {"aiockpt.snapshot": "0" * 32, "format": "pt", "aiockpt": text.decode()}
    head = msgspec.json.encode(facts | dict(metadata or {}))
    rest = entries if isinstance(entries, bytes) else msgspec.json.encode(entries)
    return sealed(b'{"__metadata__":' + head + b"," + rest[1:], padding)


def forged_manifest(entries: Any) -> dict[str, object]:
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


def tensor_paths(node: Node) -> dict[int, str]:
    """Return where each tensor number (blobs included) appears first in a tree."""
    paths: dict[int, str] = {}
    for path, _, number, _ in references(node):
        if number not in paths:
            paths[number] = format_path(path)
    return paths
