"""Finds the test modules that can break if a package or a module changes.

``python -m tests.support.affected http tokens`` prints those that depend on the package
``aiockpt.http`` or on a module ``tokens``. A test module depends on what it imports,
at its top or in a function, and on what that imports in turn. A string counts as an
import if it names a module, a program of `tests/support`, or has an import statement.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("aiockpt", "tests", "examples", "benchmarks")
STATEMENT: Final = re.compile(r"^ *((?:from [\w.]+ )?import [\w., ]+)$", re.MULTILINE)


def _name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES: Final = {
    _name_of(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}
"""Every module by its dotted name."""


def _lazy_names(package: str) -> dict[str, str]:
    """Return the modules of the names that a package loads on their first use.

    Imports under ``TYPE_CHECKING`` name them.
    """
    return {
        alias.asname or alias.name: str(statement.module)
        for node in ast.parse(FILES[package].read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


LAZY: Final = {
    name: homes
    for name, path in FILES.items()
    if "lazy(__name__" in path.read_text() and (homes := _lazy_names(name))
}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of the project that a module imports or names itself."""
    text = FILES[module].read_text()
    if module == "aiockpt.cli":  # it imports the command that it is given
        return frozenset(name for name in FILES if name.startswith(module))
    if ".test_" in module and re.search(r"glob\([^)]*\*\.py", text):
        return frozenset(name for name in FILES if not name.startswith("tests."))
    found = set(_names_in(ast.parse(text)))
    if '"-m", "aiockpt"' in text:
        found.add("aiockpt.cli")
    if module in LAZY:
        found -= {*LAZY[module].values()}
    return frozenset(found & {*FILES})


def _names_in(tree: ast.Module) -> Iterator[str]:
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue  # a type is no behaviour
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    yield from (module, f"{module}.{alias.name}")
                    yield LAZY.get(module, {}).get(alias.name, module)
            case ast.Attribute(value=ast.Name(id=package), attr=name):
                for each in (package, f"aiockpt.{package}"):
                    yield LAZY.get(each, {}).get(name, "")
            case ast.Constant(value=str(text)):
                yield from _names_in_text(text)
        left.extend(ast.iter_child_nodes(node))


def _names_in_text(text: str) -> Iterator[str]:
    yield text
    if text.endswith(".py"):
        yield from (f"{place}.{text[:-3]}" for place in ("tests.support", "examples"))
    if "import" in text:
        for statement in STATEMENT.findall(text):
            with suppress(SyntaxError):  # a sentence that begins so
                yield from _names_in(ast.parse(statement))


@cache
def needs_of(module: str) -> frozenset[str]:
    """Return all that a module imports, directly or through another one."""
    found, left = {module}, [module]
    while left:
        new = imports_of(left.pop()) - found
        found |= new
        left += new
    return frozenset(found)


def affected(*changed: str) -> list[str]:
    """Return the paths of the test modules that need one of these, or are named so.

    Args:
        changed: Words of dotted names: ``http``, ``http.tokens``, ``tokens``, ``wire``.
    """
    words = re.compile(rf"\.(?:{'|'.join(map(re.escape, changed))})\.")
    meant = {name for name in FILES if words.search(f".{name}.")}
    return [
        str(path.relative_to(ROOT))
        for name, path in FILES.items()
        if path.name.startswith("test_") and meant & needs_of(name)
    ]


if __name__ == "__main__":
    print(*affected(*sys.argv[1:]), sep="\n")
