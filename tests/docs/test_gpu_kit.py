"""The kit for a machine with a GPU runs to its end on a fake device, and loses nothing.

Nothing here says how fast a device is, or that a real one works.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.cases import ROWS
from benchmarks.measures import Sample, Samples
from benchmarks.report import GPU_REPORT, rows_of

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "benchmarks/results"
TINY = ["--rounds", "2", "--scale", str(2**-12), "--json", "out.json"]
TESTS_OF_DEVICES = gpu._TESTS
NO_TESTS = ("--version",)  # of pytest
PATIENCE = 60.0

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real device is here"),
    pytest.mark.timeout(150),
]


def report() -> dict[str, Any]:
    """Return what the run in this directory has written so far."""
    found: dict[str, Any] = json.loads(Path("out.json").read_text())
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a directory of the test's own, without tests and slow rivals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "_TESTS", NO_TESTS)
    rivals = dict.fromkeys(gpu._RIVALS, ("", "async_save, thread"))
    monkeypatch.setattr(gpu, "_RIVALS", rivals)
    return tmp_path


def test_it_runs_to_its_end_and_says_that_it_measured_nothing(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row is there, and no figure."""
    monkeypatch.setattr(gpu, "_TESTS", ("tests/cuda/test_checkpoints_cuda.py",))
    code = gpu.main(TINY)
    found, said = report(), capsys.readouterr().out
    assert (code, found["failed"], found["ended"]) == (0, {}, True), said
    assert found["tests"]["skipped"] > 0
    wanted = {
        (case, row.what, row.metric, row.against)
        for case in gpu.CASES
        for row in ROWS[case]
    }
    rows = found["rows"]
    assert {
        (row["case"], row["what"], row["metric"], row["against"].partition(", num_")[0])
        for row in rows
    } == wanted
    assert len(rows) == len(wanted)
    assert {row["why"] for row in rows} <= {"no accelerator", "torchft was not carried"}
    assert not any(row["value"] or row["ratio"] or row["verdict"] for row in rows)
    assert "nothing was measured" in said.splitlines()[0]
    assert "nothing was measured" in said.splitlines()[-1]
    assert [each.name for each in elsewhere.iterdir()] == ["out.json"]
    assert gpu.main(["--from", "out.json", "--page", "."]) == 1


def test_a_device_that_fails_costs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next case gets a new process, and the exit code says it."""

    def dies(kit: gpu.Kit) -> gpu.Phases:
        kit.kill()
        kit.build(4096, 4096)
        yield []

    cases = {"gpu stage": dies, "gpu digest": gpu.CASES["gpu digest"]}
    monkeypatch.setattr(gpu, "CASES", cases)
    assert gpu.main(TINY) == 1
    found = report()
    assert list(found["failed"]) == ["gpu stage"]
    whys = {row["case"]: row["why"].partition(":")[0] for row in found["rows"]}
    assert whys == {"gpu stage": "failed", "gpu digest": "no accelerator"}


def test_what_does_not_fit_into_the_time_is_left_out() -> None:
    """The rows say so."""
    gpu.main([*TINY, "--minutes", "0"])
    assert {row["why"] for row in report()["rows"]} == {"no time was left"}


def test_every_test_of_devices_is_run() -> None:
    """Those that a device has shown to be wrong come first."""
    there = {f"tests/cuda/{each.name}" for each in (TESTS / "cuda").glob("test_*.py")}
    assert there == set(TESTS_OF_DEVICES)


def test_the_tests_of_devices_need_no_fixture_of_ours() -> None:
    """The kit runs them without ``conftest.py``, which needs more than is there."""
    fixture = r"@pytest(?:_asyncio)?\.fixture.*\n(?:async )?def (\w+)"
    ours = re.findall(fixture, (TESTS / "conftest.py").read_text())
    assert "no_blocking" in ours
    for path in (TESTS / "cuda").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = {each.arg for each in node.args.args}
                assert taken.isdisjoint(ours), f"{path.name}: {node.name}"
        assert "usefixtures" not in path.read_text()


def test_the_page_has_what_was_measured(elsewhere: Path) -> None:
    """Each row has its machine, date and versions."""
    alike: Sample = {"ms": 10.0, "speed": 20.0, "seconds": 1.0}
    samples: Samples = [
        {**alike, "speed": speed} for speed in (0, 18.0, 19.0, 20.0, 21.0, 22.0)
    ]
    found: dict[str, Samples] = {"64 MiB": samples}
    found["pinned copy, 64 MiB"] = [alike] * 6
    rows = list(rows_of("gpu stage", found))
    machine = {"GPU": "H100", "cores": "16", "date": "2026-01-02 03:04 UTC"}
    machine |= {"aiockpt": "0.1.0", "torch": "2.11.0", "CUDA": "13.0"}
    tests = {"passed": 3, "output": "tests/cuda/test_cuda.py::test PASSED"}
    written = {"measured": True, "machine": machine, "rows": rows, "tests": tests}
    Path("out.json").write_text(json.dumps(written))
    Path("benchmarks.json").write_text((PAGE / "benchmarks.json").read_text())
    assert gpu.main(["--from", "out.json", "--page", "."]) == 0
    (row,) = (
        line
        for line in Path("benchmarks.md").read_text().splitlines()
        if line.startswith("| gpu")
    )
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("gpu stage", "stage, tensors of 64 MiB", "20.0 GB/s"),
        *("pinned copy, 64 MiB: 20.0 GB/s", "1.00 (0.900 to 1.10)"),
        *("ratio at least 0.9", "ok", "H100, 16 cores", "2026-01-02 03:04 UTC"),
        "aiockpt 0.1.0, torch 2.11.0, CUDA 13.0",
    ]
    del tests["output"]
    assert json.loads(Path(GPU_REPORT).read_text()) == written
