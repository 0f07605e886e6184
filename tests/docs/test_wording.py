"""Pages say one thing per sentence, and one thing has one name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import aiockpt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
SOURCES = [*Path(aiockpt.__file__).parent.rglob("*.py"), *ROOT.glob("examples/*.py")]
OTHER_NAMES = re.compile(r"capabilit|credential|\bsecrets?\b", re.IGNORECASE)
ANOTHER_THING = re.compile(
    r"credentials of (a host|containers)|(host|store)'s credentials|"
    r"credential provider|'import secrets; .*'"
)
"""What clouds give to their hosts is none of ours, and Python has a module."""

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


def test_the_token_has_one_name() -> None:
    """The pages, the help, the messages and the docstrings use one name."""
    found = [
        f"{path.name}:{number}: {text[:80]}"
        for path in [*PAGES, *SOURCES]
        for number, text in said(path)
        if OTHER_NAMES.search(ANOTHER_THING.sub("", " ".join(text.split())))
        and not re.fullmatch(r"[\w.]+", text)  # the name of a module
    ]
    assert found == []


ENTRY_PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(
        ROOT / "docs" / name
        for name in (
            "tutorial/quickstart.md",
            "howto/troubleshooting.md",
            "reference/api.md",
            "explanation/architecture.md",
            "explanation/comparison.md",
            "explanation/guarantees.md",
        )
    ),
]
"""What a newcomer reads first."""
LONGEST = 30


def sentences(text: str) -> Iterator[str]:
    """Return the sentences of a page without its code; a link counts as one word."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", "LINK", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )|\n(?=\|)", text):
        cells = block.split("|") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(cell.split()))


def test_sentences_end_before_the_reader_forgets_how_they_began() -> None:
    """Most have fewer than 25 words; none has many more."""
    assert list(sentences("One. Two [a b](c) more.")) == ["One.", "Two LINK more."]
    long = [
        f"{page.name}: {sentence}"
        for page in ENTRY_PAGES
        for sentence in sentences(page.read_text())
        if len(sentence.split()) > LONGEST
    ]
    assert long == []


def test_an_entry_of_the_changelog_is_one_line() -> None:
    """It says what a user needs to know; the pages say the rest."""
    _, _, text = (ROOT / "CHANGELOG.md").read_text().partition("\n## [")
    lines = [line for line in text.splitlines()[1:] if line]
    assert len(lines) > 100
    assert [line for line in lines if not line.startswith(("- ", "#"))] == []
    assert [line for line in lines if len(line) > 125] == []


def test_the_glossary_says_each_word_in_one_sentence() -> None:
    """Each word is there once, in the order of the alphabet."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    _, _, text = page.partition("\n## Glossary\n")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)[1:]
    words = [word for word, _ in rows]
    assert len(words) > 40
    assert words == sorted(set(words))
    assert [word for word, meaning in rows if len([*sentences(meaning)]) > 2] == []
    assert [word for word, meaning in rows if not meaning.endswith(".")] == []
