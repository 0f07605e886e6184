"""The public face: its names, where they live, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import aiockpt
from aiockpt import checkpointers, errors

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

NEEDS_TORCH = {
    "AsyncCheckpointer",
    "BackgroundCheckpointer",
    "HTTPTransport",
    "PGTransport",
    "SyncCheckpointer",
    "load",
    "make_async_checkpointer",
    "make_background_checkpointer",
    "make_sync_checkpointer",
    "recover",
    "register_leaf",
}
HEAVY = ("torch", "aiohttp", "anyio", "numpy")


def declared_to_type_checkers(package: ModuleType) -> dict[str, str]:
    """Return name -> module of the imports under ``if TYPE_CHECKING``."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [
        node
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "aiockpt"
    ]
    return {
        alias.asname or alias.name: node.module or ""
        for node in imports
        for alias in node.names
    }


def loaded_by(statement: str) -> set[str]:
    """Return which heavy libraries a fresh interpreter loads for a statement."""
    report = f"import sys; print(*(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_the_first_namespace_fits_on_a_screen() -> None:
    """``__all__`` is the lazy names, the errors that programs catch, the version."""
    caught = {name for name in aiockpt.__all__ if hasattr(errors, name)}
    assert {*aiockpt.__all__} == {*aiockpt._HOMES, *caught, "__version__"}
    assert aiockpt.__all__ == sorted(aiockpt.__all__)
    assert len(aiockpt.__all__) <= 40
    assert len(caught) <= 7


def test_every_error_is_in_its_room() -> None:
    """Also those that are in the first namespace."""
    ours = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AiockptError)
    ]
    assert {*errors.__all__} >= {*ours}


@pytest.mark.parametrize("room", ["checkpointers", "errors", "http", "testing"])
def test_rooms_are_there_after_importing_the_package(room: str) -> None:
    """And nothing heavy is loaded for it."""
    assert loaded_by(f"import aiockpt; aiockpt.{room}.__all__") == set()


def test_type_checkers_and_the_lazy_table_see_the_same_names() -> None:
    """A name cannot be added to one of the two only."""
    assert declared_to_type_checkers(aiockpt) == aiockpt._HOMES


def test_the_checkpointers_have_a_face_of_their_own() -> None:
    """The room shows what the root does not; nothing loads before its use."""
    assert declared_to_type_checkers(checkpointers) == checkpointers._HOMES
    assert checkpointers.__all__ == sorted(checkpointers._HOMES)
    assert loaded_by("import aiockpt.checkpointers") == set()
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    for name, home in checkpointers._HOMES.items():
        value = getattr(checkpointers, name)
        assert value is getattr(import_module(home), name)
        assert name in import_module(home).__all__


@pytest.mark.parametrize("name", sorted(aiockpt.__all__))
def test_public_name_is_there(name: str) -> None:
    """Each public name loads, is public at home too, and is then kept."""
    if name in NEEDS_TORCH and find_spec("torch") is None:
        pytest.skip("needs torch")
    value = getattr(aiockpt, name)
    assert vars(aiockpt)[name] is value
    if home := aiockpt._HOMES.get(name):
        assert name in import_module(home).__all__


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    """Completion at a prompt shows the whole face."""
    report = "import aiockpt; print(*{*aiockpt.__all__} - {*dir(aiockpt)})"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    """The lazy lookup fails as a plain module does."""
    with pytest.raises(AttributeError, match=r"'aiockpt'.*'HTTPTransprot'"):
        _ = aiockpt.HTTPTransprot  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["aiockpt", "aiockpt.errors", "aiockpt.cli"])
def test_importing_loads_neither_torch_nor_aiohttp(module: str) -> None:
    """``import aiockpt`` and ``aiockpt --help`` are quick."""
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("name", ["CheckpointTransport", "Limits", "Progress"])
def test_light_name_loads_nothing_heavy(name: str) -> None:
    """What needs neither torch nor aiohttp does not bring them in."""
    assert loaded_by(f"import aiockpt; aiockpt.{name}") == set()


@pytest.mark.parametrize("name", ["aiockpt.format", "aiockpt.events"])
def test_lower_rooms_load_nothing_heavy(name: str) -> None:
    """The wire format can be read by a program that has no torch."""
    assert loaded_by(f"import {name}") == set()
