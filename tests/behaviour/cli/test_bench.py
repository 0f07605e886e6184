"""``aiockpt bench`` tells in three lines what a machine, or a line, does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.commandline import run_aiockpt, serving
from tests.support.forkserver import children_of
from tests.support.waiting import is_running, wait_until

MIB = 1 << 20


@pytest.mark.timeout(120)
def test_every_sample_as_json() -> None:
    """The output has what the lines are made of, the machine, and one round more."""
    done = run_aiockpt("bench", "--size", "2MiB", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nbytes"] == 2 * MIB
    assert len(found["seconds"]["receive in place"]) == 2
    assert found["lags"]["idle"]
    assert {"cores", "kernel"} <= found["machine"].keys()
    receive, send, conclusion = found["conclusion"]
    assert re.match(r"Receive: [\d.]+ GB/s in place and [\d.]+ GB/s into new ", receive)
    assert re.match(r"Send: 2 MB are copied in \d+ ms, digests included; ", send)
    advice = r"Conclusion: .*(aiockpt (doctor|bench)|when it is idle)"
    assert re.match(advice, conclusion)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("delay", [0.0, 1.0], ids=["at once", "a second later"])
def test_ctrl_c_prints_one_line(delay: float) -> None:
    """The sending process ends, too, and prints nothing of its own."""
    command = [sys.executable, "-m", "aiockpt", "bench", "--size", "8MiB"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        place = Path(f"/proc/{process.pid}")
        wait_until(lambda: has_a_loop(place) and children_of(process.pid), "its start")
        time.sleep(delay)
        sending = children_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate()
    assert err == "aiockpt: interrupted\n"
    assert process.returncode == 130
    # It ends with its input, at the latest.
    wait_until(lambda: not any(map(is_running, sending)), "its end")


def has_a_loop(process: Path) -> bool:
    """Tell whether a process waits for events, and takes an interrupt as such."""
    with suppress(OSError):  # a descriptor may be closed meanwhile
        names = [os.readlink(each) for each in (process / "fd").iterdir()]
        return "anon_inode:[eventpoll]" in names
    return False


@pytest.mark.timeout(180)
def test_a_conclusion_about_a_line(tmp_path: Path) -> None:
    """A plain GET takes turns; what stands behind the # is nowhere."""
    model = tmp_path / "m.pt"
    torch.save({"w": torch.randn(MIB), "step": 3}, model)
    with serving(model, "--step", 7) as server:
        done = run_aiockpt("bench", "--url", server.metadata, "--repeat", "1")
        secret = server.metadata.partition("#")[2]
    assert done.returncode == 0, done.stderr
    receive, loop, conclusion = done.stdout.splitlines()
    assert "a plain GET, unverified, reaches " in receive
    assert server.base in receive
    assert loop.startswith("Loop: late by ")
    assert conclusion.startswith("Conclusion: ")
    assert secret
    assert secret not in done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_a_host_that_serves_nothing_is_named() -> None:
    """The benchmark could not run, and keeps the secret."""
    done = run_aiockpt("bench", "--url", "http://127.0.0.1:9/checkpoint/#secret-token")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "secret-token" not in done.stdout + done.stderr
