"""No header from a peer crashes, hangs or fills the memory of a receiver.

The forged headers have the right snapshot id, so the check that a case is about is
what refuses them.
"""

from __future__ import annotations

import time
import tracemalloc
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.errors import (
    IntegrityError,
    LimitExceededError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.format.header import CHECK_SLICE, PREFIX, decode_header
from aiockpt.format.manifest import ForeignHeader, Manifest
from tests.support.headers import forged, forged_manifest, prefixed
from tests.support.proofs import proves

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = Limits()
MIB = 1 << 20
Facts = dict[str, Any]


def entry(
    dtype: object = "F32", shape: object = (4,), start: object = 0, stop: object = 16
) -> Facts:
    """Return an entry; the default one is valid."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def one(*given: Any, **changes: Any) -> Facts:
    """Return the case of one entry."""
    return {"entries": {"w": entry(*given) | changes}}


def view(**changes: object) -> list[object]:
    """Return a view of the 16 bytes of the default entry."""
    valid = {"storage": 0, "dtype": "float32", "shape": [2, 2], "stride": [2, 1]}
    return list((valid | {"offset": 0, "flags": 0} | changes).values())


def views(**changes: object) -> Facts:
    """Return the case of a valid view and a changed one."""
    return {"views": [view(), view(**changes)]}


def shown(case: object) -> str:
    """Return the name of a case."""
    return repr(case)[:90]


def decode(header: bytes, limits: Limits = LIMITS) -> Manifest | ForeignHeader:
    """Decode a header."""
    return decode_header(header, limits=limits)


@contextmanager
def bounded(peak_bytes: int = MIB, seconds: float = 5) -> Iterator[None]:
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


ENTRIES: list[Facts] = [
    # sizes that no tensor has
    *(one("U8", [2**62], 0, 2**62), one("F32", [2**62], 0, 2**64)),
    *(one("F32", [2**62, 2**62], 0, 0), one("F32", [2**32, 2**32], 0, 0)),
    *(one("U8", [2**63], 0, 2**63), one("F32", [10**300])),
    *(one("F32", [0, 2**62, 2**62], 0, 0), one("F32", [2**60, 0, 4], 0, 0)),
    # negative numbers
    *(one("F32", [-4]), one("F32", [-2, -2]), one("F32", [4], -16, 0)),
    *(one("F32", [4], 16, 0), one("F32", [4], 0, -16)),
    # a reserved name, overlaps, gaps, disorder
    {"entries": {"__metadata__": entry()}},
    {"entries": {"a": entry(), "b": entry(start=12, stop=28)}},
    {"entries": {"a": entry(), "b": entry(start=20, stop=36)}},
    {"entries": {"b": entry(start=16, stop=32), "a": entry()}},
    one("F32", [4], 16, 32),
    {"entries": {"a": entry("U8", [0], 1, 1), "b": entry("U8", [1], 1, 2)}},
    # shapes that do not fill their bytes
    *(one("F32", [3]), one("F32", []), one("F32", [4, 0]), one("F64", [4])),
    # dtypes, and one that is not aligned
    *(one("F4", [32]), one("F8_E8M0", [16]), one("float32"), one("C128", [1])),
    {"entries": {"a": entry("U8", [2], 0, 2), "b": entry("F32", [1], 2, 6)}},
    # types: a bool is no integer, nor are floats and strings
    *(one("U8", [True], 0, 1), one("U8", [1], False, 1), one("U8", [1], 0, True)),
    *(one("F32", [4.0]), one("F32", ["4"]), one("F32", 4), one("F32", None)),
    *(one("F32", {"4": 4}), one(5), one(data_offsets=[0])),
    *(one(data_offsets=[0, 8, 16]), one(data_offsets=16), one(extra=1)),
    *({"entries": {"w": {"dtype": "F32", "shape": [4]}}}, {"entries": {"w": None}}),
    *({"entries": {"w": [1]}}, one("F32", [1] * 65, 0, 4)),
    # more digests than bytes
    one("U8", [1 << 17], 0, 1 << 17)
    | {"chunk_bytes": 64, "digests": "ab" * 16 * (1 << 11)},
]
VIEWS: list[Facts] = [
    # strides and offsets that leave the storage
    *(views(stride=[3, 1]), views(offset=1), views(shape=[5], stride=[1])),
    *(views(shape=[2], stride=[2**63 - 1]), views(shape=[2, 2], stride=[2**62, 2**62])),
    *(views(shape=[2**62], stride=[4]), views(shape=[2**62, 2**62], stride=[0, 0])),
    views(shape=[2**31, 2**31], stride=[0, 0]),
    views(shape=[0, 2**62, 2**62], stride=[1, 1, 1]),
    *(views(shape=[0], stride=[1], offset=5), views(offset=2**63 - 1)),
    views(dtype="float64"),
    views(dtype="complex128", shape=[1], stride=[1], offset=1),
    # storages, negative and odd numbers
    *(views(storage=1), views(storage=-1), views(stride=[-2, 1])),
    *(views(shape=[-2, -2]), views(offset=-1), views(flags=-1), views(flags=32)),
    *(views(storage=True), views(offset=0.0), views(shape=[2], stride=[1, 1])),
    *(views(shape=[2, 2], stride=[1]), views(shape=[1] * 65, stride=[1] * 65)),
    # dtypes, and flags that torch would refuse
    *(views(dtype="F32"), views(dtype="torch.float32"), views(dtype=1), views(flags=4)),
    views(dtype="int32", flags=1),
    views(dtype="bool", shape=[4], stride=[1], flags=4),
    # the wrong number of members, and memory that no float can begin at
    *({"views": [[]]}, {"views": [view()[:-1]]}, {"views": [[*view(), 0]]}),
    {"views": [{"storage": 0}]},
    {
        "entries": {"a": entry("U8", [2], 0, 2), "b": entry("U8", [4], 2, 6)},
        "views": [view(storage=1, shape=[1], stride=[1])],
    },
]
WRONG: dict[str, tuple[Any, ...]] = {
    "version": (0, 2, True, "1", None, 1.0),
    "step": (-1, 2**63, True, "7", None),
    "chunk_bytes": (0, -64, 65, 2**64, None, True),
    "algorithm": ("crc32", "XXH3-128", None),
    "digests": ("", "ab" * 15, "ab" * 17, "ab" * 32, "AB" * 16, "zz" * 16, "é" * 32),
    "count": (0, 2, 2**62, -1, True, None),
    "views": (5, {}),
    "tree": (None,),
    "extra": (1,),
}
MEMBERS: list[Facts] = [
    *({name: each} for name, given in WRONG.items() for each in given),
    *({"digests": each} for each in ("ab" * 15 + "a\n", ["ab" * 16], None)),
]


@proves("threat T4")
@pytest.mark.parametrize("hostile", [*ENTRIES, *VIEWS, *MEMBERS], ids=shown)
def test_hostile_content_is_refused(hostile: Facts) -> None:
    """Entries tile the segment, views stay inside of it, and members have ranges."""
    assert isinstance(decode(forged()), Manifest)
    with bounded(), pytest.raises(RemoteProtocolError) as caught:
        decode(forged(**hostile))
    assert "canonical" not in str(caught.value)


@pytest.mark.parametrize(
    "accepted",
    [
        view(flags=1 + 2 + 8 + 16),
        view(stride=[0, 0], shape=[2**30, 2**20]),
        view(shape=[], stride=[], offset=3),
        view(shape=[0], stride=[1], offset=4),
        view(shape=[1, 4], stride=[2**62, 1]),
        view(dtype="complex64", shape=[2], stride=[1], flags=4),
        view(dtype="uint4", shape=[16], stride=[1]),
        view(dtype="uint8", shape=[16], stride=[1], flags=2),
    ],
    ids=repr,
)
def test_a_view_inside_of_its_storage_is_accepted(accepted: object) -> None:
    """Expanded, empty and reinterpreted views are valid, too."""
    assert isinstance(decode(forged(views=[accepted])), Manifest)


def test_a_future_version_is_named() -> None:
    """The message says what this side knows, whatever else has changed."""
    for changes in ({}, {"new": "member"}, {"digests": 5}):
        with pytest.raises(RemoteProtocolError, match=r"version 2; .*knows version 1"):
            decode(forged(version=2, **changes))


RAW = b'{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
_NOT_TEXT: tuple[Any, ...] = (5, None, {})
TEXT = msgspec.json.encode(
    {key: value for key, value in forged_manifest({"w": entry()}).items() if value}
)


@pytest.mark.parametrize(
    "spelling",
    [
        *(
            {"entries": b'{"w":' + text}
            for text in (
                RAW + b',"w":' + RAW + b"}",
                RAW + b',"\\u0077":' + RAW + b"}",
                b'{"dtype":"F64",' + RAW[1:] + b"}",
                RAW + b',"__metadata__":' + RAW + b"}",
                b" " + RAW + b"}",
                b'{"shape":[4],"dtype":"F32","data_offsets":[0,16]}}',
                RAW.replace(b"16", b"16.0") + b"}",
                RAW.replace(b"[4]", b"[04]") + b"}",
                RAW.replace(b"[0", b"[-0") + b"}",
                RAW + b",}",
                RAW,
                RAW + b"}}",
                RAW + b"}\n",
                b"[" * 100_000,
                b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
            )
        ),
        *({"entries": b"{" + key + RAW + b"}"} for key in (b'"\\u0077":', b'"\xff":')),
        *({"manifest": text} for text in (b"", b"{}", b"[]", b"nonsense")),
        *({"manifest": text} for text in (b" " + TEXT, TEXT + b" ", TEXT[:-1])),
        *(
            {"manifest": TEXT.replace(b'"step":7', text)}
            for text in (b'"step":7,"step":7', b'"step": 7', b'"\\u0073tep":7')
        ),
        *(
            {"manifest": TEXT.replace(b"[]", text)}
            for text in (b"[}", b"[" * 50_000 + b"]" * 50_000, b'["\\ud800"]')
        ),
        *({"metadata": {"aiockpt": each}} for each in _NOT_TEXT),
        *({"metadata": given} for given in ({"format": "np"}, {"extra": "x"})),
        {"views": []},
        {"padding": b"\n"},
    ],
    ids=shown,
)
def test_another_spelling_is_refused(spelling: Facts) -> None:
    """Two parsers could read two things from duplicate keys, spaces or escapes."""
    assert isinstance(decode(forged(manifest=TEXT)), Manifest)
    with pytest.raises(ProtocolError):
        decode(forged(**spelling))


def test_every_cut_and_every_flipped_bit_is_noticed() -> None:
    """They are noticed also if the length is adapted, or if bytes are added."""
    header = forged(views=[view()], tree=["dict", ["layer"], [["tensor", 0]]])
    damaged = [header + b" ", prefixed(header[8:] + b" " * 64)]
    damaged += [header[:length] for length in range(len(header))]
    damaged += [prefixed(header[8:length]) for length in range(8, len(header))]
    for position in range(8 * len(header)):
        data = bytearray(header)
        data[position // 8] ^= 1 << position % 8
        damaged.append(bytes(data))
    for each in damaged:
        with pytest.raises(ProtocolError):
            decode(each)


def test_a_wrong_snapshot_id_is_an_integrity_error() -> None:
    """The error has both digests, and says that it is about the header."""
    header = bytearray(forged())
    place = slice(8 + CHECK_SLICE.start, 8 + CHECK_SLICE.stop)
    right = header[place].decode()
    header[place] = b"0" * 32
    with pytest.raises(IntegrityError, match="header") as caught:
        decode(bytes(header))
    error = caught.value
    facts = (error.chunk, error.expected, error.actual)
    assert facts == (None, "0" * 32, right)


@pytest.mark.parametrize(
    "document",
    [
        *(b"[]", b"{}x", b"nope", b'{"w":5}'),
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,17]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}}',
        b'{"w":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"F9","shape":[1],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"F32","shape":[-1,-4],"data_offsets":[0,16]}}',
        *(b'{"__metadata__":{"a":5}}', b'{"__metadata__":[]}'),
        b'{"__metadata__":' + b"[" * 100_000,
        # written again by another tool, so that what our metadata says is not true
        b'{"w":' + RAW + b',"__metadata__":{"aiockpt":"{}"}}',
        b'{"w":' + RAW + b',"__metadata__":{"aiockpt.snapshot":"00"}}',
    ],
    ids=shown,
)
def test_a_malformed_foreign_header_is_refused(document: bytes) -> None:
    """The headers of other tools are checked as well."""
    with pytest.raises(RemoteProtocolError):
        decode(prefixed(document))


@given(st.binary(max_size=300))
def test_any_bytes_are_foreign_or_a_typed_error(junk: bytes) -> None:
    """Bare, with a fitting length, and behind our prefix."""
    for text in (junk, PREFIX + junk):
        for data in (text, prefixed(text)):
            with suppress(ProtocolError):
                assert isinstance(decode(data), ForeignHeader)


@pytest.mark.parametrize(
    ("header", "name", "most"),
    [
        (forged(views=[view(), view()]), "max_tensors", 3),
        (forged(), "max_bytes", 16),
        (forged(tree=["list", [0] * 90]), "max_nodes", 120),
    ],
)
def test_limits_are_for_the_whole_header(header: bytes, name: str, most: int) -> None:
    """A receiver that knows its memory refuses before it allocates."""
    limit: Facts = {name: most}
    decode(header, replace(LIMITS, **limit))
    limit[name] = most - 1 if name != "max_nodes" else 80
    with pytest.raises(LimitExceededError) as caught:
        decode(header, replace(LIMITS, **limit))
    assert caught.value.limit == limit[name]


@proves("threat D1")
@pytest.mark.parametrize(
    "hostile",
    [
        {"tree": ["list", [[]] * 1_000_000]},
        {"tree": ["list", [0] * 1_000_000]},
        {"views": [[]] * 1_000_000},
        {"entries": {"w": entry("F32", [1] * 1_000_000)}},
        {"metadata": {"extra": [[]] * 1_000_000}},
        None,
    ],
    ids=["nodes", "numbers", "views", "dimensions", "metadata", "foreign"],
)
def test_a_million_values_are_refused_unseen(hostile: Any) -> None:
    """The memory is that of a copy of the header, not that of its values."""
    if hostile is None:
        header = prefixed(b'{"w":[' + b"[]," * 1_000_000 + b"[]]}")
    else:
        header = forged(**hostile)
    limits = Limits(max_nodes=100_000, max_tensors=1_000)
    with (
        bounded(2 * len(header) + MIB),
        pytest.raises(LimitExceededError, match="values"),
    ):
        decode(header, limits)


@proves("invariant 3")
def test_a_claimed_length_allocates_nothing() -> None:
    """Eight bytes can claim anything."""
    for length in (2**30, 2**62, 2**64 - 1):
        with bounded(), pytest.raises(ProtocolError):
            decode(length.to_bytes(8, "little") + b"{}")
