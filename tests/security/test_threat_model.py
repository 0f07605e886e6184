"""The threat model names a proof for each row, and each proof is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "security.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


def rows() -> list[list[str]]:
    """Return the cells of each row of the table of threats."""
    table = PAGE.read_text().partition("(security-threats)=")[2]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the tests of a module, those of classes as ``Class::test``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {
            prefix + each.name
            for each in inner
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name.startswith("test_")
        }
    return frozenset(found)


def test_every_threat_has_a_proof_that_exists() -> None:
    """A test that was renamed or removed is missed here."""
    missing = []
    for row in rows():
        proofs = REFERENCE.findall(row[-1])
        left = REFERENCE.sub("", row[-1]).replace(",", "").strip()
        if not proofs or left:
            missing.append(f"{row[1]}: no proof in {row[-1]!r}")
        missing += [
            f"{row[1]}: {file}::{name}"
            for file, name in proofs
            if not (TESTS / file).exists() or name not in names_in(TESTS / file)
        ]
    assert not missing


def test_the_table_has_every_letter() -> None:
    """A row for each kind of threat, and a defence in each."""
    found = rows()
    assert {row[0] for row in found} == set("STRIDE")
    assert len(found) >= 25
    assert all(len(row) == 5 and row[1] and row[2] for row in found)


def test_it_is_said_how_to_report() -> None:
    """And the report of a vulnerability is no public issue."""
    text = (TESTS.parent / "SECURITY.md").read_text()
    assert "private security advisories" in text
    assert "docs/explanation/security.md" in text
