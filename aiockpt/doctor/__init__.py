"""``aiockpt doctor``: what limits this machine, and what to set.

``settings`` reads what the system says, ``measuring`` measures for a few seconds,
``judging`` decides, and ``report`` writes it down.
"""

from __future__ import annotations

from aiockpt.doctor.judging import Finding, judge
from aiockpt.doctor.measuring import measure
from aiockpt.doctor.report import as_json, as_text
from aiockpt.doctor.settings import read_settings

__all__ = ["Finding", "as_json", "as_text", "examine"]


def examine() -> list[Finding]:
    """Return what there is to say of this machine; takes a few seconds."""
    return judge(read_settings(), measure())
