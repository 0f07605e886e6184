"""Clocks of other processes that differ."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from tests.support.shortages import FaultUnavailableError


def monotonic_ahead(seconds: int, program: Sequence[str]) -> list[str]:
    """Return the command to run a program with its monotonic clock set ahead.

    Two processes then disagree on it, as after a restart of the host. Needs root.

    Raises:
        FaultUnavailableError: this process may not create a time namespace.
    """
    clocks = [f"--{clock}={seconds}" for clock in ("monotonic", "boottime")]
    prefix = ["unshare", "--time", "--fork", "--kill-child", *clocks]
    reason = "unshare is not installed"
    if shutil.which("unshare"):
        tried = [*prefix, "true"]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    if reason:
        raise FaultUnavailableError("monotonic clock that differs", reason)
    return [*prefix, *program]
