"""``aiockpt bench --quick`` tells within a minute, and in three lines."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from commandline import run_aiockpt

SECONDS = 60.0
SLOW = 3.0
"""How many times slower than asked a machine may be that runs other things, too."""


@pytest.mark.timeout(180)
def test_a_conclusion(tmp_path: Path) -> None:
    """Receive, send, and what to do; the figures behind them are in the file."""
    file = tmp_path / "bench.json"
    started = time.monotonic()
    done = run_aiockpt("bench", "--quick", "--json", file)
    elapsed = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    receive, send, conclusion = done.stdout.splitlines()
    assert re.match(r"Receive: [\d.]+ GB/s in place and [\d.]+ GB/s into new ", receive)
    assert re.match(r"Send: 268 MB are copied in \d+ ms, digests included; ", send)
    assert re.match(
        r"Conclusion: .*(aiockpt (doctor|bench)|when it is idle)", conclusion
    )
    found = json.loads(file.read_text())
    assert found["rows"]
    assert elapsed < SLOW * SECONDS
    assert found["options"]["seconds"] < SECONDS / 2
