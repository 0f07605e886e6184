"""Benchmarks of the library against references, and of one source tree against another.

``python -m benchmarks`` runs a case. A case (``benchmarks.cases``) starts worker
processes (``benchmarks.worker``), which act as the two ends of a transfer
(``benchmarks.ends``, ``benchmarks.groups``, ``benchmarks.saver``), and turns their
samples into rows (``benchmarks.report``). Candidates and references take turns in one
run, between the same processes, so every figure is a ratio.

The package is no part of the wheel. ``aiockpt bench`` is what a user runs.
"""

from __future__ import annotations
