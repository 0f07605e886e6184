"""A program in a page runs, or is an excerpt of a file that a test runs."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pytest
from sybil import Document

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*/**/*.md"))]
LEFT_OUT = "# ..."


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page."""
    found = re.findall(
        r"^( *)(`{3,})python\n(.*?)^\1\2$", text, re.MULTILINE | re.DOTALL
    )
    return [dedent(source) for _, _, source in found]


def pieces(block: str) -> list[list[str]]:
    """Split an excerpt where it leaves lines out, without its first line."""
    parts = groupby(block.splitlines()[1:], lambda line: line.strip() == LEFT_OUT)
    return [[*lines] for is_left_out, lines in parts if not is_left_out]


def missing(block: str, source: str) -> str:
    """Return the first piece of an excerpt that the file lacks; "" if it has all.

    The pieces come in the order of the file. Only their indentation may differ.
    """
    lines, start = source.splitlines(), 0
    for piece in pieces(block):
        wanted = dedent("\n".join(piece)).strip("\n")
        size = len(wanted.splitlines())
        for at in range(start, len(lines) - size + 1):
            if dedent("\n".join(lines[at : at + size])) == wanted:
                start = at + size
                break
        else:
            return wanted
    return ""


def test_no_other_page_has_programs() -> None:
    """The docs session looks for none in them."""
    others = {*ROOT.glob("docs/**/*.md")} - {*PAGES}
    assert [page.name for page in others if blocks(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_excerpt_is_in_its_file(page: Path) -> None:
    """A page shows the program as it stands in a file that a test runs."""
    for block in blocks(page.read_text()):
        if found := re.match(r"# from (\S+)\n", block):
            assert found[1].startswith(("examples/", "tests/"))
            assert missing(block, (ROOT / found[1]).read_text()) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_other_program_runs(page: Path) -> None:
    """The docs session leaves out nothing but excerpts, and a reader sees them all."""
    text = page.read_text()
    spec = spec_from_file_location("of_the_pages", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    run = [dedent(str(each.parsed)) for each in module.programs(Document(text, "page"))]
    assert run == [each for each in blocks(text) if not each.startswith("# from ")]
    holes = re.findall(r"skip: \w+|literalinclude", text)
    assert holes == []
