"""The page on torchft names tests; all of them are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "howto" / "torchft.md"


def test_every_test_that_the_page_names_is_there() -> None:
    """A promise without a test is none."""
    if not PAGE.exists():
        pytest.skip("the documentation is not beside the tests")
    page = PAGE.read_text()
    sources = "".join(each.read_text() for each in HERE.glob("test_*.py"))
    names = set(re.findall(r"`((?:Test|test_)\w+)`", page))
    assert len(names) > 20
    for name in names:
        assert re.search(rf"^(?:class|def) {name}\b", sources, re.MULTILINE), name
    for file in re.findall(r"`(?:tests/torchft/)?(test_\w+\.py)`", page):
        assert (HERE / file).exists()
