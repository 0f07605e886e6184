"""The parts of the conformance suite; pytest explains their assertions."""

from __future__ import annotations

import pytest

# Before they are imported, and by name: the package itself is imported already.
pytest.register_assert_rewrite(
    f"{__name__}.endings",
    f"{__name__}.offers",
    f"{__name__}.round_trips",
    f"{__name__}.selections",
    f"{__name__}.templates",
)
