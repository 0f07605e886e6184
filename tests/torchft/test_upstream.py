"""torchft's own tests, as they come in its wheel, with our transports in place of its.

``torchft_plugin.py`` puts them there, and lists the three tests that cannot pass with
the reason of each. What torchft's tests skip themselves is listed here. nox's session
``torchft`` runs the tests of the release, ``torchft_nightly`` those of a nightly build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torchft

TORCHFT = Path(torchft.__file__).parent
SUPPORT = Path(__file__).parents[1] / "support"
SKIPS = {
    "CUDA is not available",
    "need three CUDA devices",
    "Not enough GPUs for CUDA test",
    "requires native process group reconfiguration",
    "requires native reconfiguration",
    "torchcomms not installed",
}
SECONDS = 180
TEST_SECONDS = 60
ATTEMPTS = 3


@pytest.mark.timeout(ATTEMPTS * SECONDS + 10)
@pytest.mark.parametrize(
    ("file", "used"),
    [
        ("checkpointing/http_transport_test.py", "http"),
        ("checkpointing/pg_transport_test.py", "pg"),
        ("manager_test.py", "http"),
        ("manager_integ_test.py", "http"),
        # The longest by far, and no other calls: it needs half of the minute.
        pytest.param("local_sgd_integ_test.py", "http", marks=pytest.mark.nightly),
    ],
)
def test_torchft_s_own_tests_pass(file: str, used: str) -> None:
    """All but those listed; and checkpoints went through our transports.

    What fails is run again alone: on a busy machine some tests hang now and then, with
    torchft's own transport no less (the upscaling ones of DiLoCo in 2 of 4 runs). One
    that hangs so that it cannot be ended takes the whole file with it.
    """
    left, told = [str(TORCHFT / file)], ""
    for _ in range(ATTEMPTS):
        done = run(*left)
        told += done.stdout
        if done.returncode == 0:
            break
        failed = re.findall(r"^FAILED \S+?\.py::(\S+)", done.stdout, re.MULTILINE)
        left = [f"{TORCHFT / file}::{name}" for name in failed] or left
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(rf"through aiockpt: .*[1-9]\d* {used} receives", told)
    assert skips(told) <= SKIPS


def skips(told: str) -> set[str]:
    """Return the reasons for which tests were skipped."""
    return set(re.findall(r"^SKIPPED .*\.py:\d+: (.*)$", told, re.MULTILINE))


def run(*what: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on tests of torchft's, with the plugin and none of our settings.

    If it does not end, it is ended, with an exit code of its own.
    """
    options = [
        "-p",
        "tests.support.torchft_plugin",
        "-p",
        "no:cacheprovider",
        "-rfs",
        "-q",
    ]
    settings = ["-c", os.devnull, f"--rootdir={TORCHFT}", f"--timeout={TEST_SECONDS}"]
    command = [sys.executable, "-m", "pytest", *options, *settings, *what]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        told: Any = late.stdout or b""  # bytes, whatever was asked for
        text = told.decode() if isinstance(told, bytes) else told
        return subprocess.CompletedProcess(command, 124, text)
