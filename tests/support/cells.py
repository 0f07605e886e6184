"""All cells of the page on failures, and the tests that take theirs from here."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.cells_group import GROUP
from tests.support.cells_http import HTTP
from tests.support.cells_saving import SAVING
from tests.support.cells_torchft import TORCHFT
from tests.support.outcomes import Cells

__all__ = ["CELLS", "each_cell"]

CELLS: Final[Cells] = {**HTTP, **GROUP, **SAVING, **TORCHFT}
"""By call and ending, in the order of the page."""


def each_cell(test: str) -> Any:
    """Give a test, ``file.py::name``, the cells that name it, a case for each.

    A test that no cell names has no case, which ``test_page.py`` notices.
    """
    found = [cell for cell in CELLS.values() if test in cell.proofs]
    return pytest.mark.parametrize("cell", found, ids=[cell.name for cell in found])
