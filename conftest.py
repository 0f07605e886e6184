"""Runs the Python examples of the documentation as tests (``nox -s docs``).

Every ``python`` block runs, in the order of its page. One that cannot says why in a
comment before it, such as ``<!--- skip: next "needs two hosts" --->``.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import Any

from sybil import Sybil
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


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/**/*.md"],
    setup=elsewhere,
    teardown=back,
).pytest()
