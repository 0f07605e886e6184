"""The fault matrix has its rows, and a run of it shows what the tests measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import matrix
from tests.support.matrix import ROWS, Figure, Outcome, Record, load


def rendered(*outcomes: Outcome) -> str:
    """Return the last row of a page of these results, all of one row."""
    page = matrix.render({outcomes[0].row: [*outcomes]}, {"cores": "2"})
    assert "* cores: 2\n" in page
    return page.splitlines()[-1]


def test_the_rows_are_numbered() -> None:
    """Tests name them by their numbers."""
    assert [*ROWS] == [*range(1, len(ROWS) + 1)]
    assert all(len(cells) == 3 for cells in ROWS.values())


def test_the_worst_of_all_tests_of_a_row_is_shown() -> None:
    """Their runs are added up, and the notes come after the figures."""
    one = Outcome(1, "a", 3, {"error": Figure(0.1, 0.2, " s")}, ["noted"])
    two = Outcome(1, "b", 4, {"error": Figure(0.15, 0.2, " s")}, ["noted"])
    shares = [{"share": Figure(value, 0.8, "", at_least=True)} for value in (0.9, 1)]
    more = [Outcome(1, str(each), 0, each) for each in shares]
    fault, _, must_hold = ROWS[1]
    assert rendered(one, two, *more) == (
        f"| 1 | {fault} | {must_hold} | 7 | "
        "error: 0.15 s (≤ 0.2); share: 0.9 (≥ 0.8); noted | pass |"
    )


def test_a_test_that_fails_fails_its_row() -> None:
    """One failure counts, whatever the other tests say; a skipped test says why."""
    good, bad = Outcome(2, "a"), Outcome(2, "b", result="fail")
    skipped = Outcome(2, "c", result="no nginx")
    assert rendered(good, bad, skipped).endswith("| **fail** |")
    assert rendered(good, skipped).endswith("| pass; no nginx |")
    assert rendered(skipped).endswith("| not run; no nginx |")


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
    with pytest.raises(AssertionError, match="time: 22 s, not 1 at most"):
        record.within("time", 22.0, 1.0)
    monkeypatch.setattr(matrix, "EXHAUSTIVE", True)
    with pytest.raises(AssertionError, match="time: 2 s, not 1 at most"):
        record.within("time", 2.0, 1.0)
    with pytest.raises(AssertionError, match=r"share: 0\.5, not 0.8 at least"):
        record.at_least("share", 0.5, 0.8)
