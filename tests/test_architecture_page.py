"""The architecture page names files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"

pytestmark = pytest.mark.torch_free


def names_of(file: Path) -> set[str]:
    """Return the classes, functions and methods of a module."""
    found = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            inner = (each for each in node.body if isinstance(each, functions))
            found.update(f"{node.name}.{each.name}" for each in inner)
    return found


def test_every_file_is_there() -> None:
    """A file that moves takes its line on the page with it."""
    named = re.findall(r"`([a-z_/]+(?:\.py|\.md|/))`", PAGE.read_text())
    assert len(named) > 30
    missing = [
        name
        for name in named
        if not (ROOT / "aiockpt" / name).exists() and not (ROOT / name).exists()
    ]
    assert not missing


def test_every_function_is_in_its_file() -> None:
    """`Store.publish` in `http/store.py` is read where it is said to be."""
    text = re.sub(r"\s+", " ", PAGE.read_text())
    pairs = re.findall(r"`([A-Za-z_.]+)` (?:in|\() ?`([a-z_/]+\.py)`", text)
    assert len(pairs) > 15
    missing = [
        f"{name} in {file}"
        for name, file in pairs
        if name not in names_of(ROOT / "aiockpt" / file)
    ]
    assert not missing
