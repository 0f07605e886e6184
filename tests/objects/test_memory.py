"""A save and a load need little memory beside the state."""

from __future__ import annotations

import subprocess

import pytest

from tests.objects.conftest import Place
from tests.support.object_saver import COMMAND

MOST = 64 << 20
MIB = 128


@pytest.mark.usefixtures("fresh_interpreters")
def test_memory(place: Place) -> None:
    """A save in the foreground uploads the state's own memory, a few parts at once."""
    root, environment = place.child()
    path = f"{root}/{place.prefix}/run"
    used = {}
    for program in (("memory", path, str(MIB)), ("load_memory", path, str(MIB))):
        done = subprocess.run(
            [*COMMAND, *program],
            env=environment,
            check=True,
            timeout=200,
            capture_output=True,
            text=True,
        )
        used[program[0]] = int(done.stdout)
    print({name: f"{value / (1 << 20):.1f} MiB" for name, value in used.items()})
    assert max(used.values()) <= MOST
