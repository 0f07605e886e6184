"""What needs an extra says how to install it."""

from __future__ import annotations

import subprocess
import sys

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
