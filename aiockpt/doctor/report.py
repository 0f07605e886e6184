"""The findings as one screen, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from aiockpt.doctor.judging import Finding

__all__ = ["as_json", "as_text"]


def as_json(machine: Mapping[str, str], findings: Iterable[Finding]) -> dict[str, Any]:
    """Return everything; ``limits`` says where there is something to gain."""
    return {
        "machine": dict(machine),
        "findings": [
            {**asdict(finding), "limits": finding.limits} for finding in findings
        ],
    }


def as_text(findings: Iterable[Finding]) -> str:
    """Return a line for each, and below what to set."""
    findings = [*findings]
    width = max(len(finding.name) for finding in findings)
    lines = [
        f"{'!' if finding.limits else ' '} {finding.name.ljust(width)}  {finding.value}"
        for finding in findings
    ]
    remedies = [
        f"  {finding.name}: {finding.remedy}" for finding in findings if finding.limits
    ]
    advice = ["", "What to set:", *remedies] if remedies else ["", "Nothing to set."]
    return "\n".join([*lines, *advice]) + "\n"
