"""What a process does that works in the background of a trainer's terminal."""

from __future__ import annotations

import signal

__all__ = ["leave_terminal"]


def leave_terminal() -> None:
    """Let no terminal stop or end this process, which has a group of its own there.

    What the terminal sends is the trainer's: Ctrl-C and a hangup; and a shell that
    could go on with a stopped process does not know this one.
    """
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(each, signal.SIG_IGN)
