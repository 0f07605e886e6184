"""A manifest says what was built, and refuses to describe what nobody would accept."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiockpt.errors import (
    LimitExceededError,
    LocalProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.chunks import ChunkGrid
from aiockpt.format.entries import Storage
from aiockpt.format.header import build_manifest, decode_header, header_length
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import COMPACTED, ForeignHeader, Manifest, TensorSpec

GOLDEN = Path(__file__).parent / "golden" / "version1.hex"


def test_a_manifest_shows_what_it_describes(manifest: Manifest) -> None:
    """A log line tells the checkpoint."""
    assert repr(manifest) == "<Manifest step=7 tensors=3 bytes=32>"


def test_sizes_add_up(manifest: Manifest) -> None:
    """The data segment follows the header, at a multiple of 64."""
    assert manifest.segment_bytes == 32
    assert manifest.header_bytes == len(manifest.header)
    assert manifest.header_bytes % 64 == 0
    assert manifest.total_bytes == manifest.header_bytes + 32
    assert manifest.grid == ChunkGrid(32, manifest.chunk_bytes)


def test_tensors_are_entries_first_and_views_behind(manifest: Manifest) -> None:
    """An entry is its own description: dense, contiguous, plain."""
    assert [manifest.tensor(index) for index in range(manifest.tensor_count)] == [
        TensorSpec(0, "float32", (2, 3), (3, 1), 0, 0),
        TensorSpec(1, "bfloat16", (4,), (1,), 0, 0),
        TensorSpec(0, "float32", (3, 2), (1, 3), 0, 3),
    ]


@pytest.mark.parametrize("index", [-1, 3, 2**62])
def test_a_tensor_that_is_none_is_refused(manifest: Manifest, index: int) -> None:
    """Indices come from the peer's tree."""
    with pytest.raises(RemoteProtocolError, match="of 3"):
        manifest.tensor(index)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_header_decodes_to_what_was_built(manifest: Manifest, kind: Any) -> None:
    """Whatever memory it lies in; the result does not depend on that memory."""
    data = bytearray(manifest.header)
    decoded = decode_header(kind(data), limits=Limits())
    data[:] = bytes(len(data))
    assert decoded == manifest


def test_equal_checkpoints_have_equal_ids(manifest: Manifest) -> None:
    """A restarted server serves the same snapshot; another step is another one."""
    storages = [
        Storage(name, entry.dtype, entry.shape, size, 1)
        for name, entry, size in zip(
            manifest.names, manifest.entries, (24, 8), strict=True
        )
    ]
    facts: dict[str, Any] = {
        "chunk_bytes": manifest.chunk_bytes,
        "storages": storages,
        "views": manifest.views,
        "tree": manifest.tree,
        "digests": manifest.digests,
    }
    assert build_manifest(step=7, **facts) == manifest
    assert build_manifest(step=8, **facts).snapshot_id != manifest.snapshot_id


def test_a_manifest_without_tensors_is_one() -> None:
    """A state dict may hold nothing but a step."""
    manifest = build_manifest(
        step=0, chunk_bytes=64, storages=[], tree=["dict", [], []], digests=[]
    )
    assert manifest.segment_bytes == len(manifest.grid) == 0
    assert decode_header(manifest.header, limits=Limits()) == manifest


DEFAULTS: dict[str, Any] = {
    "step": 1,
    "chunk_bytes": 1 << 16,
    "storages": [Storage("a", "F32", (4,), 16, 4)],
    "views": [],
    "tree": ["tensor", 0],
    "digests": ["0" * 32],
}
VIEW = TensorSpec(0, "float32", (2, 2), (2, 1), 0, COMPACTED)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": -64},
        {"chunk_bytes": 100},
        {"digests": []},
        {"digests": ["0" * 31]},
        {"digests": ["0" * 32, "0" * 32]},
        {"digests": ["G" * 32]},
        {"storages": [Storage("a", "F32", (4,), 12, 4)]},
        {"storages": [Storage("a", "C128", (1,), 16, 4)]},
        {"storages": [Storage("a", "F4", (32,), 16, 1)]},
        {"views": [msgspec.structs.replace(VIEW, offset=1)]},
        {"views": [msgspec.structs.replace(VIEW, storage=1)]},
        {"views": [msgspec.structs.replace(VIEW, dtype="float")]},
        {"step": -1},
        {"step": 2**63},
    ],
    ids=repr,
)
def test_what_a_receiver_would_refuse_is_not_built(changes: dict[str, Any]) -> None:
    """The sender learns of its bug, not each of its receivers."""
    build_manifest(**DEFAULTS)
    with pytest.raises(LocalProtocolError, match="cannot describe step"):
        build_manifest(**DEFAULTS | changes)


def test_header_length_counts_its_own_bytes() -> None:
    """The client learns from 8 bytes how many to read."""
    assert header_length(struct.pack("<Q", 56), limits=Limits()) == 64


@pytest.mark.parametrize(
    "first8", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 8, b"\1" + b"\0" * 7, b"<!DOCTYP"]
)
def test_what_is_no_header_is_told_from_one_that_is_too_long(first8: bytes) -> None:
    """An error page is not a very large checkpoint."""
    with pytest.raises(RemoteProtocolError, match="no safetensors header"):
        header_length(first8, limits=Limits())


def test_a_long_header_is_refused_by_its_first_bytes() -> None:
    """Before a byte of it is read."""
    limits = Limits(max_header_bytes=1000)
    header_length(struct.pack("<Q", 1000), limits=limits)
    with pytest.raises(LimitExceededError) as caught:
        header_length(struct.pack("<Q", 1001), limits=limits)
    assert (caught.value.limit, caught.value.actual) == (1000, 1001)


def golden() -> bytes:
    """Return the bytes of the golden hexdump."""
    lines = re.findall(r"^[0-9a-f]{8}  ([0-9a-f ]+)", GOLDEN.read_text(), re.MULTILINE)
    return bytes.fromhex("".join(lines))


def test_version_1_is_read() -> None:
    """A header that an earlier release wrote says the same today."""
    manifest = decode_header(golden(), limits=Limits())
    assert isinstance(manifest, Manifest)
    assert manifest.step == 42
    assert manifest.names == ["emb.weight", 'ünïcode "quoted"', "z"]
    assert [entry.dtype for entry in manifest.entries] == ["F32", "BF16", "U8"]
    assert manifest.segment_bytes == 62
    assert manifest.digests == ("00112233445566778899aabbccddeeff",)
    assert [view.flags for view in manifest.views] == [3, 4]


def test_version_1_is_written_as_ever() -> None:
    """Describing the same checkpoint again gives the same bytes."""
    manifest = decode_header(golden(), limits=Limits())
    assert isinstance(manifest, Manifest)
    again = build_manifest(
        step=manifest.step,
        chunk_bytes=manifest.chunk_bytes,
        storages=[
            Storage(name, entry.dtype, entry.shape, stop - start, 1)
            for name, entry in zip(manifest.names, manifest.entries, strict=True)
            for start, stop in [entry.data_offsets]
        ],
        views=manifest.views,
        tree=manifest.tree,
        digests=manifest.digests,
    )
    assert again == manifest
    assert again.header == golden()


def foreign(document: object, padding: bytes = b"") -> bytes:
    """Return a header as another tool writes it."""
    text = msgspec.json.encode(document) + padding
    return struct.pack("<Q", len(text)) + text


def test_a_foreign_header_is_read() -> None:
    """In any order, unaligned, with white space, and with codes that we never write."""
    document = {
        "b": {"dtype": "F4", "shape": [3, 2], "data_offsets": [5, 8]},
        "__metadata__": {"format": "pt", "by": "someone"},
        "a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
    }
    header = decode_header(foreign(document, b" \n "), limits=Limits())
    assert isinstance(header, ForeignHeader)
    assert header.names == ["a", "b"]
    assert header.metadata == {"format": "pt", "by": "someone"}
    assert header.segment_bytes == 8
    assert header.header_bytes % 64 != 0


def test_a_foreign_header_may_be_empty() -> None:
    """Safetensors allows a file without tensors and without metadata."""
    header = decode_header(foreign({}), limits=Limits())
    assert isinstance(header, ForeignHeader)
    assert (header.names, header.metadata, header.segment_bytes) == ([], {}, 0)


def test_a_step_is_part_of_the_identity(manifest: Manifest) -> None:
    """Manifests compare by what they say."""
    assert replace(manifest, step=8) != manifest
