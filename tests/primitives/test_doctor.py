"""``aiockpt doctor``: it prints one screen, and advises where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiockpt.cli.doctor import Finding, HostSettings, as_text, judge

pytestmark = pytest.mark.torch_free

MIB = 1 << 20
LINES, COLUMNS = 24, 100

WELL = HostSettings(
    cores=16,
    quota=None,
    memory=64 << 30,
    congestion="bbr",
    allowed=("reno", "bbr"),
    buffers=(32 * MIB, 16 * MIB),
    networks={"eth0": 25_000},
    huge_pages="madvise",
    shared_huge_pages="advise",
    shared=(1 << 30, 1 << 30),
    files=65536,
    uvloop="0.23",
)


def found(name: str, settings: HostSettings = WELL) -> Finding:
    """Return what is said of one thing."""
    (finding,) = (each for each in judge(settings) if each.name == name)
    return finding


def test_a_good_machine_has_nothing_to_set() -> None:
    """`doctor` gives no advice on a machine whose settings are good."""
    findings = judge(WELL)
    assert not [finding for finding in findings if finding.limits]
    assert as_text(findings).endswith("\nNothing to do.\n")


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("cores", {"cores": 2}, "4 cores"),
        ("cores", {"quota": 1.5}, "4 cores"),
        ("huge pages", {"huge_pages": "never"}, "echo madvise"),
        ("huge pages to share", {"shared_huge_pages": "never"}, "echo advise"),
        ("congestion control", {"congestion": "cubic"}, "tcp_congestion_control=bbr"),
        ("socket buffers", {"buffers": (32 * MIB, 4 * MIB)}, "tcp_wmem="),
        ("uvloop", {"uvloop": ""}, "pip install 'aiockpt[uvloop]'"),
        ("/dev/shm", {"shared": (64 * MIB, 0)}, "--shm-size"),
        ("/dev/shm", {"shared": None}, "--shm-size"),
        ("open files", {"files": 1024}, "ulimit -n"),
    ],
)
def test_a_setting_that_limits_has_a_remedy(
    name: str, changes: dict[str, object], remedy: str
) -> None:
    """The remedy of a setting is one line that can be pasted."""
    advice = found(name, replace(WELL, **changes)).remedy  # type: ignore[arg-type]
    assert remedy in advice
    assert "\n" not in advice


def test_a_slow_loopback_is_advised_on_only_where_the_library_cannot_help() -> None:
    """It asks for another congestion control by itself, where that is allowed."""
    assert not found("congestion control").limits
    remedy = found("congestion control", replace(WELL, allowed=("bbr",))).remedy
    assert "tcp_allowed_congestion_control" in remedy


def test_what_the_system_does_not_say_is_no_error() -> None:
    """`doctor` does without the files that not every system has."""
    bare = replace(
        WELL,
        congestion="",
        allowed=(),
        buffers=None,
        networks={},
        huge_pages="",
        shared_huge_pages="",
        shared=None,
    )
    text = as_text(judge(bare))
    assert "socket buffers       unknown" in text
    assert "networks" not in text


def test_the_report_is_one_screen_that_says_what_it_marks() -> None:
    """Each line with a mark has a remedy below."""
    poor = replace(WELL, cores=1, files=64, uvloop="")
    text = as_text(judge(poor))
    marked = [line[2:].split("  ")[0] for line in text.splitlines() if line[:1] == "!"]
    assert marked == ["cores", "uvloop", "open files"]
    advice = text.partition("What to do:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in advice] == marked
    assert len(text.splitlines()) <= LINES
    assert max(map(len, text.splitlines())) <= COLUMNS
