"""Leaves of the standard library, such as a scheduler's milestones or a run's paths.

Each type has one encoding for each value, and a decoder refuses all others. So equal
checkpoints stay equal byte by byte. These are the payloads by tag:

* ``datetime.timedelta``: a tuple of days, seconds (below 86,400) and microseconds.
* ``datetime.date``: a tuple of year, month and day.
* ``datetime.datetime``: a tuple of year, month, day, hour, minute, second, microsecond,
  ``fold`` and the zone. That is None, or a tuple of the offset's days, seconds and
  microseconds, with the zone's name as a fourth item if it has one. No zone is looked
  up by its name.
* ``decimal.Decimal``: its text as Python's ``str`` writes it, with a capital ``E``; at
  most 4,096 characters. The keys of one dict, or the items of one set, may not hold
  both a Decimal and an int of more than 1,000 hexadecimal digits.
* ``uuid.UUID``: a tuple of its text in lower case and of ``is_safe`` (0, -1 or None).
* ``pathlib.PurePosixPath``, ``pathlib.PureWindowsPath``, ``pathlib.PosixPath``,
  ``pathlib.WindowsPath``: the text of the path, normalized as Python does. A reader
  does not know the last two of the other kind of system.

A decoder is called with what a peer sent: its cost is proportional to what travelled.

A user who registers one of these types takes the user's own functions from then on.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar
from uuid import UUID, SafeUUID

from aiockpt.errors import UnsupportedLeafError
from aiockpt.format.registry import REGISTRY, exactly

T = TypeVar("T")

MAX_DECIMAL_TEXT: Final = 4096
"""A Decimal of more characters does not travel: computing with it takes too long."""

_DECIMAL: Final = re.compile(
    r"-?([0-9]+(\.[0-9]+)?(E[+-][0-9]{1,19})?|Infinity|s?NaN[0-9]*)"
)


def _register(
    leaf_type: type[T], tag: str, encode: Callable[[T], object], decode: Any
) -> None:
    REGISTRY.register(tag, leaf_type, encode, decode, is_default=True)


def _numbers(payload: Any, *ranges: range) -> tuple[int, ...]:
    """Return the numbers of a payload, if each is an int of its range."""
    found = exactly(tuple, payload)
    for number, allowed in zip(found, ranges, strict=True):
        if exactly(int, number) not in allowed:
            raise ValueError("a number out of its range")
    return found


_SPAN: Final = (
    range(-999_999_999, 1_000_000_000),
    range(86_400),
    range(1_000_000),
)


def _of_timedelta(value: timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


def _timedelta(payload: Any) -> timedelta:
    return timedelta(*_numbers(payload, *_SPAN))


_DAY: Final = (range(1, 10_000), range(1, 13), range(1, 32))
_TIME: Final = (range(24), range(60), range(60), range(1_000_000), range(2))


def _of_date(value: date) -> tuple[int, int, int]:
    return value.year, value.month, value.day


def _date(payload: Any) -> date:
    return date(*_numbers(payload, *_DAY))


def _of_datetime(value: datetime) -> tuple[object, ...]:
    clock = value.hour, value.minute, value.second, value.microsecond, value.fold
    return (*_of_date(value), *clock, _of_zone(value))


def _of_zone(value: datetime) -> tuple[object, ...] | None:
    if (zone := value.tzinfo) is None:
        return None
    if type(zone) is not timezone:
        kind = f"datetime with a {type(zone).__module__}.{type(zone).__qualname__}"
        remedy = (
            "only fixed offsets travel: convert it, for example with "
            "astimezone(datetime.timezone.utc)"
        )
        raise UnsupportedLeafError("", kind, remedy)
    # With a name of its own if it was given one, as `pickle` asks for it.
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return (*_of_timedelta(offset), *name)


def _datetime(payload: Any) -> datetime:
    *numbers, zone = exactly(tuple, payload)
    *when, fold = _numbers(tuple(numbers), *_DAY, *_TIME)
    return datetime(*when, tzinfo=_zone(zone), fold=fold)  # type: ignore[misc, arg-type]


def _zone(payload: Any) -> timezone | None:
    if payload is None:
        return None
    offset = _timedelta(exactly(tuple, payload)[:3])
    return timezone(offset, *(exactly(str, name) for name in payload[3:]))


def _of_decimal(value: Decimal) -> str:
    text = str(value).replace("e", "E")  # the context may ask for small letters
    if len(text) > MAX_DECIMAL_TEXT:
        kind = f"Decimal of {len(text)} characters"
        remedy = f"at most {MAX_DECIMAL_TEXT} travel: round it, or put its text there"
        raise UnsupportedLeafError("", kind, remedy)
    return text


def _decimal(payload: Any) -> Decimal:
    text = exactly(str, payload)
    if len(text) > MAX_DECIMAL_TEXT:
        raise ValueError(f"a Decimal of more than {MAX_DECIMAL_TEXT} characters")
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError("not the text of a Decimal")
    return _as_encoded(Decimal(text), _of_decimal, text)


def _of_uuid(value: UUID) -> tuple[str, int | None]:
    return str(value), value.is_safe.value


def _uuid(payload: Any) -> UUID:
    text, safe = exactly(tuple, payload)
    if len(exactly(str, text)) != len(str(UUID(int=0))):
        raise ValueError("not the text of a UUID")
    if safe is not None:
        exactly(int, safe)
    return _as_encoded(UUID(text, is_safe=SafeUUID(safe)), _of_uuid, payload)


def _path_of(kind: Callable[[str], PurePath]) -> Callable[[Any], PurePath]:
    def decode(payload: Any) -> PurePath:
        return _as_encoded(kind(exactly(str, payload)), str, payload)

    return decode


def _as_encoded(value: T, encode: Callable[[T], object], payload: object) -> T:
    """Return a decoded value if its encoding is what was decoded."""
    if encode(value) != payload:
        raise ValueError("not the encoding that a writer chooses")
    return value


# A Counter would count the items of anything else, and a range has 2**63 of them;
# bytearray(2**40) would allocate what a peer claims.
_register(Counter, "Counter", dict, lambda counts: Counter(exactly(dict, counts)))
_register(bytearray, "bytearray", bytes, lambda found: bytearray(exactly(bytes, found)))
_register(
    range, "range", lambda r: (r.start, r.stop, r.step), lambda bounds: range(*bounds)
)
_register(timedelta, "datetime.timedelta", _of_timedelta, _timedelta)
_register(date, "datetime.date", _of_date, _date)
_register(datetime, "datetime.datetime", _of_datetime, _datetime)
_register(Decimal, "decimal.Decimal", _of_decimal, _decimal)
_register(UUID, "uuid.UUID", _of_uuid, _uuid)
# A Path of the other kind of system exists only there.
for _kind in (PurePosixPath, PureWindowsPath, type(pathlib.Path())):
    _register(_kind, f"pathlib.{_kind.__name__}", str, _path_of(_kind))
