"""The benchmark of a training loop that serves: it runs, and its figures are right."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest

from benchmarks import ends
from benchmarks.cases.trainer import (
    ELSEWHERE,
    LOOP,
    PROCESS,
    RAW,
    Round,
    rows,
    sample_of,
)
from benchmarks.ends import Moment, Training, progress, train_beside
from benchmarks.measures import BenchmarkError, Cost, Sample, Series
from benchmarks.state import shape_of
from benchmarks.worker import Worker

MIB = 1 << 20
PATIENCE = 30.0


@pytest.mark.timeout(120)
def test_a_trainer_obeys_while_it_trains() -> None:
    """Its commands are done beside the loop; what fails says why, and ends nothing."""
    with Worker("trainer", own_session=True) as trainer:
        trainer.call("train")
        with pytest.raises(
            BenchmarkError, match="the trainer could not prepare: KeyError"
        ):
            trainer.call("prepare", key="7m", size=MIB)
        trainer.call("train")
        trainer.call("rest")
        trainer.call("train")  # and it ends all the same


def test_steps_are_made_between_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that has nothing else to do, until the other one has ended."""
    stepped = Event()
    monkeypatch.setattr(ends, "_step", stepped.set)
    found: list[Sequence[Moment]] = []

    def serve(loop: Training) -> None:
        found.append(loop.end())
        for _ in range(2):
            loop.begin()
            assert stepped.wait(PATIENCE)
            stepped.clear()
            found.append(loop.end())
        loop.begin()

    train_beside(serve)
    assert found[0] == ()
    assert len(found) == 3


def test_progress_counts_steps_of_the_time_that_is_asked_for() -> None:
    """The longest pause lies between steps, before the first or after the last."""
    ends = [(0.5, 0.1), (1.5, 1.1), (2.0, 1.5), (2.5, 1.9), (4.5, 2.4)]
    found = progress(ends, 1.0, 3.0)
    assert found == {"speed": 1.5, "stall": 0.5, "waited": pytest.approx(0.2)}
    found = progress(ends, 2.5, 4.5)
    assert found == {"speed": 1.0, "stall": 2.0, "waited": pytest.approx(0.75)}
    assert progress([], 1.0, 3.0) == {"speed": 0.0, "stall": 2.0, "waited": 1.0}


def costs(*seconds: float) -> list[Cost]:
    """Return receives that took so long, each after a pause of a second."""
    found, at = list[Cost](), 0.0
    for each in seconds:
        found.append({"began": at, "seconds": each, "cpu": 0.0, "lags": []})
        at += each + 1.0
    return found


def test_what_is_lost_counts_against_the_loop_alone() -> None:
    """In percent, and in time per GB, pauses between receives included."""
    beside = progress([(0.5, 0.5), (1.0, 1.0), (4.0, 1.9)], 0.0, 6.0)
    again = progress([(0.5, 0.5), (1.0, 1.0)], 0.0, 2.0)
    rounds = [
        Round(1.0, beside, costs(2.0, 3.0)),
        Round(1.25, again, costs(2.0)),
    ]
    sample = sample_of(10**9, costs(1.0, 1.0), rounds)
    assert sample.seconds == pytest.approx(7 / 3)
    assert sample.figures == {
        "idle": 1.0,
        "lost": pytest.approx(35.0),
        "waited": pytest.approx(30.0),
        "stall": 3000.0,
        "price": pytest.approx(1e3 * (0.5 * 6 + 0.2 * 2) / 3),
    }


def series(name: str, lost: float, stall: float, *seconds: float) -> dict[str, Series]:
    """Return what serves a GB beside the loop, and while nothing trains."""
    beside, alone = seconds
    figures = {"lost": lost, "waited": lost, "stall": stall, "price": 10 * lost}
    sample = Sample(seconds=beside, figures=figures | {"idle": alone})
    return {name: Series(name, 10**9, [sample])}


BEYOND = "steps lost beyond those to an unrelated process"
OTHERS = series(f"{RAW}, x2", 1.0, 5.0, 1.0, 0.8)
OTHERS |= series(ELSEWHERE, 2.0, 6.0, 1.0, 0.5)
TORCHFT = series("torchft, num_chunks=0", 59.0, 775.0, 4.0, 2.0)


def test_serving_a_loop_is_compared_with_other_senders_and_torchft() -> None:
    """With the best of torchft's settings; how fast that one serves is shown too."""
    worse = series("torchft, num_chunks=4", 24.0, 35.0, 5.0, 0.1)
    found = series(LOOP, 50.0, 1.0, 1.0, 1.0) | series(PROCESS, 1.0, 1.0, 1.0, 1.0)
    found |= OTHERS | TORCHFT | worse
    found_rows = list(rows(shape_of("1m", 10**9), found))
    compared = {
        (row.reference, row.reference_value)
        for row in found_rows
        if row.what == f"steps lost, {PROCESS}"
    }
    assert compared == {
        (ELSEWHERE, 2.0),
        (f"{RAW}, x2", 1.0),
        ("torchft, num_chunks=0", 59.0),
    }
    beyond = {row.what: row.value for row in found_rows if row.what.startswith(BEYOND)}
    assert beyond == {f"{BEYOND}, {PROCESS}": -1.0, f"{BEYOND}, {LOOP}": 48.0}
    speeds = {row.what: row.ratio for row in found_rows if row.unit == "GB/s"}
    assert speeds["receive while it trains, torchft, num_chunks=0"] == 0.5
    assert speeds[f"receive while it trains, {RAW}, x2"] == 0.8
