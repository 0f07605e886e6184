"""Benchmarks of the library against references, and of one source tree against another.

``python -m benchmarks`` measures the cases of ``cases``. A case starts processes
(``workers``) that act as the ends of transfers (``ends``) or save and load
(``savers``). Candidates and ``references`` take turns in rounds (``measures``).
``report`` turns the samples into a table, a page and two pictures.

The package is no part of the wheel. ``aiockpt bench`` is what a user runs.
"""

from __future__ import annotations
