"""The page on failures and the tests that prove it say the same, and miss nothing."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from aiockpt.testing import TransportConformance
from aiockpt.testing.conformance import Endings, Offers
from tests.support.cells import CELLS
from tests.support.outcomes import ENDINGS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "explanation" / "failure-semantics.md"
GUARANTEES = DOCS / "explanation" / "guarantees.md"
PROOFS = ("semantics", "torchft/test_semantics.py")
"""Where all tests take their cells from the table."""


def table() -> list[list[str]]:
    """Return the cells of the page's table, without its second line."""
    _, _, text = PAGE.read_text().partition("(failure-semantics)=")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[each.strip() for each in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def words(left: str) -> list[str]:
    """Return the words of a cell."""
    return [word for end in left.split(" / ") for word in end.split(", ")]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the tests of a module, those of classes as ``Class::test``."""
    return frozenset(_names(ast.parse(path.read_text())))


def _names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{name}" for name in _tests_of(node.body))
            for suite in _suites_of(ast.unparse(node)):
                tests = [name for name in dir(suite) if "test_" in name]
                yield from (f"{node.name}::{name}" for name in tests)
    yield from _tests_of(module.body)


def _suites_of(text: str) -> Iterator[type]:
    """Return the parts of the public suite that a class takes its tests from."""
    if re.search("Rendezvous|TransportConformance", text):
        yield TransportConformance
    yield from (each for each in (Endings, Offers) if f"{each.__name__}[" in text)


def _tests_of(body: list[ast.stmt]) -> Iterator[str]:
    for each in body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if each.name.startswith("test_"):
            yield each.name


def test_the_page_has_the_cells_of_the_tests() -> None:
    """Word by word, and in their order."""
    head, *rows = table()
    assert head == ["call", *ENDINGS]
    shown = {
        (row[0].replace("`", ""), ending): left
        for row in rows
        for ending, left in zip(ENDINGS, row[1:], strict=True)
    }
    assert shown == {key: cell.left for key, cell in CELLS.items()}
    assert list(shown) == list(CELLS)
    assert len(shown) == len(rows) * len(ENDINGS)


def test_every_word_is_explained() -> None:
    """And none that no cell has."""
    _, _, text = PAGE.read_text().partition("## The words")
    explained = re.findall(r"^\* \*\*(.+?)\*\*", text, re.MULTILINE)
    used = {word for cell in CELLS.values() for word in words(cell.left)}
    assert sorted(explained) == sorted(used)


def test_every_cell_has_a_test_that_exists() -> None:
    """One that was renamed or removed is missed here."""
    missing = [
        f"{cell.name}: {proof}"
        for cell in CELLS.values()
        for proof in cell.proofs or ("none",)
        if cell.left != "—" and not _exists(proof)
    ]
    assert not missing
    assert not any(cell.proofs for cell in CELLS.values() if cell.left == "—")


def _exists(proof: str) -> bool:
    file, _, name = proof.partition("::")
    return (TESTS / file).is_file() and name in names_in(TESTS / file)


def test_every_test_here_has_a_cell() -> None:
    """One that no cell names would never run."""
    named = {proof for cell in CELLS.values() for proof in cell.proofs}
    files = [
        file
        for place in PROOFS
        for file in (
            [TESTS / place] if ".py" in place else (TESTS / place).glob("test_*")
        )
        if file != Path(__file__)
    ]
    found = {
        f"{file.relative_to(TESTS).as_posix()}::{name}"
        for file in files
        for name in names_in(file)
    }
    assert found
    assert found <= named


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


def test_every_guarantee_names_a_test() -> None:
    """The ten sentences are the design's invariants."""
    text, _, _ = GUARANTEES.read_text().partition("## ")
    sentences = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(sentences) == 10
    for sentence in sentences:
        proofs = re.findall(r"`([\w/]+\.py::[\w:]+)`", sentence)
        assert proofs, sentence
        assert all(map(_exists, proofs)), sentence
