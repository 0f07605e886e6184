"""Paths are readable, and can stand in any message or header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.paths import Path, format_path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("model",), "model"),
        (("optimizer", "state", 0, "step"), "optimizer.state[0].step"),
        (("model", "layers.0.weight"), "model.layers.0.weight"),
        ((0, 1), "[0][1]"),
        (("a", None, True, 1.5), "a[None][True][1.5]"),
        (("a", (1, "b")), "a[(1, 'b')]"),
        (("", "a"), "[''].a"),
        (("\ud800",), "['\\ud800']"),
    ],
)
def test_a_path_reads_like_python(path: Path, text: str) -> None:
    """Strings are joined by dots, everything else is in brackets."""
    assert format_path(path) == text


@given(st.lists(st.text(st.characters(exclude_categories=())) | st.integers()))
def test_a_path_is_valid_unicode(path: list[object]) -> None:
    """It can be printed, logged, and become the name of an entry."""
    format_path(path).encode()
