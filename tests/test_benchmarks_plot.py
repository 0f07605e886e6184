"""The benchmark's picture: valid, readable on light and dark, and true to the rows."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from benchmarks.plot import as_svg
from benchmarks.report import Report, Row

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = {"cores": "2", "kernel": "Linux <6> & more", "date": "2026"}


def row(what: str, value: float, reference: float | None = None, **more: float) -> Row:
    """Return a row of one shape."""
    name = "" if reference is None else "raw socket, x1"
    return Row(
        what=what,
        shape="4 x 1 MiB",
        value=value,
        unit="GB/s",
        reference=name,
        reference_value=reference,
        **more,
    )


def drawn(*rows: Row) -> ET.Element:
    """Return the picture of some rows, parsed."""
    report = Report(machine=MACHINE, options={}, rows=[*rows])
    return ET.fromstring(as_svg(report))


def texts(picture: ET.Element) -> list[str]:
    """Return all that is written."""
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def widths(picture: ET.Element, kind: str) -> list[float]:
    """Return how wide the bars of a kind are."""
    bars = (each for each in picture.iter(f"{SVG}rect") if each.get("class") == kind)
    return [float(each.get("width", "nan")) for each in bars]


def test_bars_are_in_proportion_to_the_row() -> None:
    """Each row has its own scale; ours is beside what it is compared with."""
    picture = drawn(row("fast", 4.0, 2.0), row("slow", 1.0, 10.0))
    (fast, slow), (half, whole) = widths(picture, "ours"), widths(picture, "other")
    assert fast == whole == pytest.approx(2 * half) == pytest.approx(10 * slow)
    assert "4.00 GB/s, 2.00 x" in texts(picture)
    assert "10.00 GB/s, raw socket, x1" in texts(picture)


def test_a_missed_target_looks_different() -> None:
    """It has a colour of its own, and a limit is marked."""
    missed = row("a", 1.0, 2.0, at_least=0.9)
    above = row("b", 30.0, at_most=20.0)
    picture = drawn(missed, above, row("c", 10.0, at_most=20.0))
    assert len(widths(picture, "missed")) == 2
    limits = [float(each.get("x1", "nan")) for each in picture.iter(f"{SVG}line")]
    assert limits[0] < limits[1]


def test_rows_of_one_subject_stand_together() -> None:
    """Under its name, once, and in the order of the report."""
    written = texts(drawn(row("one", 1, 1), row("one", 2, 1), row("two", 1, 1)))
    assert [text for text in written if text in ("one", "two")] == ["one", "two"]


def test_what_is_compared_with_several_things_is_drawn_once() -> None:
    """Above them all, on one scale, with its ratios in their order."""
    others = [replace(row("w", 4.0, of), reference=f"x{of:g}") for of in (2.0, 8.0)]
    picture = drawn(*others, others[1])
    assert widths(picture, "ours") == pytest.approx([max(widths(picture, "other")) / 2])
    assert texts(picture).count("4.00 GB/s, 2.00 x, 0.50 x") == 1
    below = [text for text in texts(picture) if text.endswith((" x2", " x8"))]
    assert below == ["2.00 GB/s, x2", "8.00 GB/s, x8"]


def test_a_limit_of_the_ratio_is_marked_beyond_the_reference() -> None:
    """Where the bar should end, at most."""
    picture = drawn(row("w", 3.0, 2.0, ratio_at_most=1.5))
    assert widths(picture, "missed") == []
    limit = next(picture.iter(f"{SVG}line"))
    bar = next(picture.iter(f"{SVG}rect"))
    end = float(bar.get("x", "nan")) + float(bar.get("width", "nan"))
    assert float(limit.get("x1", "nan")) == pytest.approx(end, abs=0.1)


def test_it_names_the_machine_and_escapes_what_is_no_markup() -> None:
    """Whatever a kernel calls itself."""
    assert any("kernel Linux <6> & more" in text for text in texts(drawn()))


def test_nothing_and_zeros_are_drawn() -> None:
    """A row without a time, or a figure below zero, is no error."""
    picture = drawn(row("a", 0.0), row("b", -0.1, 0.0), row("c", 0.0, at_most=5.0))
    assert all(width > 0 for width in widths(picture, "ours"))


def test_it_fits_its_page_on_either_background() -> None:
    """Nothing is drawn outside, and there are colours for both."""
    picture = drawn(*(row(f"row {n}", 1.0, 2.0) for n in range(30)))
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    assert picture.get("viewBox") == f"0 0 {width:g} {height:g}"
    for each in picture.iter(f"{SVG}rect"):
        assert float(each.get("x", 0)) + float(each.get("width", 0)) < width
        assert float(each.get("y", 0)) < height
    style = picture.findtext(f"{SVG}style", "")
    assert "prefers-color-scheme: dark" in style
