"""The benchmark over a line, and from another host: it runs, and keeps its secrets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aiockpt.bench import main
from aiockpt.bench.delta import measure_delta, rows_of_delta
from aiockpt.bench.keeper import CHUNK_BYTES, changed_chunks
from aiockpt.bench.link import Link, hindrance
from aiockpt.bench.process import BenchError
from aiockpt.bench.shapes import shape_of
from aiockpt.bench.statistics import Sample, Series
from commandline import serving

MIB = 1 << 20


@pytest.mark.timeout(300)  # three processes import torch
def test_a_tiny_run_from_another_host_yields_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a plain GET; what is behind the # is nowhere."""
    model, file, plot = (tmp_path / name for name in ("m.pt", "b.json", "b.svg"))
    torch.save({"w": torch.randn(MIB), "step": 3}, model)
    options = ["--repeat", "1", "--markdown", "--json", str(file), "--plot", str(plot)]
    with serving(model, "--step", 7) as server:
        secret = server.metadata.partition("#")[2]
        assert main(["--url", server.metadata, *options]) == 0
    out, err = capsys.readouterr()
    assert "| receive in place | step 7, 4 MiB | " in out
    assert "a plain GET, unverified: " in out
    found = json.loads(file.read_text())
    assert found["samples"]["url"]["aiockpt, fresh"][0]["seconds"] > 0
    assert secret
    assert not any(secret in text for text in (out, err, file.read_text()))
    assert secret not in plot.read_text()


@pytest.mark.timeout(120)
def test_a_host_that_serves_nothing_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The benchmark could not run."""
    assert main(["--url", "http://127.0.0.1:9/checkpoint/#secret-token"]) == 1
    err = capsys.readouterr().err
    assert "127.0.0.1:9" in err
    assert "secret-token" not in err


@pytest.mark.timeout(300)  # two processes import torch
@pytest.mark.skipif(bool(hindrance()), reason=hindrance())
def test_a_tiny_run_over_a_line_yields_its_table() -> None:
    """The line is laid, everything is received over it, and it is taken up."""
    shape = shape_of("1m", 4 * MIB)
    try:
        found = measure_delta(shape, 4 * MIB, 1, lambda _: None)
    except BenchError as error:
        if "ip " in str(error) or "tc " in str(error):
            pytest.skip(f"no network namespaces here: {error}")
        raise
    rows = [*rows_of_delta(shape, found)]
    assert len(rows) == 6
    assert all(row.ratio for row in rows)


@pytest.mark.skipif(bool(hindrance()), reason=hindrance())
def test_a_line_that_cannot_be_laid_leaves_nothing() -> None:
    """A rate that tc does not know."""
    with pytest.raises(BenchError, match=r"ip netns|tc qdisc"), Link("warp9"):
        pass


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    monkeypatch.setattr("aiockpt.bench.link.shutil.which", lambda _: "/sbin/it")
    monkeypatch.setattr("aiockpt.bench.link.os.geteuid", lambda: 1000)
    assert main(["--delta", "--size", "0.01"]) == 1
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr("aiockpt.bench.link.shutil.which", lambda _: None)
    assert "iproute2" in hindrance()


def test_only_the_share_that_is_asked_for_has_a_target() -> None:
    """What has changed wholly, or not at all, is for information."""
    shape = shape_of("1m", MIB)
    names = {
        "all of it, in place": 10.0,
        "all of it, fresh": 10.0,
        **{
            f"{what} changed, {way}": seconds
            for what, seconds in {
                "nothing": 0.1,
                "2 % of chunks": 0.5,
                "every chunk": 10.0,
            }.items()
            for way in ("in place", "fresh")
        },
    }
    found = {
        name: Series(name, 10**9, [Sample(seconds=each)])
        for name, each in names.items()
    }
    rows = [*rows_of_delta(shape, found)]
    assert [row.ratio for row in rows] == [
        pytest.approx(each) for each in (100, 100, 20, 20, 1, 1)
    ]
    assert [row.verdict for row in rows] == ["", "", "ok", "ok", "", ""]


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


@pytest.mark.parametrize(
    "argv",
    [
        ["--delta", "--embedded"],
        ["--url", "http://h/", "--checkpointer"],
        ["--delta", "--transport", "pg"],
        ["--url", "http://h/", "--transport", "pg"],
    ],
)
def test_two_subjects_are_refused(argv: Sequence[str]) -> None:
    """One run measures one thing."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
