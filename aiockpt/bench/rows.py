"""The table: what was reached, beside what it is compared with and what is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiockpt.bench.footprint import Footprint
from aiockpt.bench.memory import FRESH, TOUCHED
from aiockpt.bench.shapes import MANY, Shape
from aiockpt.bench.statistics import Series, best, percentile

__all__ = [
    "BESIDE",
    "COPIED",
    "COPY_DIGESTED",
    "MAX_LAG",
    "MAX_LAG_PG",
    "RAW_DIGESTED",
    "SHARED",
    "Row",
    "rows_of_cost",
    "rows_of_footprint",
    "rows_of_group",
    "rows_of_many",
    "rows_of_same_host",
    "rows_of_speed",
    "rows_of_ticker",
]

_TIMES_TORCHFT = 3.0
_TIMES_TORCHFT_MANY = 30.0
_TIMES_TORCHFT_PG = {False: 2.0, True: 8.0}  # of many small tensors?
_TIMES_TORCHFT_PG_PLACED = {False: 0.9, True: 8.0}
_TIMES_TORCH = 1.0
_OF_RAW_FRESH, _OF_RAW_PLACED = 0.9, 0.75
_OF_MEMCPY_NEW = 0.6
_OF_MEMCPY_USED = 0.85
_FRESH, _PLACED = "receive into fresh memory", "receive in place"
SHARED, COPIED = "aiockpt, same host, shared", "aiockpt, same host, in place"
BESIDE = "memcpy beside them"
"""Names of what is measured together: memory that is lent, and a copy of as much."""

RAW_DIGESTED = "raw socket and digests, touched"
COPY_DIGESTED = "memcpy and digests, touched"
"""Names of what copies, and computes digests of it, and does nothing else."""

MAX_LAG, MAX_LAG_PG = 5.0, 20.0  # ms
_TIMES_RAW_CPU = 1.1
_MAX_MANY = 0.35  # s
_MAX_SHARED = 50.0  # ms
_OF_MEMCPY_IN_PLACE = 0.7
_MAX_FRESH = 5.0  # percent of the state dict
_MAX_IN_PLACE = 64.0  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        what: What was measured.
        shape: Of what.
        value: The median.
        unit: Its unit.
        reference: What it is compared with, if anything.
        reference_value: In the same unit.
        at_least: What the ratio should reach, if anything.
        at_most: What the value should not exceed, if anything.
        ratio_at_most: What the ratio should not exceed, if anything.
    """

    what: str
    shape: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    ratio_at_most: float | None = None

    @property
    def ratio(self) -> float | None:
        """The value by the reference's; None where less is better."""
        if self.at_most is not None or not self.reference_value:
            return None
        return self.value / self.reference_value

    @property
    def missed(self) -> bool:
        """Whether there is a target, and it was not reached."""
        ratio = self.ratio or 0.0
        return (
            (self.at_least is not None and ratio < self.at_least)
            or (self.at_most is not None and self.value > self.at_most)
            or (self.ratio_at_most is not None and ratio > self.ratio_at_most)
        )

    @property
    def target(self) -> str:
        """The target in words; empty if there is none."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        if self.ratio_at_most is not None:
            return f"at most {self.ratio_at_most:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """``ok`` or ``MISSED``; empty if there is no target."""
        return ("MISSED" if self.missed else "ok") if self.target else ""


def rows_of_speed(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what is compared by its speed.

    The number of tensors, and not their bytes, decides about many small ones, so there
    only the comparison with torchft has a target. Of raw sockets it is a single one
    that has a target in fresh memory, and as many as ours in place; the rest is shown,
    such as what is left of a copy once it is digested.
    """
    large = shape.is_large
    fresh, in_place = found["aiockpt, fresh"], found["aiockpt, in place"]
    rival = _TIMES_TORCHFT if large else _TIMES_TORCHFT_MANY
    raw_fresh, raw_touched = f"raw socket, {FRESH}", f"raw socket, {TOUCHED}"
    cold, warm = found["aiockpt, stage cold"], found["aiockpt, stage warm"]
    for what, ours, reference, target in (
        (_FRESH, fresh, best(found, "torchft"), rival),
        (_FRESH, fresh, found.get(f"{raw_fresh}, x1"), _OF_RAW_FRESH * large),
        (_FRESH, fresh, _most(found, raw_fresh), 0),
        (_PLACED, in_place, found.get(f"{raw_touched}, x1"), 0),
        (_PLACED, in_place, _most(found, raw_touched), _OF_RAW_PLACED * large),
        (_PLACED, in_place, best(found, RAW_DIGESTED), 0),
        (
            "stage, new memory",
            cold,
            best(found, f"memcpy, {FRESH}"),
            _OF_MEMCPY_NEW * large,
        ),
        (
            "stage, used memory",
            warm,
            best(found, f"memcpy, {TOUCHED}"),
            _OF_MEMCPY_USED * large,
        ),
        ("stage, used memory", warm, best(found, COPY_DIGESTED), 0),
    ):
        if reference is not None:
            yield _speed(shape, what, ours, reference, target)


def _most(found: Mapping[str, Series], prefix: str) -> Series | None:
    """Return the one with the most connections: it was measured last."""
    named = [each for name, each in found.items() if name.startswith(prefix)]
    return named[-1] if len(named) > 1 else None


def rows_of_many(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how long many small tensors take, which no bytes per second tell."""
    rival = best(found, "torchft")
    if not shape.is_large:
        yield Row(
            what="time of a receive into fresh memory",
            shape=str(shape),
            value=found["aiockpt, fresh"].seconds,
            unit="s",
            reference=rival.name if rival else "",
            reference_value=rival.seconds if rival else None,
            at_most=_MAX_MANY if shape.count == MANY else None,
        )


def rows_of_group(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield the transfers over a process group beside those of others."""
    into_fresh, in_place = found["aiockpt, fresh"], found["aiockpt, in place"]
    many = not shape.is_large
    for what, ours, reference, target in (
        (_FRESH, into_fresh, "torchft, fresh", _TIMES_TORCHFT_PG[many]),
        (_FRESH, into_fresh, "torch's own, fresh", _TIMES_TORCH),
        (_PLACED, in_place, "torchft, in place", _TIMES_TORCHFT_PG_PLACED[many]),
        (_PLACED, in_place, "torch's own, in place", _TIMES_TORCH),
        (_PLACED, in_place, f"raw socket, {TOUCHED}, x1", 0),
    ):
        if reference in found:
            yield _speed(shape, what, ours, found[reference], target)


def rows_of_same_host(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how long memory takes that is lent, where the system can do that."""
    if SHARED not in found:
        return
    large = shape.is_large
    yield Row(
        what="same host, shared",
        shape=str(shape),
        value=1e3 * found[SHARED].seconds,
        unit="ms",
        reference=BESIDE,
        reference_value=1e3 * found[BESIDE].seconds,
        at_most=_MAX_SHARED if large else None,
    )
    target = _OF_MEMCPY_IN_PLACE * large
    what = "same host, copied in place"
    yield _speed(shape, what, found[COPIED], found[BESIDE], target)


def rows_of_cost(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield what a GB costs the processors of both ends, beside the fastest raw one."""
    for way, raw, target in (
        ("fresh", f"raw socket, {FRESH}", _TIMES_RAW_CPU),
        ("in place", f"raw socket, {TOUCHED}", _TIMES_RAW_CPU),
        ("in place", RAW_DIGESTED, 0),
    ):
        ours, reference = found[f"aiockpt, {way}"], best(found, raw)
        if reference is not None:
            yield Row(
                what=f"CPU seconds per GB, both ends, {way}",
                shape=str(shape),
                value=ours.cost,
                unit="s",
                reference=reference.name,
                reference_value=reference.cost,
                ratio_at_most=target * shape.is_large or None,
            )


def _speed(
    shape: Shape, what: str, ours: Series, reference: Series, target: float
) -> Row:
    return Row(
        what=what,
        shape=str(shape),
        value=ours.speed,
        unit="GB/s",
        reference=reference.name,
        reference_value=reference.speed,
        at_least=target or None,
    )


def rows_of_footprint(shape: Shape, found: Footprint) -> Iterator[Row]:
    """Yield the receiver's peak memory beyond the state dict."""
    rival = None if found.rival is None else 100 * found.rival / found.state
    yield Row(
        what="peak memory beyond the state dict, fresh",
        shape=str(shape),
        value=100 * found.fresh / found.state,
        unit="%",
        reference="" if rival is None else found.rival_name,
        reference_value=rival,
        at_most=_MAX_FRESH,
    )
    yield Row(
        what="peak memory beyond the state dict, in place",
        shape=str(shape),
        value=found.in_place / 2**20,
        unit="MiB",
        at_most=_MAX_IN_PLACE,
    )


def rows_of_ticker(
    shape: Shape, found: Mapping[str, Series], at_most: float
) -> Iterator[Row]:
    """Yield the lag of the tickers during transfers, beside that of an idle loop."""
    idle = found["idle"]
    for way in ("fresh", "in place"):
        during = found[f"aiockpt, {way}"]
        for loop, lags, quiet in (
            ("serving", during.sender_lags, idle.sender_lags),
            ("receiving", during.receiver_lags, idle.receiver_lags),
        ):
            yield Row(
                what=f"ticker lag p99, {loop} loop, {way}",
                shape=str(shape),
                value=1e3 * percentile(lags, 0.99),
                unit="ms",
                reference="idle loop",
                reference_value=1e3 * percentile(quiet, 0.99),
                at_most=at_most,
            )
