"""Values of the standard library travel as they are, and only in one encoding."""

# ruff: noqa: DTZ001 - times without a zone travel, too

from __future__ import annotations

import enum
import time
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.errors import RemoteProtocolError, UnsupportedLeafError
from aiockpt.format.registry import REGISTRY, Registry
from aiockpt.format.standard import MAX_DECIMAL_TEXT
from aiockpt.format.tree import decode_tree, encode_tree
from aiockpt.testing import assert_same

if TYPE_CHECKING:
    from aiockpt.format.paths import Node

ZONES = st.none() | st.builds(
    timezone,
    st.timedeltas(timedelta(hours=-23), timedelta(hours=23)),
    *([st.text(max_size=5)] * 1),
)
NAMES = st.text(st.characters(blacklist_characters="\0"), max_size=8)
VALUES = (
    st.datetimes(timezones=ZONES, allow_imaginary=True)
    | st.builds(
        lambda when, fold: when.replace(fold=fold), st.datetimes(), st.integers(0, 1)
    )
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
    | st.builds(PurePosixPath, NAMES, NAMES)
    | st.builds(PureWindowsPath, NAMES, NAMES)
    | st.builds(Path, NAMES)
)
EXAMPLES = [
    datetime(2026, 11, 27, 16, 45, 1, 5, tzinfo=UTC),
    datetime(2026, 10, 25, 2, 30, fold=1),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-5, microseconds=1), "EST")),
    date.max, date.min, timedelta.max, timedelta.min,
    UUID(int=3, is_safe=SafeUUID.safe), UUID(int=2**128 - 1, is_safe=SafeUUID.unsafe),
    Decimal("NaN"), Decimal("-sNaN12"), Decimal("-Infinity"), Decimal("-0E+7"),
    Decimal("1E+999999999999999999"), Decimal("1E-1999999999999999997"),
    Decimal("0.1000"), Decimal("1" * MAX_DECIMAL_TEXT),
    Path("runs/1"), Path(), PurePosixPath("//a//b/../c/"), Path("a\udcff"),
    PureWindowsPath("C:/runs/1"), PureWindowsPath("//host/share/x"),
]  # fmt: skip


def encode(value: object) -> Node:
    """Encode a value without tensors."""
    return encode_tree(
        value, registry=REGISTRY, leaf=lambda leaf, path: None, limits=Limits()
    )


def decode(node: Node) -> Any:
    """Decode a node that travelled as JSON."""
    node = msgspec.json.decode(msgspec.json.encode(node))
    return decode_tree(node, registry=REGISTRY, tensors=(), limits=Limits())


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: repr(value)[:50])
def test_each_value_comes_back(value: object) -> None:
    """The fold, the offset, the flavour and all digits survive."""
    assert_same(decode(encode({"a": [value]})), {"a": [value]})


@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    """It is a key, too, unless it cannot be one."""
    back = decode(encode([value]))[0]
    assert_same(back, value)
    if not (isinstance(value, Decimal) and value.is_nan()):
        assert_same(decode(encode({value: 1})), {value: 1})


def test_the_encoding_is_no_matter_of_the_context() -> None:
    """Equal checkpoints are equal byte by byte."""
    with localcontext() as context:
        context.capitals, context.prec = 0, 3
        node = encode(Decimal("1.2345E+50"))
        assert node == ["ext", "decimal.Decimal", "1.2345E+50"]
        assert_same(decode(node), Decimal("1.2345E+50"))


class Stamp(datetime):
    """A subclass with more than its base, like a timestamp of pandas."""


class Place(type(Path())):  # type: ignore[misc]
    """A path of one's own."""


class Day(date, enum.Enum):
    """An enum over a type that travels."""

    FIRST = 2026, 1, 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Stamp(2026, 1, 1), "Stamp"),
        (Place("a"), "Place"),
        (Day.FIRST, "Day"),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), "datetime with a zoneinfo.Zone"),
        (Decimal("1" * (MAX_DECIMAL_TEXT + 1)), "Decimal of 4097 characters"),
    ],
    ids=["datetime", "path", "enum", "zone", "digits"],
)
def test_what_would_be_changed_is_refused(value: object, kind: str) -> None:
    """The error names its path; a subclass is no value of its base."""
    with pytest.raises(UnsupportedLeafError, match=kind) as caught:
        encode({"config": [value]})
    assert caught.value.path == "config[0]"


HUGE: Node = ["int", "f" * 200_000]
HOSTILE: dict[str, list[Node]] = {
    "datetime.datetime": [
        ["tuple", [2026, 13, 1, 0, 0, 0, 0, 0, None]],
        ["tuple", [2026, 2, 30, 0, 0, 0, 0, 0, None]],
        ["tuple", [2026, 1, 1, 0, 0, 0, 0, 2, None]],
        ["tuple", [HUGE, 1, 1, 0, 0, 0, 0, 0, None]],
        ["tuple", [True, 1, 1, 0, 0, 0, 0, 0, None]],
        ["tuple", [2026, 1, 1, 0, 0, 0, 0, 0, "Europe/Berlin"]],
        ["tuple", [2026, 1, 1, 0, 0, 0, 0, 0, ["tuple", [1, 0, 0]]]],
        ["tuple", [2026, 1, 1, 0, 0, 0, 0, 0, ["tuple", [0, 0, 0, "a", "b"]]]],
        ["tuple", []], "2026-01-01", ["list", [2026, 1, 1, 0, 0, 0, 0, 0, None]],
    ],
    "datetime.date": [["tuple", [2026, 1]], ["tuple", [0, 1, 1]], 5],
    "datetime.timedelta": [
        ["tuple", [HUGE, 0, 0]], ["tuple", [0, 86_400, 0]], ["tuple", [0, -1, 0]],
        ["tuple", [1.5, 0, 0]], None,
    ],
    "decimal.Decimal": [
        "1" * (MAX_DECIMAL_TEXT + 1), "1_000", " 1", "1e5", "+1", "٣", "01", "",
        "1E+9" + "9" * 30, "nan", 1, HUGE, "1" * 500_000,
    ],
    "uuid.UUID": [
        "0" * 36, ["tuple", ["{" + "0" * 34 + "}", None]], ["tuple", ["0" * 32, None]],
        ["tuple", [str(UUID(int=10)).upper(), None]], ["tuple", [str(UUID(int=0)), 7]],
        ["tuple", [str(UUID(int=0)), False]],
        ["tuple", [str(UUID(int=0)), HUGE]],
    ],
    "pathlib.PurePosixPath": ["a//b", "", "a/", "./a", 5, ["list", ["a"]]],
    "pathlib.PureWindowsPath": ["a/b", ""],
    "pathlib.PosixPath": ["a/./b", ["bytes", "YQ=="]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "payload"),
    [(tag, payload) for tag, payloads in HOSTILE.items() for payload in payloads],
    ids=lambda value: repr(value)[:40],
)
def test_another_encoding_is_refused(tag: str, payload: Node) -> None:
    """The cost does not depend on its claims, and the error omits its text."""
    began = time.process_time()
    with pytest.raises(
        RemoteProtocolError, match=r"the decoder of '.*' refused a"
    ) as caught:
        decode(["dict", ["a"], [["ext", tag, payload]]])
    assert len(str(caught.value)) < 400
    assert time.process_time() - began < 5


def test_a_flavour_of_another_system_is_refused_by_name() -> None:
    """A concrete path exists only where its files are."""
    with pytest.raises(RemoteProtocolError, match=r"pathlib\.WindowsPath"):
        decode(["ext", "pathlib.WindowsPath", "a"])


@pytest.mark.parametrize("shape", ["plain", "tuple", "set", "counter"])
def test_keys_that_take_minutes_to_compare_are_refused(shape: str) -> None:
    """A Decimal and a large int of the same hash, in whatever key they are."""
    modulus = 2**61 - 1
    huge = 2**4_000_000 + 12345
    pair: list[Node] = [
        ["int", f"{huge:x}"],
        ["ext", "decimal.Decimal", str(Decimal(huge % modulus))],
    ]
    if shape == "tuple":
        pair = [["tuple", [each]] for each in pair]
    table: Node = ["set", pair] if shape == "set" else ["dict", pair, [1, 1]]
    if shape == "counter":
        table = ["ext", "Counter", table]
    with pytest.raises(RemoteProtocolError, match="a Decimal and an int of many"):
        decode(table)
    # Beside each other, and not among the keys of one dict, they are welcome.
    assert decode(["list", pair])[0]


def test_a_user_may_choose_another_encoding() -> None:
    """What was written with ours is read nevertheless."""
    known = Registry()
    known.register("datetime.date", date, str, date.fromisoformat, is_default=True)
    known.register("day", date, lambda day: day.toordinal(), date.fromordinal)
    day = date(2026, 1, 2)
    node = encode_tree(day, registry=known, leaf=lambda *_: None, limits=Limits())
    assert node == ["ext", "day", day.toordinal()]
    old: Node = ["ext", "datetime.date", "2026-01-02"]
    for each in (node, old):
        found = decode_tree(each, registry=known, tensors=(), limits=Limits())
        assert found == day
    with pytest.raises(ValueError, match="is registered as 'day'"):
        known.register("other", date, str, date.fromisoformat)


def test_bases_do_not_stand_for_each_other() -> None:
    """A PurePath is no Path, and a date no datetime."""
    for value in (PurePath("a"), Path("a"), date(2026, 1, 1), datetime(2026, 1, 1)):
        assert type(decode(encode(value))) is type(value)
