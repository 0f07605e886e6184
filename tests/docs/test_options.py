"""The reference shows every option, and docstrings say what each of them does."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import checkpointers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()


def shown() -> Iterator[tuple[str, Any]]:
    """Yield what Sphinx shows on the page: classes, functions and their methods."""
    for name, options in re.findall(
        r"^\.\. auto(?:class|function):: ([\w.]+)(?:\(\))?\n((?:   .*\n)*)",
        PAGE,
        re.MULTILINE,
    ):
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
        yield attribute, found
        if isinstance(found, type):
            for member in re.findall(r"[a-z_]\w+", options.replace(":members:", "")):
                if inspect.isfunction(method := getattr(found, member, None)):
                    yield f"{attribute}.{member}", method


SHOWN = dict(shown())
CONFIGS = {name for name in checkpointers.__all__ if name.endswith("Config")}
OPTIONS = {
    *("HTTPTransport", "Server", "Swarm", "Auth", "Receive", "Limits", "PGTransport"),
    *("HTTPTransport.recv_checkpoint", "HTTPTransport.prepare", "load"),
    *("RankInfo", "TCPStoreBarrier", "make_async_checkpointer", *CONFIGS),
}
"""What has options that a user chooses."""

KEYWORDS = ("unknown", "own", "kwargs", "arguments", "options")
"""The names of ``**`` in docstrings."""


def options_of(described: Any) -> list[str]:
    """Return the names of the options that a signature has."""
    parameters = inspect.signature(described).parameters.values()
    hidden = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        each.name
        for each in parameters
        if each.kind not in hidden and each.name not in ("self", "unknown")
    ]


def explained(described: Any) -> dict[str, str]:
    """Return the names in the ``Args:`` or ``Attributes:`` of a docstring."""
    text = inspect.getdoc(described) or ""
    section = re.search(
        r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, re.MULTILINE
    )
    entries = re.split(
        r"^    (?=\w[\w, ]*: )", section[1] if section else "", flags=re.MULTILINE
    )
    found: dict[str, str] = {}
    for entry in entries[1:]:
        names, _, meaning = entry.partition(":")
        found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return found


def test_what_has_options_is_on_the_page() -> None:
    """A new record of options gets its place in the reference."""
    assert len(CONFIGS) > 4
    assert SHOWN.keys() >= OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_each_option_is_explained(name: str) -> None:
    """The docstring says in a sentence what each option does."""
    meanings = explained(SHOWN[name])
    assert [each for each in options_of(SHOWN[name]) if each not in meanings] == []
    assert all(text.endswith((".", ")")) for text in meanings.values())


def test_no_docstring_explains_an_option_that_is_gone() -> None:
    """What a function does not take, its docstring does not name."""
    gone = {
        name: left
        for name, described in SHOWN.items()
        if inspect.isfunction(described)
        if (left := explained(described).keys() - {*options_of(described), *KEYWORDS})
    }
    assert gone == {}


def test_torchft_transports_have_no_options_of_their_own() -> None:
    """The page says that they take those of the transports that they wrap."""
    for file, record, wrapped in (
        ("http.py", "HTTPOptions", aiockpt.HTTPTransport),
        ("group.py", "GroupOptions", aiockpt.PGTransport),
    ):
        # torchft need not be installed, so the source is read and not imported.
        tree = ast.parse((ROOT / "aiockpt" / "torchft" / file).read_text())
        fields = [
            field.target.id
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == record
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        assert fields
        assert set(fields) <= set(options_of(wrapped))


def test_each_environment_variable_has_its_row() -> None:
    """Every variable that the package reads, and no other."""
    reads = re.compile(
        r"""(?:environ|env)(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z]+_[A-Z_]*IFNAME)":"""
    )
    read = {
        one or other
        for path in (ROOT / "aiockpt").rglob("*.py")
        for one, other in reads.findall(path.read_text())
    }
    assert {"AIOCKPT_TOKEN", "NCCL_SOCKET_IFNAME"} <= read
    assert {*re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)} == read
