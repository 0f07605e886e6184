"""Runs the Python examples of the documentation as tests (``nox -s docs``).

Every ``python`` block runs, in the order of its page. A block whose first line is
``# from examples/fsdp.py`` is an excerpt of that file, which a test runs instead;
``tests/docs/test_programs_of_pages.py`` compares the two.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from sybil import Document, Region, Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser


def elsewhere(namespace: dict[str, Any]) -> None:
    """Run a page in a directory of its own, where its examples may leave files."""
    stack = namespace["_elsewhere"] = ExitStack()
    stack.callback(os.chdir, os.getcwd())
    os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))
    namespace["__name__"] = "__main__"  # what runs a script has; aiohttp's keys want it


def back(namespace: dict[str, Any]) -> None:
    """Remove it."""
    namespace["_elsewhere"].close()


def programs(document: Document) -> Iterator[Region]:
    """Find the Python blocks of a page that are no excerpts of a file."""
    for region in PythonCodeBlockParser()(document):
        if not region.parsed.startswith("# from "):
            yield region


pytest_collect_file = Sybil(
    parsers=[programs, SkipParser()],
    patterns=["README.md", "docs/**/*.md"],
    setup=elsewhere,
    teardown=back,
).pytest()
