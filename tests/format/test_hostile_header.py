"""No header from a peer crashes, hangs or fills the memory of a receiver.

The forged headers here have the right snapshot id: what refuses them is the check
that the case is about.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import (
    IntegrityError,
    LimitExceededError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.header import ID_SLICE, PREFIX, decode_header
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from tests.support.proofs import proves

Forge = Callable[..., bytes]
LIMITS = Limits()
MIB = 1 << 20


def entry(
    dtype: object = "F32", shape: object = (4,), start: object = 0, stop: object = 16
) -> dict[str, object]:
    """Return an entry; the default one is valid."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def decode(header: bytes, limits: Limits = LIMITS) -> Manifest | ForeignHeader:
    """Decode with the default limits."""
    return decode_header(header, limits=limits)


@contextmanager
def bounded(*, seconds: float, peak_bytes: int) -> Iterator[None]:
    """Fail if the block works longer, or ever allocates more."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        elapsed, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert elapsed < seconds
    assert peak < peak_bytes


@contextmanager
def refused_for_its_content() -> Iterator[None]:
    """Expect a refusal for another reason than the spelling."""
    with pytest.raises(RemoteProtocolError) as caught:
        yield
    assert "canonical" not in str(caught.value)


def test_a_forged_header_is_otherwise_valid(forge: Forge) -> None:
    """The other tests here would prove nothing without this one."""
    manifest = decode(forge())
    assert isinstance(manifest, Manifest)
    assert manifest.segment_bytes == 16


@proves("threat T4")
@pytest.mark.parametrize(
    "entries",
    [
        # sizes that no one has
        {"w": entry("U8", [2**62], 0, 2**62)},
        {"w": entry("F32", [2**62], 0, 2**64)},
        {"w": entry("F32", [2**62], 0, 0)},
        {"w": entry("F32", [2**62, 2**62], 0, 0)},
        {"w": entry("F32", [2**32, 2**32], 0, 0)},
        {"w": entry("U8", [2**63 - 1], 0, 2**63 - 1)},
        {"w": entry("U8", [2**63], 0, 2**63)},
        {"w": entry("F32", [10**300], 0, 16)},
        {"w": entry("F32", [0, 2**62, 2**62], 0, 0)},
        {"w": entry("F32", [2**60, 0, 4], 0, 0)},
        # negative ones
        {"w": entry("F32", [-4], 0, 16)},
        {"w": entry("F32", [-2, -2], 0, 16)},
        {"w": entry("F32", [4], -16, 0)},
        {"w": entry("F32", [4], 16, 0)},
        {"w": entry("F32", [4], 0, -16)},
        # the one name that no entry may have
        {"__metadata__": entry()},
        # overlaps, gaps, disorder
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(start=12, stop=28)},
        {"a": entry(), "b": entry(start=20, stop=36)},
        {"b": entry(start=16, stop=32), "a": entry()},
        {"a": entry(start=16, stop=32)},
        {"a": entry(start=64, stop=80), "b": entry(start=0, stop=64)},
        {"a": entry("U8", [0], 1, 1), "b": entry("U8", [1], 1, 2)},
        # shapes that do not fill their bytes
        {"w": entry("F32", [3])},
        {"w": entry("F32", [])},
        {"w": entry("F32", [4, 0])},
        {"w": entry("F64", [4])},
        # dtypes
        {"w": entry("F4", [32])},
        {"w": entry("F8_E8M0", [16])},
        {"w": entry("float32")},
        {"w": entry("C128", [1])},
        {"w": entry("")},
        # alignment
        {"a": entry("U8", [2], 0, 2), "b": entry("F32", [1], 2, 6)},
        # types: a bool is no int, nor are floats and strings
        {"w": entry("U8", [True], 0, 1)},
        {"w": entry("U8", [1], False, 1)},
        {"w": entry("U8", [1], 0, True)},
        {"w": entry("F32", [4.0])},
        {"w": entry("F32", ["4"])},
        {"w": entry("F32", 4)},
        {"w": entry("F32", None)},
        {"w": entry("F32", {"4": 4})},
        {"w": entry(5)},
        {"w": entry(None)},
        {"w": entry() | {"data_offsets": [0]}},
        {"w": entry() | {"data_offsets": [0, 8, 16]}},
        {"w": entry() | {"data_offsets": 16}},
        {"w": entry() | {"extra": 1}},
        {"w": {"dtype": "F32", "shape": [4]}},
        {"w": {}},
        {"w": None},
        {"w": [1]},
        {"w": entry("F32", [1] * 65, 0, 4)},
    ],
    ids=repr,
)
def test_hostile_entries_are_refused(forge: Forge, entries: dict[str, Any]) -> None:
    """Entries tile the segment exactly, or the receiver allocates nothing."""
    with bounded(seconds=1, peak_bytes=MIB), refused_for_its_content():
        decode(forge(entries=entries))


def view(**changes: object) -> list[object]:
    """Return a view of the 16 bytes of the default entry."""
    valid = {
        "storage": 0,
        "dtype": "float32",
        "shape": [2, 2],
        "stride": [2, 1],
        "offset": 0,
        "flags": 0,
    }
    return list((valid | changes).values())


@pytest.mark.parametrize(
    "accepted",
    [
        view(),
        view(flags=1 + 2 + 8 + 16),
        view(stride=[0, 0]),
        view(stride=[0, 0], shape=[2**30, 2**20]),
        view(shape=[], stride=[], offset=3),
        view(shape=[0], stride=[1], offset=4),
        view(shape=[1, 4], stride=[2**62, 1]),
        view(dtype="complex64", shape=[2], stride=[1], flags=4),
        view(dtype="complex128", shape=[1], stride=[1]),
        view(dtype="uint4", shape=[16], stride=[1]),
        view(dtype="uint8", shape=[16], stride=[1], flags=2),
    ],
    ids=repr,
)
def test_a_view_inside_of_its_storage_is_accepted(
    forge: Forge, accepted: object
) -> None:
    """Expanded, overlapping, empty and reinterpreted ones too."""
    assert isinstance(decode(forge(views=[accepted])), Manifest)


@proves("threat T4")
@pytest.mark.parametrize(
    "hostile",
    [
        # escaping strides and offsets
        view(stride=[3, 1]),
        view(stride=[2, 2]),
        view(offset=1),
        view(offset=4),
        view(shape=[5], stride=[1]),
        view(shape=[2], stride=[2**62]),
        view(shape=[2], stride=[2**63 - 1]),
        view(shape=[2, 2], stride=[2**62, 2**62]),
        view(shape=[2**62], stride=[4]),
        view(shape=[2**62, 2**62], stride=[0, 0]),
        view(shape=[2**31, 2**31], stride=[0, 0]),
        view(shape=[0, 2**62, 2**62], stride=[1, 1, 1]),
        view(shape=[0], stride=[1], offset=5),
        view(shape=[0], stride=[1], offset=2**62),
        view(offset=2**63 - 1),
        view(dtype="float64"),
        view(dtype="complex128", shape=[1], stride=[1], offset=1),
        # storages
        view(storage=1),
        view(storage=2**62),
        view(storage=-1),
        # negative and odd numbers
        view(stride=[-2, 1]),
        view(shape=[-2, -2]),
        view(offset=-1),
        view(flags=-1),
        view(flags=32),
        view(flags=2**62),
        view(storage=True),
        view(storage=False),
        view(offset=0.0),
        view(shape=[2], stride=[1, 1]),
        view(shape=[2, 2], stride=[1]),
        view(shape=[1] * 65, stride=[1] * 65),
        # dtypes
        view(dtype="F32"),
        view(dtype="torch.float32"),
        view(dtype=""),
        view(dtype=1),
        # flags that torch would refuse
        view(flags=4),
        view(dtype="int32", flags=1),
        view(dtype="bool", shape=[4], stride=[1], flags=4),
        # arity
        [],
        view()[:-1],
        [*view(), 0],
        {"storage": 0},
    ],
    ids=repr,
)
def test_a_hostile_view_is_refused(forge: Forge, hostile: object) -> None:
    """No view reaches outside of its storage, whatever the numbers overflow to."""
    with bounded(seconds=1, peak_bytes=MIB), refused_for_its_content():
        decode(forge(views=[view(), hostile]))


def test_a_misaligned_view_is_refused(forge: Forge) -> None:
    """An entry of bytes may start anywhere; a float in it may not."""
    entries = {"a": entry("U8", [2], 0, 2), "b": entry("U8", [4], 2, 6)}
    floats = view(storage=1, dtype="float32", shape=[1], stride=[1])
    with pytest.raises(RemoteProtocolError, match="aligned"):
        decode(forge(entries=entries, views=[floats]))


@pytest.mark.parametrize(
    "changes",
    [
        # versions
        {"version": 0},
        {"version": 2},
        {"version": True},
        {"version": "1"},
        {"version": None},
        {"version": 1.0},
        # steps
        {"step": -1},
        {"step": 2**63},
        {"step": True},
        {"step": "7"},
        {"step": None},
        # the chunk grid
        {"chunk_bytes": 0},
        {"chunk_bytes": -64},
        {"chunk_bytes": 65},
        {"chunk_bytes": 2**64},
        {"chunk_bytes": None},
        {"chunk_bytes": True},
        {"algorithm": "crc32"},
        {"algorithm": "XXH3-128"},
        {"algorithm": None},
        # digests
        {"digests": ""},
        {"digests": "ab" * 15},
        {"digests": "ab" * 17},
        {"digests": "ab" * 32},
        {"digests": "AB" * 16},
        {"digests": "zz" * 16},
        {"digests": "é" * 32},
        {"digests": "ab" * 15 + "a\n"},
        {"digests": ["ab" * 16]},
        {"digests": None},
        # counts
        {"count": 0},
        {"count": 2},
        {"count": 10**7},
        {"count": 2**62},
        {"count": -1},
        {"count": True},
        {"count": None},
        {"views": 5},
        {"views": {}},
        {"views": [[]]},
        {"tree": None},
        {"extra": 1},
    ],
    ids=repr,
)
def test_a_hostile_manifest_is_refused(forge: Forge, changes: dict[str, Any]) -> None:
    """Each member has one type and a range, and none may be missing or added."""
    with bounded(seconds=1, peak_bytes=MIB), refused_for_its_content():
        decode(forge(**changes))


def test_small_chunks_of_a_large_segment_are_refused(forge: Forge) -> None:
    """A million digests for a megabyte would cost more than the megabyte."""
    entries = {"w": entry("U8", [1 << 20], 0, 1 << 20)}
    with pytest.raises(RemoteProtocolError, match="less than 65536"):
        decode(forge(entries=entries, chunk_bytes=64, digests="ab" * 16 * (1 << 14)))


def test_a_future_version_is_named(forge: Forge) -> None:
    """The message says what this side knows, whatever else has changed."""
    for changes in ({}, {"new": "member"}, {"digests": 5}):
        with pytest.raises(RemoteProtocolError, match=r"version 2; .*knows version 1"):
            decode(forge(version=2, **changes))


RAW_ENTRY = b'{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    "entries",
    [
        b'{"w":' + RAW_ENTRY + b',"w":' + RAW_ENTRY + b"}",
        b'{"w":' + RAW_ENTRY + b',"\\u0077":' + RAW_ENTRY + b"}",
        b'{"w":{"dtype":"F64",' + RAW_ENTRY[1:] + b"}",
        b'{"w":' + RAW_ENTRY + b',"__metadata__":{}}',
        b'{"w":' + RAW_ENTRY + b',"__metadata__":' + RAW_ENTRY + b"}",
        b'{"w": ' + RAW_ENTRY + b"}",
        b'{"\\u0077":' + RAW_ENTRY + b"}",
        b'{"w":{"shape":[4],"dtype":"F32","data_offsets":[0,16]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16.0]}}',
        b'{"w":{"dtype":"F32","shape":[04],"data_offsets":[0,16]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[-0,16]}}',
        b'{"w":' + RAW_ENTRY + b",}",
        b'{"w":' + RAW_ENTRY,
        b'{"w":' + RAW_ENTRY + b"}}",
        b'{"w":' + RAW_ENTRY + b"}\n",
        b'{"w":' + RAW_ENTRY + b"} x",
        b'{"\xff":' + RAW_ENTRY + b"}",
        b'{"\\ud800":' + RAW_ENTRY + b"}",
        b'{"w":' + b"[" * 100_000,
        b'{"w":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
    ids=lambda text: repr(text[:60]),
)
def test_another_spelling_is_refused(forge: Forge, entries: bytes) -> None:
    """Duplicate keys, white space, escapes: two parsers could read two things."""
    decode(forge(entries=b'{"w":' + RAW_ENTRY + b"}"))
    with pytest.raises(RemoteProtocolError):
        decode(forge(entries=entries))


def test_an_empty_list_of_views_is_left_out(forge: Forge) -> None:
    """One of two ways to say nothing is canonical."""
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode(forge(views=[]))


def manifest_text(**changes: object) -> bytes:
    """Return the manifest of the default entry as JSON."""
    members = {
        "version": 1,
        "step": 7,
        "chunk_bytes": 1 << 16,
        "algorithm": "xxh3-128",
        "digests": "ab" * 16,
        "entries": 1,
        "tree": ["list", []],
    }
    return msgspec.json.encode(members | changes)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"5",
        b"nonsense",
        b" " + manifest_text(),
        manifest_text() + b" ",
        manifest_text().replace(b'"step":7', b'"step":7,"step":7'),
        manifest_text().replace(b'"step":7', b'"step":8,"step":7'),
        manifest_text().replace(b'"step":7', b'"step": 7'),
        manifest_text().replace(b'"step"', b'"\\u0073tep"'),
        manifest_text().replace(b"[]", b"[}"),
        manifest_text().replace(b"[]", b"[" * 50_000 + b"]" * 50_000),
        manifest_text().replace(b"[]", b'["\\ud800"]'),
        manifest_text()[:-1],
    ],
    ids=lambda text: repr(text[:60]),
)
def test_a_manifest_that_is_not_one_is_refused(forge: Forge, text: bytes) -> None:
    """Malformed, nested a 100,000 deep, or spelled in another way."""
    with pytest.raises(ProtocolError):
        decode(forge(manifest=text))


@pytest.mark.parametrize(
    "metadata",
    [
        {"aiockpt": 5},
        {"aiockpt": None},
        {"aiockpt": {}},
        {"format": "np"},
        {"extra": "x"},
        {"extra": 5},
    ],
    ids=repr,
)
def test_other_metadata_is_refused(forge: Forge, metadata: dict[str, Any]) -> None:
    """Nothing travels beside the manifest."""
    with pytest.raises(RemoteProtocolError):
        decode(forge(metadata=metadata))


def test_padding_is_canonical(forge: Forge) -> None:
    """As much as the alignment needs, and only spaces."""
    header = forge()
    more = struct.pack("<Q", len(header) - 8 + 64) + header[8:] + b" " * 64
    for data in (forge(padding=b"\n"), more):
        with pytest.raises(ProtocolError):
            decode(data)


def test_truncation_at_every_byte_is_noticed(manifest: Manifest) -> None:
    """A short read is never taken for a header."""
    for length in range(len(manifest.header)):
        with pytest.raises(RemoteProtocolError):
            decode(manifest.header[:length])


def test_a_truncated_header_with_its_own_length_is_noticed(manifest: Manifest) -> None:
    """Nor if somebody adapts the length."""
    for length in range(8, len(manifest.header)):
        data = struct.pack("<Q", length - 8) + manifest.header[8:length]
        with pytest.raises(ProtocolError):
            decode(data)


def test_trailing_bytes_are_noticed(manifest: Manifest) -> None:
    """The header ends where it says."""
    with pytest.raises(RemoteProtocolError):
        decode(bytes(manifest.header) + b" ")


def test_every_flipped_bit_is_noticed(manifest: Manifest) -> None:
    """No single bit of a header, its length included, can change unnoticed."""
    for position in range(8 * len(manifest.header)):
        data = bytearray(manifest.header)
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(ProtocolError):
            decode(bytes(data))


def test_a_wrong_snapshot_id_is_an_integrity_error(manifest: Manifest) -> None:
    """The error tells both digests, and that it is about the header."""
    place = slice(8 + ID_SLICE.start, 8 + ID_SLICE.stop)
    data = bytearray(manifest.header)
    data[place] = b"0" * 32
    with pytest.raises(IntegrityError, match="header") as caught:
        decode(bytes(data))
    error = caught.value
    facts = (error.chunk, error.expected, error.actual)
    assert facts == (None, "0" * 32, manifest.snapshot_id)


@pytest.mark.parametrize(
    "metadata", [{"aiockpt": "{}"}, {"aiockpt.snapshot": "0" * 32}]
)
def test_a_rewritten_file_is_not_taken_for_foreign(metadata: dict[str, str]) -> None:
    """Another tool kept our metadata; what it says is no longer true."""
    text = msgspec.json.encode({"w": entry(), "__metadata__": metadata})
    with pytest.raises(RemoteProtocolError, match="another tool"):
        decode(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    "document",
    [
        b"[]",
        b"{}x",
        b"nope",
        b'{"w":5}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,17]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}}',
        b'{"w":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"F9","shape":[1],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"F32","shape":[-1,-4],"data_offsets":[0,16]}}',
        b'{"__metadata__":{"a":5}}',
        b'{"__metadata__":[]}',
        b'{"__metadata__":' + b"[" * 100_000,
    ],
    ids=lambda text: repr(text[:60]),
)
def test_a_malformed_foreign_header_is_refused(document: bytes) -> None:
    """Foreign is not the same as unchecked."""
    with pytest.raises(RemoteProtocolError):
        decode(struct.pack("<Q", len(document)) + document)


@given(st.binary(max_size=300))
def test_any_bytes_are_foreign_or_a_typed_error(junk: bytes) -> None:
    """Bare, with a fitting length, and behind our prefix."""
    for text in (junk, PREFIX + junk):
        for data in (text, struct.pack("<Q", len(text)) + text):
            with suppress(ProtocolError):
                assert isinstance(decode(data), ForeignHeader)


def test_tensors_are_limited(forge: Forge) -> None:
    """Entries and views count alike."""
    header = forge(views=[view(), view()])
    decode(header, replace(LIMITS, max_tensors=3))
    with pytest.raises(LimitExceededError) as caught:
        decode(header, replace(LIMITS, max_tensors=2))
    assert (caught.value.limit, caught.value.actual) == (2, 3)


def test_the_segment_is_limited(forge: Forge) -> None:
    """A receiver that knows its memory refuses before it allocates."""
    decode(forge(), replace(LIMITS, max_bytes=16))
    with pytest.raises(LimitExceededError) as caught:
        decode(forge(), replace(LIMITS, max_bytes=15))
    assert (caught.value.limit, caught.value.actual) == (15, 16)


def test_nodes_are_limited(forge: Forge) -> None:
    """Before a single node is made."""
    decode(forge(tree=["list", [0] * 90]), replace(LIMITS, max_nodes=100))
    with pytest.raises(LimitExceededError, match="nodes"):
        decode(forge(tree=["list", [0] * 110]), replace(LIMITS, max_nodes=100))


SMALL = Limits(max_nodes=100_000, max_tensors=1_000)


@proves("threat D1")
@pytest.mark.parametrize(
    "hostile",
    [
        {"tree": ["list", [[]] * 10_000_000]},
        {"tree": ["list", [0] * 10_000_000]},
        {"views": [[]] * 10_000_000},
        {"entries": {"w": entry("F32", [1] * 10_000_000)}},
        {"metadata": {"extra": [[]] * 10_000_000}},
    ],
    ids=["nodes", "numbers", "views", "dimensions", "metadata"],
)
def test_ten_million_values_are_refused_unseen(forge: Forge, hostile: Any) -> None:
    """The memory is that of a copy of the header, not that of its values."""
    header = forge(**hostile)
    hostile.clear()
    with (
        bounded(seconds=5, peak_bytes=2 * len(header) + MIB),
        pytest.raises(LimitExceededError, match="values"),
    ):
        decode(header, SMALL)


def test_a_foreign_header_of_many_values_is_refused_unseen() -> None:
    """The limits hold for every file."""
    text = b'{"w":[' + b"[]," * 5_000_000 + b"[]]}"
    header = struct.pack("<Q", len(text)) + text
    with (
        bounded(seconds=5, peak_bytes=2 * len(header) + MIB),
        pytest.raises(LimitExceededError, match="values"),
    ):
        decode(header, SMALL)


@proves("invariant 3")
def test_a_claimed_length_allocates_nothing() -> None:
    """Eight bytes can claim anything."""
    for length in (2**30, 2**62, 2**64 - 1):
        with bounded(seconds=1, peak_bytes=MIB), pytest.raises(ProtocolError):
            decode(struct.pack("<Q", length) + b"{}")


def test_a_hundred_thousand_entries_are_fast(forge: Forge) -> None:
    """0.13 s on two slow cores; this notices five times as much."""
    entries = {
        f"layers.{i}.weight": entry("F32", [32, 32], 4096 * i, 4096 * (i + 1))
        for i in range(100_000)
    }
    header = forge(entries=entries)
    times = []
    for _ in range(3):
        start = time.process_time()  # what other processes take does not count
        decode(header)
        times.append(time.process_time() - start)
    assert min(times) < 0.7
