"""The page on failures and the tests that prove it say the same, and miss nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.cells import CELLS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "explanation" / "failure-semantics.md"
GUARANTEES = DOCS / "explanation" / "guarantees.md"
PROOFS = ("semantics", "torchft/test_semantics.py")
"""Where all tests take their cells from the table."""


def words(left: str) -> list[str]:
    """Return the words of a cell."""
    return [word for end in left.split(" / ") for word in end.split(", ")]


def test_every_word_is_explained() -> None:
    """And none that no cell has."""
    _, _, text = PAGE.read_text().partition("## The words")
    explained = re.findall(r"^\* \*\*(.+?)\*\*", text, re.MULTILINE)
    used = {word for cell in CELLS.values() for word in words(cell.left)}
    assert sorted(explained) == sorted({*used, "—"})


def public_coroutines() -> Iterator[str]:
    """Return the coroutines that the reference documents, but for abstract classes.

    Those of ``aiockpt.testing`` are tools for tests.
    """
    text = (DOCS / "reference" / "api.md").read_text()
    for name, options in re.findall(
        r"\.\. auto(?:class|function):: ([\w.]+)(?:\(\))?\n((?:   .*\n)*)", text
    ):
        found = _object(name)
        if name.startswith("aiockpt.testing") or inspect.isabstract(found):
            continue
        if inspect.iscoroutinefunction(found):
            yield found.__name__
        for member in re.findall(r"\w+", options.replace(":members:", "")):
            if inspect.iscoroutinefunction(getattr(found, member, None)):
                yield f"{found.__name__}.{member}"


def _object(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_every_public_coroutine_has_a_row() -> None:
    """A new one has to be thought through, too."""
    rows = set()
    for call, _ in CELLS:
        first, *others = call.split(", ")
        owner = first.rpartition(".")[0]
        rows |= {first, *(f"{owner}.{other}" for other in others)}
    public = set(public_coroutines())
    assert len(public) > 20
    assert public <= rows
