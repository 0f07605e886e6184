"""The process-group rooms never block the event loop."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _never_blocks(no_blocking: object) -> None:
    """Guard every test of this directory."""
