"""The page of the matrix is that of the faults in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faultrecord import Figure, Outcome, Record
from tests.support.faultreport import NOT_RUN, load, page_rows, render
from tests.support.faultrows import ROWS, fingerprint

pytestmark = pytest.mark.torch_free

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"


def rendered(*outcomes: Outcome, old: str = "") -> dict[int, str]:
    """Return the table of a page with these results."""
    results: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        results.setdefault(outcome.row, []).append(outcome)
    page = render(results, date="2026-01-01", machine="Measured here.", old=old)
    return page_rows(page)


def test_the_page_is_not_older_than_the_code() -> None:
    """Every row of the code is on it, word by word: run `nox -s faults -- --report`."""
    page = PAGE.read_text()
    assert f"rows: {fingerprint()} -->" in page
    assert list(page_rows(page)) == [each.number for each in ROWS]


def test_no_row_of_the_page_failed() -> None:
    """A figure that is not reached is mended, not shown."""
    assert "**fail**" not in PAGE.read_text()


def test_numbers_are_in_order() -> None:
    """From 1, without a gap."""
    assert [each.number for each in ROWS] == list(range(1, len(ROWS) + 1))


def test_a_row_without_results_is_not_run() -> None:
    """It is on the page nevertheless."""
    assert rendered()[7].endswith(f"| | | {NOT_RUN} | |")


def test_the_worst_of_all_tests_of_a_row_is_shown() -> None:
    """Their runs are added up, and the notes come after the figures."""
    one = Outcome(1, "a", 3, {"error": Figure(0.1, 0.2, " s")}, ["noted"])
    two = Outcome(1, "b", 4, {"error": Figure(0.15, 0.2, " s")}, ["noted"])
    shares = [{"share": Figure(value, 0.8, "", at_least=True)} for value in (0.9, 1)]
    more = [Outcome(1, str(each), 0, each) for each in shares]
    line = rendered(one, two, *more)[1]
    worst = "error: 0.15 s (≤ 0.2); share: 0.9 (≥ 0.8); noted"
    assert line.endswith(f"| 7 | {worst} | pass | 2026-01-01 |")


def test_a_test_that_fails_fails_its_row() -> None:
    """Whatever the others say; one that was skipped says why."""
    good, bad = Outcome(2, "a"), Outcome(2, "b", result="fail")
    skipped = Outcome(2, "c", result="no nginx")
    assert "| **fail** |" in rendered(good, bad, skipped)[2]
    assert "| pass; no nginx |" in rendered(good, skipped)[2]
    assert f"| {NOT_RUN}; no nginx |" in rendered(skipped)[2]


def test_a_row_that_was_not_run_again_stays() -> None:
    """Unless the fault's words have changed since."""
    page = render(
        {3: [Outcome(3, "a", 5)]}, date="2025-01-01", machine="Measured there."
    )
    assert rendered(Outcome(4, "b", 6), old=page)[3] == page_rows(page)[3]
    changed = page.replace(ROWS[2].fault, "something else")
    assert NOT_RUN in rendered(Outcome(4, "b", 6), old=changed)[3]


def test_what_a_test_writes_is_read(tmp_path, monkeypatch) -> None:
    """Of a test that ran twice, the second time counts."""
    monkeypatch.setattr("tests.support.faultrecord.OUT", str(tmp_path / "results"))
    for value in (3.0, 1.0):
        record = Record(5, "test")
        record.ran(2)
        record.within("time", value, 4.0)
        record.within("time", value - 0.5, 4.0)
        record.note("a word")
        record.write("pass")
    (outcome,) = load(tmp_path / "results")[5]
    assert outcome == Outcome(
        5, "test", 2, {"time": Figure(1.0, 4.0, " s")}, ["a word"]
    )


def test_a_figure_that_is_exceeded_fails_where_it_is_measured(monkeypatch) -> None:
    """And elsewhere only where no busy machine explains it."""
    record = Record(5, "test")
    record.within("time", 2.0, 1.0)
    record.at_least("share", 0.5, 0.8)
    with pytest.raises(AssertionError, match="time: 99 s, not 1 at most"):
        record.within("time", 99.0, 1.0)
    monkeypatch.setattr("tests.support.faultrecord.EXHAUSTIVE", True)
    with pytest.raises(AssertionError, match="time: 2 s, not 1 at most"):
        record.within("time", 2.0, 1.0)
    with pytest.raises(AssertionError, match=r"share: 0\.5, not 0.8 at least"):
        record.at_least("share", 0.5, 0.8)
