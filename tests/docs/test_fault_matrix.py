"""The fault matrix has its rows, and a run of it shows what the tests measured."""

from __future__ import annotations

import pytest

from tests.support import matrix
from tests.support.matrix import ROWS, Record


def test_the_rows_are_numbered() -> None:
    """Tests name them by their numbers."""
    assert [*ROWS] == [*range(1, len(ROWS) + 1)]
    assert all(len(cells) == 3 for cells in ROWS.values())


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
