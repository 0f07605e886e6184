"""Asyncio and the operating system: threads, locks, deadlines, messages of processes.

This package knows nothing of checkpoints, and imports no torch. Only `bridge` starts
threads: `Bridge.run` is the way from a coroutine to blocking work, and returns when its
thread has ended. `tasks` runs coroutines together, `lifetime` ends calls and objects,
and `rwlock` keeps memory unchanged while somebody reads it. `sync_facade` is the way
from a caller without an event loop to a coroutine, and `background` makes blocking
verbs of all the coroutine functions of a class. `children` starts and supervises
child processes, `ipc` carries packets with descriptors between processes, and `system`
says what this host has left.
"""

from __future__ import annotations
