"""The benchmark: it runs, its tables and figures are right; how fast is not asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import http, trainer
from benchmarks.cases.embedded import during
from benchmarks.cases.pair import rows_of_ticker
from benchmarks.cases.trainer import LOOP, PROCESS
from benchmarks.measures import (
    BenchmarkError,
    Candidate,
    Cost,
    Sample,
    Series,
    best,
    percentile,
    take_turns,
)
from benchmarks.report import (
    OTHER_TREE,
    Report,
    Row,
    as_markdown,
    as_text,
    rows_of_trees,
)
from benchmarks.state import SHAPES, cut, looks_right, numbered, shape_of
from benchmarks.worker import HERE, Worker

MIB = 1 << 20


def series(name: str, *seconds: float, nbytes: int = 10**9) -> Series:
    """Return a series that took these seconds."""
    return Series(name, nbytes, [Sample(seconds=each) for each in seconds])


TINY = ("--size", "0.004", "--repeat", "1", "--no-torchft", "--markdown")


@pytest.mark.timeout(300)  # processes import torch, one after the other
@pytest.mark.parametrize(
    ("case", "whats"),
    [
        ("pg", ["receive into fresh memory", "receive in place"]),
        (
            "checkpointer",
            [
                "save until it may be mutated",
                "first save until it may be mutated",
                "save until it is durable",
                "SyncCheckpointer, no fsync",
                "load, verified",
                "load, mapped and unverified",
                "load one key of 256",
                "slowdown of Python beside the write",
                "nice=0, slowdown of Python beside the write",
                "death of the process noticed",
            ],
        ),
        (
            "embedded",
            [
                "median of small requests",
                "p99 of small requests",
                "slowest small request",
                "receive in place, meanwhile",
            ],
        ),
        (
            "trainer",
            [
                f"{what}, {name}"
                for what in ("steps lost", "longest stall", "receive while it trains")
                for name in (PROCESS, LOOP)
            ],
        ),
    ],
)
def test_a_tiny_run_yields_its_table(
    case: str,
    whats: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every case works end to end; nothing is left on the disk."""
    for name in ("_TRAINED", "_SERVED", "_BOTH"):
        monkeypatch.setattr(trainer, name, 0.2)
    monkeypatch.chdir(tmp_path)
    assert main([case, *TINY, "--shapes", "1m"]) == 0
    table = capsys.readouterr().out
    for what in whats:
        assert f"| {what} | 4 x 1 MiB | " in table
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)  # eight processes import torch
def test_two_trees_take_turns_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of the other tree stand beside ours, in the tables and in the files."""
    file, plot, tree = (tmp_path / name for name in ("b.json", "b.svg", "tree"))
    shutil.copytree(HERE / "aiockpt", tree / "aiockpt")
    init = tree / "aiockpt/__init__.py"
    init.write_text(init.read_text() + 'open(__file__ + ".used", "w").close()\n')
    files = ["--json", str(file), "--plot", str(plot), "--against", str(tree)]
    assert main([*TINY, "--shapes", "1m", *files]) == 0
    assert Path(f"{init}.used").exists()
    table = capsys.readouterr().out
    found = json.loads(file.read_text())
    for what in (
        "receive in place",
        "same host, shared",
        "same host, copied in place",
        "CPU seconds per GB, both ends, in place",
        "peak memory beyond the state dict, fresh",
    ):
        assert f"| {what} | 4 x 1 MiB | " in table
    for name in ("aiockpt, fresh", "aiockpt, in place", "aiockpt, stage warm"):
        assert f"| {name} | 4 x 1 MiB | " in table
        assert f"other tree: {name}: " in table
        assert found["samples"]["1m"][f"other tree: {name}"][0]["seconds"] > 0
    assert {row["verdict"] for row in found["rows"]} <= {"ok", "MISSED", ""}
    drawn = {each.text for each in ET.parse(plot).iter() if each.text}
    assert {row["what"] for row in found["rows"]} <= drawn


def test_only_requests_beside_the_transfer_count() -> None:
    """What was answered before it, or sent after it, says nothing about it."""
    cost: Cost = {"began": 10.0, "seconds": 1.0, "cpu": 0.0, "lags": []}
    visits = [(9.8, 0.1), (9.9, 0.2), (10.5, 0.3), (10.9, 0.4), (11.1, 0.5)]
    assert during(cost, visits) == [0.2, 0.3, 0.4]


def test_too_little_memory_is_an_error_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says what it needs, and does not take the machine down."""
    assert main(["--size", "1000000"]) == 1
    assert "choose a smaller --size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--size", "0"],
        ["--repeat", "0"],
        ["--shapes", "7m"],
        ["--connections", "x"],
        ["embedded", "checkpointer"],
        ["--against", "/nowhere"],
    ],
)
def test_wrong_arguments_are_refused(argv: Sequence[str]) -> None:
    """A benchmark of nothing would print nonsense."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)


@pytest.mark.timeout(120)
def test_a_worker_that_cannot_or_is_gone_says_why() -> None:
    """A failure names the process, the command and the reason."""
    unknown = pytest.raises(
        BenchmarkError, match="the sender could not prepare: KeyError"
    )
    with Worker("sender") as worker, unknown:
        worker.call("prepare", key="7m", size=MIB)
    gone = pytest.raises(BenchmarkError, match=r"the nobody has ended: .*KeyError")
    with Worker("nobody") as worker, gone:
        worker.call("watch")


def test_candidates_take_turns_and_hopeless_rivals_stop() -> None:
    """Forwards and backwards, from one and another; the best settings are repeated."""
    order = []

    def candidate(name: str, seconds: float, *rivals: str) -> Candidate:
        def run() -> Sample:
            order.append(name)
            return Sample(seconds=seconds)

        return Candidate(name, run, rivals)

    fast, slow = candidate("f", 1.0, "f", "s"), candidate("s", 2.0, "f", "s")
    found = take_turns([candidate("a", 9.0), fast, slow], 3, lambda _: None)
    assert "".join(order) == "afsfafa"
    assert [len(samples) for samples in found.values()] == [3, 3, 1]


def test_a_rival_that_fails_is_left_out_and_anything_else_ends_the_run() -> None:
    """Installed, torchft may still not work; our own code must."""

    def fail() -> Sample:
        raise BenchmarkError("no")

    notes: list[str] = []
    assert take_turns([Candidate("r", fail, ("r",))], 2, notes.append) == {}
    assert notes[-1] == "left out: no"
    with pytest.raises(BenchmarkError):
        take_turns([Candidate("a", fail)], 2, notes.append)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.99, 0),
        ([7], 0.99, 7),
        (range(100, 0, -1), 0.99, 99),
        (range(1, 101), 0.5, 50),
        ([1, 2], 1.0, 2),
    ],
)
def test_a_percentile_is_one_of_the_values(
    values: Sequence[float], share: float, expected: float
) -> None:
    """Nearest rank: no value is made up between two."""
    assert percentile(values, share) == expected


def test_a_series_gives_medians() -> None:
    """One slow run does not count."""
    several = Series(
        "x",
        2 * 10**9,
        [
            Sample(seconds=1.0, sender_cpu=2.0, receiver_lags=[1]),
            Sample(seconds=2.0, sender_cpu=4.0, receiver_lags=[3, 2]),
            Sample(seconds=50.0, sender_cpu=100.0),
        ],
    )
    assert (several.seconds, several.speed, several.sender_cost) == (2.0, 1.0, 2.0)
    assert several.speeds == (0.04, 2.0)
    assert several.receiver_lags == [1, 3, 2]


def test_the_best_of_several_settings_is_the_fastest() -> None:
    """A reference is as good as it can be; none is none."""
    found = {
        name: series(name, seconds) for name, seconds in {"a1": 2, "a2": 1}.items()
    }
    assert best(found, "a") is found["a2"]
    assert best(found, "b") is None


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("size", [MIB, 3 * MIB + 7, 40 * MIB])
def test_a_shape_is_cut_and_recognized(key: str, size: int) -> None:
    """What is received is checked; a state dict of other bytes is not right."""
    shape = shape_of(key, size)
    assert 0 < shape.nbytes <= size
    flat = numbered(shape.nbytes)
    state = cut(flat, shape)
    assert looks_right(state, shape)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == (
        shape.count
    )
    flat[-1] += 1
    assert not looks_right(state, shape)


def test_rows_compare_with_the_references() -> None:
    """Targets hold for torchft's best setting, raw sockets, and memcpy."""
    shape = shape_of("1m", MIB)
    found = {
        name: series(name, seconds)
        for name, seconds in {
            "idle": 1.0,
            "aiockpt, fresh": 1.0,
            "aiockpt, in place": 1.0,
            "aiockpt, stage cold": 1.0,
            "aiockpt, stage warm": 1.0,
            "torchft, num_chunks=0": 3.5,
            "torchft, num_chunks=4": 3.0,
            "raw socket, fresh, as the library's, x1": 0.8,
            "raw socket, fresh, as the library's, x4": 0.5,
            "raw socket, touched, x1": 0.8,
            "raw socket, touched, x4": 0.92,
            "raw socket and digests, touched, x4": 0.95,
            "memcpy, fresh, as the library's": 0.5,
            "memcpy, touched": 0.7,
            "memcpy and digests, touched, x2": 0.75,
        }.items()
    }
    rows = list(http.rows_of_speed(shape, found))
    ratios = [row.ratio for row in rows]
    assert ratios == pytest.approx([3.0, 0.8, 0.5, 0.8, 0.92, 0.95, 0.5, 0.7, 0.75])
    verdicts = ["ok", "MISSED", "", "", "ok", "", "MISSED", "MISSED", ""]
    assert [row.verdict for row in rows] == verdicts
    assert {row.verdict for row in rows_of_ticker(shape, found, 5.0)} == {"ok"}


def test_another_tree_is_compared_by_speed_and_figures() -> None:
    """Nine tenths of its speed are asked for."""
    for seconds, verdict in ((1.0, "ok"), (1.2, "MISSED")):
        found = {
            "a": Series("a", 10**9, [Sample(seconds=seconds, figures={"x": 2})]),
            "memcpy": series("memcpy", 1.0),
        }
        other = Series(f"{OTHER_TREE}a", 10**9, [Sample(seconds=1.0, figures={"x": 4})])
        speed, figure = rows_of_trees(shape_of("1m", MIB), found | {other.name: other})
        assert (speed.what, speed.verdict, speed.reference) == (
            "a",
            verdict,
            other.name,
        )
        assert (figure.what, figure.ratio, figure.verdict) == ("a: x", 0.5, "")


def test_the_report_reads_well_both_ways() -> None:
    """Columns are aligned in a terminal, and piped in a document."""
    row = Row(what="receive", shape="2 x 1 MiB", value=1.0, unit="GB/s")
    shape = shape_of("1m", 2 * MIB)
    report = Report({"cores": "2"}, {}, [row], {shape: {"x": series("x", 1.0)}})
    assert "cores 2" in as_text(report)
    assert "\nreceive  2 x 1 MiB  1.00 GB/s\n" in as_text(report)
    assert "| receive | 2 x 1 MiB | 1.00 GB/s |  |  |  |  |" in as_markdown(report)
    assert report.missed == []
