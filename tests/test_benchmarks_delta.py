"""The benchmarks over a line: they run, and their figures are right."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import CASES, measure
from benchmarks.cases.pair import Plan
from benchmarks.ends import CHUNK_BYTES, changed_chunks
from benchmarks.link import Link, hindrance
from benchmarks.measures import BenchmarkError
from benchmarks.state import shape_of

MIB = 1 << 20


@pytest.mark.timeout(300)  # two processes import torch
@pytest.mark.skipif(bool(hindrance()), reason=hindrance())
@pytest.mark.parametrize(("case", "count"), [("delta", 6), ("cold", 3)])
def test_a_tiny_run_over_a_line_yields_its_table(case: str, count: int) -> None:
    """The line is laid, everything is received over it, and it is taken up."""
    shape = shape_of("1m", 4 * MIB)
    try:
        plan = Plan(size=4 * MIB, repeat=1, connections=(1,), torchft=False)
        found = measure(CASES[case], shape, plan, None, lambda _: None)
    except BenchmarkError as error:
        if "ip " in str(error) or "tc " in str(error):
            pytest.skip(f"no network namespaces here: {error}")
        raise
    table = [*CASES[case].rows(shape, found)]
    assert len(table) == count
    assert all(row.ratio for row in table)


@pytest.mark.skipif(bool(hindrance()), reason=hindrance())
def test_a_line_that_cannot_be_laid_leaves_nothing() -> None:
    """A rate that tc does not know."""
    with pytest.raises(BenchmarkError, match=r"ip netns|tc qdisc"), Link("warp9"):
        pass


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    monkeypatch.setattr("benchmarks.link.shutil.which", lambda _: "/sbin/it")
    monkeypatch.setattr("benchmarks.link.os.geteuid", lambda: 1000)
    assert main(["delta", "--size", "0.01"]) == 1
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr("benchmarks.link.shutil.which", lambda _: None)
    assert "iproute2" in hindrance()


@pytest.mark.parametrize(
    ("chunks", "share", "expected"),
    [
        (100, 0.0, []),
        (100, 0.02, [0, 50]),
        (64, 0.02, [0, 32]),
        (4, 0.02, [0]),
        (3, 1.0, [0, 1, 2]),
        (0, 1.0, []),
    ],
)
def test_the_changed_chunks_are_spread(
    chunks: int, share: float, expected: list[int]
) -> None:
    """At least one, where there shall be any."""
    assert changed_chunks(chunks * CHUNK_BYTES, share) == expected
