"""One thing has one name: what admits a receiver is the token."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import aiockpt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
SOURCES = [*Path(aiockpt.__file__).parent.rglob("*.py"), *ROOT.glob("examples/*.py")]
OTHER_NAMES = re.compile(r"capabilit|credential|\bsecrets?\b", re.IGNORECASE)
ANOTHER_THING = re.compile(r"credentials of (a host|containers)|host's credentials")
"""What clouds give to their hosts is none of ours."""

CODE = re.compile(r"`[^`\n]+`")
"""Names of tests, and of programs, in a sentence."""


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Give the lines of a page; of a program its texts, which people may read."""
    text = path.read_text()
    if path.suffix == ".md":
        for number, line in enumerate(text.splitlines(), 1):
            yield number, CODE.sub("", line)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_there_is_something_to_read() -> None:
    """A search of nothing would find nothing."""
    assert len(PAGES) > 20
    assert len(SOURCES) > 100


def test_the_token_has_one_name() -> None:
    """In the pages, the help, the messages and the docstrings."""
    found = [
        f"{path.name}:{number}: {text[:80]}"
        for path in [*PAGES, *SOURCES]
        for number, text in said(path)
        if OTHER_NAMES.search(ANOTHER_THING.sub("", " ".join(text.split())))
        and not re.fullmatch(r"[\w.]+", text)  # the name of a module
    ]
    assert found == []


def test_parameters_have_it_too() -> None:
    """Of what a program calls."""
    for call in (aiockpt.make_token, aiockpt.Auth):
        assert "token" in inspect.signature(call).parameters
        assert not set(map(OTHER_NAMES.search, inspect.signature(call).parameters)) - {
            None
        }
