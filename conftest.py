"""Runs the Python examples of the documentation as tests (``nox -s docs``).

Every ``python`` block runs, in the order of its page. One that cannot says why in a
comment before it, such as ``<!--- skip: next "needs two hosts" --->``.
"""

from __future__ import annotations

from sybil import Sybil
from sybil.parsers.markdown import SkipParser as MarkdownSkipParser
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser(), MarkdownSkipParser()],
    patterns=["README.md", "docs/**/*.md"],
).pytest()
