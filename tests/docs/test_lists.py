"""Lists on the pages have what the code has."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt import prometheus
from aiockpt.http import acceptor, admission, problems, protocol
from aiockpt.swarm import endpoint, tracker
from aiockpt.testing import assert_same

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
EXPLANATION = ROOT / "docs" / "explanation"


def stops_in(node: ast.AST) -> Iterator[ast.AST]:
    """Return the stops of the event that a node makes; they may be one of two."""
    match node:
        case ast.Call(func=ast.Name(id="TransferEvent")):
            for each in node.keywords:
                if each.arg == "stop":
                    yield from ast.walk(each.value)
        case ast.Call(func=ast.Name(id="_announce"), args=[_, stop, *_]):
            yield from ast.walk(stop)  # of a checkpointer, with the handle first


def phases_in(node: ast.AST) -> Iterator[ast.AST]:
    """Return the phase of the progress report, or the deadline, that a node makes."""
    match node:
        case ast.Call(func=ast.Attribute(attr="at"), args=[stop]):
            yield stop
        case ast.Call(func=ast.Name(id="Deadline" | "Progress")):
            named = ("phase", "stop")
            yield from (each.value for each in node.keywords if each.arg in named)
        case ast.Assign(targets=[ast.Attribute(attr="phase")]):
            yield node.value


@functools.cache
def of_the_package() -> tuple[set[str], set[str]]:
    """Return the stops of all events that the package emits, and all phases."""
    stops, phases = set[str](), set[str]()
    for path in (ROOT / "aiockpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for words, kind in ((stops, stops_in), (phases, phases_in)):
                constants = (e for e in kind(node) if isinstance(e, ast.Constant))
                words.update(str(each.value) for each in constants)
    return stops, phases


def test_each_stop_of_an_event_has_its_row() -> None:
    """A program that handles events finds all of them in the table, and no other."""
    text = (HOWTO / "observing.md").read_text()
    table = text.partition("| `stop` |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    on_page = {stop for cell in cells for stop in re.findall(r"`(\w+)`", cell)}
    emitted, _ = of_the_package()
    assert len(emitted) > 10
    assert on_page == emitted


def test_each_metric_has_its_row() -> None:
    """The page leaves out the beginning of a name that the row has already."""
    text = (HOWTO / "observing.md").read_text()
    for figures in (prometheus._TRANSPORT, prometheus._CHECKPOINTER):
        for figure in figures:
            name = f"{figure.name}_total" if figure.total else figure.name
            assert re.search(rf"`(aiockpt_\w+|\.\.\.)_{name}`", text), name


class QuantizedTensor(torch.Tensor):
    """A tensor subclass of plain tensors, with torch's protocol for them."""

    def __new__(cls, data: Any, scale: Any, group: int) -> QuantizedTensor:
        """Make the wrapper, which has no memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: QuantizedTensor = make(cls, data.shape, dtype=scale.dtype)
        return made

    def __init__(self, data: Any, scale: Any, group: int) -> None:
        self.data_, self.scale, self.group = data, scale, group

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        """Name the tensors inside, and the rest."""
        return ["data_", "scale"], {"group": self.group}

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: Any, context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        """Make it of its parts."""
        del outer_size, outer_stride
        return cls(tensors["data_"], tensors["scale"], context["group"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse everything else."""
        raise NotImplementedError(f"{function} of a quantized tensor")


def test_the_page_saves_a_tensor_subclass(tmp_path: Path) -> None:
    """Its program registers any subclass that names its parts."""
    text = (HOWTO / "extending.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [program] = [each for each in blocks if "def register_subclass" in each]
    namespace: dict[str, Any] = {"aiockpt": aiockpt}
    exec(program, namespace)
    namespace["register_subclass"](QuantizedTensor)
    parts = torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 4)
    weight = QuantizedTensor(*parts, group=4)
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save({"weight": weight}, tmp_path / "step-4")
    for template in (None, {"weight": None}):
        loaded = aiockpt.load(tmp_path / "step-4", into=template)["weight"]
        assert_same((loaded.data_, loaded.scale), parts)
        assert (loaded.group, loaded.shape) == (4, (4, 4))


def test_the_platform_is_that_of_the_whole_suite() -> None:
    """The page names the torch of the pins, and the Pythons of the classifiers."""
    text = " ".join((EXPLANATION / "guarantees.md").read_text().split())
    _, _, limits = text.partition("**Platform.**")
    pins = (ROOT / "constraints.txt").read_text()
    [torch_pin] = re.findall(r"^torch==(\d+\.\d+)\.", pins, re.MULTILINE)
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    for word in (f"torch {torch_pin}", *pythons):
        assert word in limits.partition("**")[0], word


def test_each_pinned_integration_is_a_limit() -> None:
    """An extra that works with one version only is on the page, with that version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        name: version
        for name, requirements in extras["optional-dependencies"].items()
        for each in requirements
        for package, _, version in [each.partition("==")]
        if package == name and (ROOT / "aiockpt" / name).exists()
    }
    assert pinned.keys() == {"torchft", "vllm"}
    page = (EXPLANATION / "guarantees.md").read_text()
    _, _, text = page.partition("**Integrations.**")
    for name, version in pinned.items():
        assert re.search(
            rf"(?i){name}\b.{{0,60}}?{re.escape(version)}", text, re.DOTALL
        )
        assert f"../howto/{name}.md" in text


def test_each_phase_has_its_row() -> None:
    """The architecture page explains each phase, and no other."""
    page = (EXPLANATION / "architecture.md").read_text()
    text = page.partition("\n## Phases\n")[2].partition("\n## ")[0]
    _, phases = of_the_package()
    assert len(phases) > 10
    assert {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)} == phases


def test_the_limits_of_the_pages_are_those_of_the_code() -> None:
    """A reader who plans for many receivers relies on these numbers."""
    limits, mib = aiockpt.Limits(), 1 << 20
    on_pages = {
        "explanation/security.md": [
            f"a header of {limits.max_header_bytes // mib} MiB",
            f"strings of {limits.max_text_bytes // mib} MiB",
            f"{limits.max_depth} levels",
            f"{limits.max_nodes:,} nodes",
            f"{limits.max_tensors:,} tensors",
            f"{aiockpt.Server().readers} by default",
            f"Up to {admission._MAX_WAITING:,} requests wait",
            f"and {admission._MAX_WAITING_OF_HOST} of one",
            f"at most {acceptor._MAX_STRANGERS:,}",
            f"at most {tracker._MAX_MEMBERS_OF_HOST} of one address",
            f"{tracker._MAX_MEMBERS:,} in all",
            f"at most {endpoint._MAX_WATCHERS}, {endpoint._MAX_WATCHERS_OF_HOST} of",
        ],
        "explanation/guarantees.md": [f"At most {protocol.MAX_SENDERS:,} ranks"],
    }
    for name, phrases in on_pages.items():
        text = " ".join((ROOT / "docs" / name).read_text().split())
        assert [phrase for phrase in phrases if phrase not in text] == []


def test_each_status_of_an_error_has_its_row() -> None:
    """Whoever writes a receiver finds each type and each status in the table."""
    text = (ROOT / "docs" / "reference" / "wire-format.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| `([\w-]+)` \| (.*) \|$", text, re.MULTILINE)
    on_page = {(int(each), kind) for all_, kind, _ in rows for each in all_.split(", ")}
    assert {(row.status, row.kind) for row in problems._TABLE} <= on_page
    named = {kind: meaning for _, kind, meaning in rows}
    for row in problems._TABLE:
        if row.error.__name__ in aiockpt.errors.__all__ and row.kind != "closing":
            assert f"`{row.error.__name__}`" in named[row.kind]
