"""The page of the matrix shows what the tests of its rows measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import matrix
from tests.support.matrix import PAGE, Figure, Outcome, Record, load, rows, stamps
from tests.support.proofs import code_of_faults

pytestmark = pytest.mark.torch_free

SMALL = """\
Measured there.

<!-- code: 1=aa 2=bb -->

| # | Fault | How | Must hold | Runs | Worst figure | Result | Date |
|--:|---|---|---|--:|---|---|---|
| 1 | one | so | well | 5 |  | pass | 2025-01-01 |
| 2 | two | so | well |  |  | not run |  |
"""


def written(*outcomes: Outcome) -> str:
    """Return a page into which these results were written."""
    results: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        results.setdefault(outcome.row, []).append(outcome)
    code = {1: "xx", 2: "yy"}
    return matrix.write(
        SMALL, results, date="2026-01-01", machine="Measured here.", code=code
    )


def test_the_page_shows_what_the_code_does() -> None:
    """Run `nox -s faults -- --report` for a row whose test has changed since."""
    page = PAGE.read_text()
    now = code_of_faults()
    assert [row for row, code in stamps(page).items() if now.get(row) != code] == []
    assert list(rows(page)) == list(stamps(page)) == list(range(1, len(now) + 1))


def test_no_row_of_the_page_failed() -> None:
    """A figure that is not reached is mended, not shown."""
    assert "**fail**" not in PAGE.read_text()


def test_the_worst_of_all_tests_of_a_row_is_shown() -> None:
    """Their runs are added up, and the notes come after the figures."""
    one = Outcome(1, "a", 3, {"error": Figure(0.1, 0.2, " s")}, ["noted"])
    two = Outcome(1, "b", 4, {"error": Figure(0.15, 0.2, " s")}, ["noted"])
    shares = [{"share": Figure(value, 0.8, "", at_least=True)} for value in (0.9, 1)]
    more = [Outcome(1, str(each), 0, each) for each in shares]
    page = written(one, two, *more)
    worst = "error: 0.15 s (≤ 0.2); share: 0.9 (≥ 0.8); noted"
    assert rows(page)[1] == ["one", "so", "well", "7", worst, "pass", "2026-01-01"]
    assert rows(page)[2] == rows(SMALL)[2]
    assert stamps(page) == {1: "xx", 2: "bb"}
    assert "Measured here.\n\n" in page


def test_a_test_that_fails_fails_its_row() -> None:
    """One failure counts, whatever the other tests say; a skipped test says why."""
    good, bad = Outcome(2, "a"), Outcome(2, "b", result="fail")
    skipped = Outcome(2, "c", result="no nginx")
    assert rows(written(good, bad, skipped))[2][5] == "**fail**"
    assert rows(written(good, skipped))[2][5] == "pass; no nginx"
    assert rows(written(skipped))[2][5] == "not run; no nginx"


def test_what_a_test_writes_is_read(tmp_path: Path, monkeypatch) -> None:
    """The last run of a test counts."""
    monkeypatch.setattr(matrix, "OUT", str(tmp_path / "results"))
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
    """It fails elsewhere only if no busy machine explains it."""
    record = Record(5, "test")
    record.within("time", 2.0, 1.0)
    record.at_least("share", 0.5, 0.8)
    with pytest.raises(AssertionError, match="time: 11 s, not 1 at most"):
        record.within("time", 11.0, 1.0)
    monkeypatch.setattr(matrix, "EXHAUSTIVE", True)
    with pytest.raises(AssertionError, match="time: 2 s, not 1 at most"):
        record.within("time", 2.0, 1.0)
    with pytest.raises(AssertionError, match=r"share: 0\.5, not 0.8 at least"):
        record.at_least("share", 0.5, 0.8)
