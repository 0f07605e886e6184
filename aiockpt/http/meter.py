"""The meter of a receive, under the name by which HTTP's receive knows it."""

from __future__ import annotations

from aiockpt._meter import Meter

__all__ = ["Meter"]
