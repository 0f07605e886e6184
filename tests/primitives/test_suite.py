"""The suite's own tools: which tests a change can break, and what a test leaves."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.support.affected import ROOT, affected
from tests.support.leakcheck import shm

KEEPER = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
input()
"""


@pytest.mark.nightly  # it parses the whole project, for a session of developers
def test_what_can_break_by_a_package() -> None:
    """Whoever imports it is found: directly, by a helper, a lazy name or a program."""
    http = affected("http")
    assert "tests/behaviour/test_deltas.py" in http  # a public name that loads it
    assert "tests/behaviour/cli/test_fetch.py" in http  # a command that loads it
    assert "tests/faults/test_clocks.py" in http  # it runs senders.py
    assert "tests/wire/test_ranges.py" in http
    assert "tests/wire/test_header.py" not in http
    assert {*affected("http.tokens")} <= {*http}


@pytest.mark.nightly
def test_no_direct_import_is_missed() -> None:
    """A module that names the package, or a helper that does, is among those."""
    names = re.compile(r"^ *(?:from|import) aiockpt\.http\b", re.MULTILINE)
    helpers = [
        path.stem
        for path in (ROOT / "tests" / "support").glob("*.py")
        if names.search(path.read_text())
    ]
    uses = re.compile(rf"tests\.support\.(?:{'|'.join(helpers)})\b")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        and (names.search(text := path.read_text()) or uses.search(text))
    }
    assert len(found) > 50
    assert found - {*affected("http")} == set()


@pytest.mark.nightly
def test_a_directory_and_a_module_have_names_too() -> None:
    """A word may stand for tests, and an unknown word for none."""
    assert affected("test_ranges") == ["tests/wire/test_ranges.py"]
    modules = (ROOT / "tests/wire").glob("test_*.py")
    assert {*affected("wire")} >= {str(path.relative_to(ROOT)) for path in modules}
    assert affected("no_such_package") == []


@pytest.mark.allow_leaks("fds")  # Python's tracker of what is shared stays
def test_what_others_share_is_no_leak() -> None:
    """A semaphore of another program is not of this run; those made here are."""
    before = shm()
    environment = {k: v for k, v in os.environ.items() if k != "TEST_SHARED_NAMES"}
    command = [sys.executable, "-S", "-c", KEEPER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as other:
        assert other.stdout is not None
        name = other.stdout.readline().decode().strip().removeprefix("/")
        assert f"sem.{name}" in os.listdir("/dev/shm")
        assert shm() == before
        other.communicate(b"\n")
    lock = multiprocessing.get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=1)
    assert len(shm() - before) == 2
    memory.close()
    memory.unlink()
    del lock
    assert shm() == before
