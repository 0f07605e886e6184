"""What needs an extra says how to install it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.torch_free


def test_the_room_for_torchft_names_its_extra() -> None:
    """As the kind of error that a missing module is."""
    program = (
        "import sys; sys.modules['torchft'] = None\n"
        "try: import aiockpt.torchft\n"
        "except ModuleNotFoundError as error: print(error.name, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "torchft aiockpt.torchft needs torchft, which is not installed: "
        "pip install 'aiockpt[torchft]'\n"
    )


def test_the_suites_name_their_extra() -> None:
    """A program without pytest gets the other tools of ``aiockpt.testing`` only."""
    program = (
        "import sys; sys.modules['pytest'] = None\n"
        "import aiockpt.testing; aiockpt.testing.FaultProxy\n"
        "try: aiockpt.testing.TransportConformance\n"
        "except ModuleNotFoundError as error: print(error.name, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "pytest the suites of aiockpt.testing need pytest, which is not installed: "
        "pip install 'aiockpt[testing]'\n"
    )


@pytest.mark.usefixtures("fresh_interpreters")
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True set()\n"
