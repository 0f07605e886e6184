"""What the pages say about the code is there, and what the code has is on the pages."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.proofs import CELLS, FAILURES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "explanation" / "architecture.md"


def names_in(file: Path) -> Iterator[str]:
    """Return the classes, functions and methods of a module."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | functions):
            yield node.name
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, functions))
            yield from (f"{node.name}.{each.name}" for each in inner)


def test_the_architecture_page_names_files_that_exist() -> None:
    """A file that moves takes its line on the page with it."""
    named = re.findall(r"`([a-z_/]+(?:\.py|\.md|/))`", ARCHITECTURE.read_text())
    assert len(named) > 30
    places = (ROOT / "aiockpt", ROOT)
    assert not [
        name for name in named if not any((place / name).exists() for place in places)
    ]


def test_the_architecture_page_names_functions_that_exist() -> None:
    """`Store.publish` in `http/store.py` is read where it is said to be."""
    text = re.sub(r"\s+", " ", ARCHITECTURE.read_text())
    pairs = re.findall(r"`([A-Za-z_.]+)` (?:in|\() ?`([a-z_/]+\.py)`", text)
    assert len(pairs) > 15
    assert not [
        f"{name} in {file}"
        for name, file in pairs
        if name not in names_in(ROOT / "aiockpt" / file)
    ]


def test_the_architecture_page_names_classes_that_exist() -> None:
    """A class, or a method of one, is on the page by its name in the code."""
    named = {*re.findall(r"`(_?[A-Z]\w+(?:\.\w+)?)`", ARCHITECTURE.read_text())}
    assert len(named) > 50
    files = (ROOT / "aiockpt").rglob("*.py")
    assert named <= {name for file in files for name in names_in(file)}


def test_the_torchft_page_names_tests_that_exist() -> None:
    """A promise without a test is none."""
    page = (DOCS / "howto" / "torchft.md").read_text()
    names = set(re.findall(r"`((?:Test|test_)\w+)`", page))
    assert len(names) > 20
    found = {
        name.rpartition(".")[2]
        for path in (ROOT / "tests" / "torchft").glob("test_*.py")
        for name in names_in(path)
    }
    assert names <= found
    files = re.findall(r"`(?:tests/torchft/)?(test_\w+\.py)`", page)
    assert not [
        file for file in files if not (ROOT / "tests" / "torchft" / file).exists()
    ]


def test_every_word_of_the_table_of_failures_is_explained() -> None:
    """The list explains each word of the table, and no other."""
    _, _, text = FAILURES.read_text().partition("## The words")
    explained = re.findall(r"^\* \*\*(.+?)\*\*", text, re.MULTILINE)
    used = {
        word
        for cell in CELLS.values()
        for end in cell.left.split(" / ")
        for word in end.split(", ")
    }
    assert sorted(explained) == sorted({*used, "—"})


def public_coroutines() -> Iterator[str]:
    """Return the coroutines of the reference, without abstract ones and test tools."""
    text = (DOCS / "reference" / "api.md").read_text()
    for name, options in re.findall(
        r"\.\. auto(?:class|function):: ([\w.]+)(?:\(\))?\n((?:   .*\n)*)", text
    ):
        module, _, attribute = name.rpartition(".")
        found: Any = getattr(import_module(module), attribute)
        if name.startswith("aiockpt.testing") or inspect.isabstract(found):
            continue
        if inspect.iscoroutinefunction(found):
            yield found.__name__
        for member in re.findall(r"\w+", options.replace(":members:", "")):
            if inspect.iscoroutinefunction(getattr(found, member, None)):
                yield f"{found.__name__}.{member}"


def test_every_public_coroutine_has_a_row_in_the_table_of_failures() -> None:
    """What a new one leaves behind has to be thought through, too."""
    rows = set()
    for call, _ in CELLS:
        first, *others = call.split(", ")
        owner = first.rpartition(".")[0]
        rows |= {first, *(f"{owner}.{other}" for other in others)}
    public = set(public_coroutines())
    assert len(public) > 20
    assert public <= rows


def test_each_kind_of_threat_has_a_row() -> None:
    """Spoofing, tampering, repudiation, disclosure, denial of service, elevation."""
    page = (DOCS / "explanation" / "security.md").read_text()
    table = page.partition("## The threats, one by one")[2]
    assert set(re.findall(r"^\| ([A-Z])\d+ \|", table, re.MULTILINE)) == set("STRIDE")


def without_programs(page: Path) -> str:
    """Return the text of a page outside of its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what a repository calls the headings of a page in a link."""
    found = re.findall(r"^#+ (.+)$", without_programs(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in found}


def test_links_work_in_the_repository() -> None:
    """They have a text, and lead to a file and a heading, not to a label of Sphinx."""
    count = 0
    broken: list[str] = []
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    for page in [*ROOT.glob("*.md"), *pages]:
        text = without_programs(page)
        for name, link in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
            if "://" in link:
                continue
            count += 1
            path, _, anchor = link.partition("#")
            file = page.parent / path if path else page
            is_there = file.exists() and (
                not anchor or file.suffix != ".md" or anchor in anchors(file)
            )
            if not (name and is_there):
                broken.append(f"{page.relative_to(ROOT)}: [{name}]({link})")
    assert count > 100
    assert broken == []
