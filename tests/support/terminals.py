"""What a process does with what a terminal sends."""

from __future__ import annotations

import re
import signal
from pathlib import Path

FROM_A_TERMINAL = {signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU}


def ignored(pid: int) -> set[signal.Signals]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found
    mask = int(found[1], 16)
    return {each for each in signal.Signals if mask >> (each - 1) & 1}
