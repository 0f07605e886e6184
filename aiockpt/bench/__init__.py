"""``aiockpt bench``: measures the library on this machine against references.

Speeds mean little without what the machine could do at that moment, so every figure is
a ratio: candidates and references take turns in one run, between the same two
processes, and medians are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that ``argv`` asks for; return the exit code.

    0: it ran; 1: it ran with ``--check`` and missed a target; 2: it could not run.
    """
    from aiockpt.bench.command import run

    return run(argv)
