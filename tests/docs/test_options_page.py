"""The page of options has every option of the code, with its default, and no other."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt import checkpointers
from aiockpt.transport import REQUIRED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "options.md").read_text()
MIB = 1 << 20

RECORDS = {
    "HTTPTransport": aiockpt.HTTPTransport,
    "Server": aiockpt.Server,
    "Swarm": aiockpt.Swarm,
    "Auth": aiockpt.Auth,
    "Receive": aiockpt.Receive,
    "Limits": aiockpt.Limits,
    "recv_checkpoint": aiockpt.HTTPTransport.recv_checkpoint,
    "load": aiockpt.load,
    "PGTransport": aiockpt.PGTransport,
    "CheckpointerConfig": aiockpt.CheckpointerConfig,
    "CheckpointWriterConfig": checkpointers.CheckpointWriterConfig,
    "BarrierConfig": checkpointers.BarrierConfig,
    "TCPStoreBarrier": checkpointers.TCPStoreBarrier,
    "CheckpointStagerConfig": checkpointers.CheckpointStagerConfig,
    "CheckpointProcessConfig": checkpointers.CheckpointProcessConfig,
    "RankInfo": checkpointers.RankInfo,
}
"""The heading of each table, and whose signature it describes."""


def rows(heading: str) -> Iterator[list[str]]:
    """Return the cells of the table below a heading, without its first two lines."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def shown(name: str, default: Any) -> str:
    """Return a default as the page writes it."""
    if default in (inspect.Parameter.empty, REQUIRED):
        return "required"
    if name == "connections":
        assert default == min(4, os.cpu_count() or 4)
        return "`min(4, cores)`"
    if isinstance(default, int) and default and not default % MIB:
        return f"`{default // MIB} MiB`"
    if isinstance(default, int) and not isinstance(default, bool) and default > 9999:
        return f"`{default:,}`"
    if str(default) == "cpu":
        return "`cpu`"
    if type(default).__module__.startswith("aiockpt."):
        assert default == type(default)()
        return f"`{type(default).__name__}()`"
    return f"`{default!r}`"


def options_of(described: Any) -> dict[str, str]:
    """Return the options of a signature, and their defaults as the page writes them."""
    found = {}
    for name, parameter in inspect.signature(described).parameters.items():
        default = parameter.default
        if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            field = described.__dataclass_fields__[name]
            default = field.default_factory()
        if name != "self":
            found[name] = shown(name, default)
    return found


@pytest.mark.parametrize("heading", RECORDS)
def test_each_option_has_its_row(heading: str) -> None:
    """The rows have the signature's order and the code's defaults."""
    on_page = {cells[0].strip("`"): cells[2] for cells in rows(heading)}
    assert list(on_page.items()) == list(options_of(RECORDS[heading]).items())


@pytest.mark.parametrize("heading", RECORDS)
def test_each_row_says_what_the_option_does(heading: str) -> None:
    """A type and a meaning; the reason to change it may be absent."""
    for name, kind, _, meaning, _ in rows(heading):
        assert kind, name
        assert meaning.endswith("."), name


def test_every_record_of_options_has_a_table() -> None:
    """A new configuration class needs a section of its own."""
    configs = {name for name in checkpointers.__all__ if name.endswith("Config")}
    assert configs
    assert configs | {"Server", "Swarm", "Auth", "Receive", "Limits"} <= set(RECORDS)


def test_torchft_transports_have_no_options_of_their_own() -> None:
    """The page says that they take those of the transports that they wrap."""
    for file, record, heading in (
        ("http.py", "HTTPOptions", "HTTPTransport"),
        ("group.py", "GroupOptions", "PGTransport"),
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
        assert set(fields) <= set(options_of(RECORDS[heading]))


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
    assert {cells[0].strip("`") for cells in rows("Environment variables")} == read
