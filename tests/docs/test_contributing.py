"""CONTRIBUTING.md names what is there; commits and CI have the same tools."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_session_is_there() -> None:
    """The sessions of the commands exist, and the parts of ``nightly``."""
    named = set(re.findall(r"nox -s ([\w-]+)", PAGE))
    parts = re.search(r"nightly parts are (.+?)\. `nox", PAGE, re.DOTALL)
    assert parts
    named |= set(re.findall(r"`(\w+)`", parts[1]))
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = set(re.findall(r"^def (\w+)\(", noxfile, re.MULTILINE))
    sessions |= set(re.findall(r'^@.+\(name="([\w-]+)"', noxfile, re.MULTILINE))
    assert {"dev", "quick", "check", "nightly", "lock"} <= named
    assert named <= sessions


def test_every_place_is_there() -> None:
    """A directory of tests that moves takes its line on the page with it."""
    places = re.findall(r"`((?:tests|docs|aiockpt)/[\w./]+)`", PAGE)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_the_fixtures_are_there() -> None:
    """Each that bites has its name from the suite's own conftest."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    names = set(re.findall(r"`(\w+_\w+)`", PAGE))
    fixtures = {name for name in names if f"def {name}(" in conftest}
    assert {"nothing_left", "no_task_left", "error_log", "no_blocking"} <= fixtures


def test_the_hooks_have_the_pinned_versions() -> None:
    """With other versions, a commit would pass here and fail in CI."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.findall(r"([\w-]+)==([\w.]+)", hooks)
    assert len(found) >= 3
    pins = (ROOT / "constraints.txt").read_text().replace("_", "-").splitlines()
    assert [pin for pin in map("==".join, found) if pin not in pins] == []
