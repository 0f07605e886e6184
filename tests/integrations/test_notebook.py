"""The cells of the page on notebooks run in a real kernel."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from nbclient import NotebookClient

HERE = Path(__file__).parent


def cells() -> list[str]:
    """Return the bodies of the functions, in order."""
    source = (HERE / "notebook.py").read_text()
    functions = [
        each
        for each in ast.parse(source).body
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lines = source.splitlines()
    return [
        dedent("\n".join(lines[each.body[0].lineno - 1 : each.end_lineno]))
        for each in functions
    ]


@pytest.mark.allow_leaks("fds")  # nbclient never closes its event loop
@pytest.mark.timeout(240)
def test_the_cells_run(tmp_path) -> None:
    """None fails, and nobody needs to patch asyncio."""
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(each) for each in cells()]
    client = NotebookClient(
        made, timeout=200, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
