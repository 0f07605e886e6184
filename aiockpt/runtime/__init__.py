"""Asyncio and the operating system: threads, locks, deadlines, child processes."""

from __future__ import annotations
