"""Test suites that every transport and every checkpointer must pass; need pytest."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pytest") is None:
    raise ModuleNotFoundError(
        "the suites of aiockpt.testing need pytest, which is not installed: "
        "pip install 'aiockpt[testing]'",
        name="pytest",
    )

import pytest

# pytest explains failed assertions of modules that it knows before they are imported.
pytest.register_assert_rewrite(f"{__name__}.transports", f"{__name__}.checkpointers")

from aiockpt.testing.conformance.checkpointers import CheckpointerConformance  # noqa: E402
from aiockpt.testing.conformance.transports import (  # noqa: E402
    Endings,
    Offers,
    RoundTrips,
    Selections,
    Templates,
    TransportConformance,
)

__all__ = [
    "CheckpointerConformance",
    "Endings",
    "Offers",
    "RoundTrips",
    "Selections",
    "Templates",
    "TransportConformance",
]
