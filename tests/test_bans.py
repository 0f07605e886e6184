"""What the linter cannot ban by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import aiockpt

SOURCES = sorted(Path(aiockpt.__file__).parent.rglob("*.py"))


def calls(path: Path, method: str) -> Iterator[ast.Call]:
    """Yield the calls of ``something.method(...)`` in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == method
        ):
            yield node


def is_none(node: ast.expr) -> bool:
    """Tell whether an expression is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def test_nothing_runs_in_the_default_executor() -> None:
    """It is everybody's, it is starved easily, and closing a loop waits for it."""
    found = [
        f"{path}:{call.lineno}"
        for path in SOURCES
        for call in calls(path, "run_in_executor")
        if not call.args or is_none(call.args[0])
    ]
    assert not found
