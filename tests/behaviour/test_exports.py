"""The public face: its names, where they live, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aiockpt
from aiockpt import checkpointers, errors

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

NEEDS_TORCH = {
    "AsyncCheckpointer",
    "BackgroundCheckpointer",
    "BackgroundTransport",
    "HTTPTransport",
    "PGTransport",
    "Prepared",
    "SyncCheckpointer",
    "fingerprint",
    "load",
    "make_async_checkpointer",
    "make_background_checkpointer",
    "make_background_transport",
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
    return set(printed_by(f"{statement}\n{report}").split())


def test_the_first_namespace_fits_on_a_screen() -> None:
    """``__all__`` is the lazy names, the errors that programs catch, the version."""
    caught = {name for name in aiockpt.__all__ if hasattr(errors, name)}
    lazy = declared_to_type_checkers(aiockpt)
    assert {*aiockpt.__all__} == {*lazy, *caught, "__version__"}
    assert aiockpt.__all__ == sorted(aiockpt.__all__)
    assert len(aiockpt.__all__) <= 40
    assert len(caught) <= 7


def test_the_checkpointers_have_a_face_of_their_own() -> None:
    """The package exports what the root does not, and loads a name at its first use."""
    homes = declared_to_type_checkers(checkpointers)
    assert checkpointers.__all__ == sorted(homes)
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    for name, home in homes.items():
        value = getattr(checkpointers, name)
        assert value is getattr(import_module(home), name)


def test_public_names_are_there() -> None:
    """Each loads, from the module that type checkers see, and is then kept."""
    homes = declared_to_type_checkers(aiockpt)
    for name in aiockpt.__all__:
        if name in NEEDS_TORCH and find_spec("torch") is None:
            continue
        value = getattr(aiockpt, name)
        assert vars(aiockpt)[name] is value
        if home := homes.get(name):
            assert value is getattr(import_module(home), name)


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    """Completion at a prompt shows the whole face."""
    program = "import aiockpt; print(*{*aiockpt.__all__} - {*dir(aiockpt)})"
    assert printed_by(program) == ""


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    """The lazy lookup fails as a plain module does."""
    with pytest.raises(AttributeError, match=r"'aiockpt'.*'HTTPTransprot'"):
        _ = aiockpt.HTTPTransprot  # type: ignore[attr-defined]


def test_importing_loads_neither_torch_nor_aiohttp() -> None:
    """``import aiockpt`` and ``aiockpt --help`` are quick."""
    statement = (
        "import aiockpt.errors, aiockpt.cli, aiockpt.format, aiockpt.events\n"
        "import aiockpt.checkpointers\n"
        "aiockpt.http.__all__, aiockpt.testing.__all__\n"
        "aiockpt.CheckpointTransport, aiockpt.Limits, aiockpt.Progress"
    )
    assert loaded_by(statement) == set()


def printed_by(program: str) -> str:
    """Run a program in a fresh interpreter; return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("missing", "statement", "said"),
    [
        (
            "torchft",
            "import aiockpt.torchft",
            (
                "torchft aiockpt.torchft needs torchft, which is not installed: "
                "pip install 'aiockpt[torchft]'"
            ),
        ),
        (
            "pytest",
            (
                "import aiockpt.testing; aiockpt.testing.FaultProxy; "
                "aiockpt.testing.TransportConformance"
            ),
            (
                "pytest the suites of aiockpt.testing need pytest, which is not "
                "installed: pip install 'aiockpt[testing]'"
            ),
        ),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(
    missing: str, statement: str, said: str
) -> None:
    """The error is a ModuleNotFoundError that names the extra."""
    program = (
        f"import sys; sys.modules[{missing!r}] = None\ntry: {statement}\n"
        "except ModuleNotFoundError as error: print(error.name, error)\n"
    )
    assert printed_by(program) == said


def test_the_command_line_loads_no_test_tools() -> None:
    """Neither ``aiockpt`` nor any of its commands needs the extra ``testing``."""
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    program = (
        "import pkgutil, sys\n"
        "from importlib import import_module\n"
        "import aiockpt.cli\n"
        "found = pkgutil.walk_packages(aiockpt.cli.__path__, 'aiockpt.cli.')\n"
        "names = [each.name for each in found]\n"
        "for name in names: import_module(name)\n"
        "print(len(names) > 5, {'aiockpt.testing', 'pytest'} & {*sys.modules})"
    )
    assert printed_by(program) == "True set()"


def test_nothing_runs_in_the_default_executor() -> None:
    """It is shared by all, and closing a loop waits for it."""
    found = [
        f"{path}:{node.lineno}"
        for path in sorted(Path(aiockpt.__file__).parent.rglob("*.py"))
        if "run_in_executor" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "run_in_executor"
        and (not node.args or ast.unparse(node.args[0]) == "None")
    ]
    assert not found
