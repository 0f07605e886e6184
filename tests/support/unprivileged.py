"""Checkpoints as a user meets them who may not do everything, unlike root.

``unprivileged.py DIRECTORY`` expects places with a checkpoint of root in it: one for
each of ``KINDS``, and ``mine``, which is everybody's. It becomes the user nobody, and
prints what each call says, as one JSON document.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt import CheckpointerConfig
from aiockpt.checkpointers import CheckpointWriterConfig
from aiockpt.cli import main

NOBODY = 65534

# Others may read the first; not enter, or not list the next two; not enter the
# checkpoint itself, or only list it.
KINDS = ("open", "closed", "blind", "sealed", "listed")


def command(*arguments: object) -> str:
    """Run the command line; return its code and the first line that it said."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main([str(each) for each in arguments])
    return f"{code}: {said.getvalue().splitlines()[0]}"


def load(path: Path) -> Any:
    """Load what root has saved."""
    with aiockpt.make_sync_checkpointer() as made:
        return made.load(path)["a"]


def save(path: Path, **options: Any) -> None:
    """Save."""
    config = CheckpointerConfig(writer_config=CheckpointWriterConfig(**options))
    with aiockpt.make_sync_checkpointer(config) as made:
        made.save({"a": 1}, path)


def in_the_background(path: Path) -> bool:
    """Save in a thread; say whether it is there."""

    async def saved() -> bool:
        config = CheckpointerConfig(use_process=False)
        async with aiockpt.make_async_checkpointer(config) as made:
            return await (await made.save({"a": 1}, path)).written()

    return asyncio.run(saved())


def latest(directory: Path) -> int | None:
    """Return the step of the latest one."""
    found = aiockpt.latest(directory)
    return None if found is None else found.step


def recover(directory: Path, runtime_dir: str | None) -> object:
    """Take over what another user's process keeps."""
    return asyncio.run(aiockpt.recover(directory, runtime_dir=runtime_dir))


def calls(place: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is tried, by name."""
    mine = place / "mine"
    yield "save mine", partial(save, mine / "step-2", keep_last=1)
    yield "latest mine", partial(latest, mine)
    yield "recover theirs", partial(recover, place / "open", str(place / "run"))
    yield "recover nothing", partial(recover, place / "open", None)
    for kind in KINDS:
        there, new = place / kind / "step-1", place / kind / "step-2"
        file = there / "checkpoint_0.safetensors"
        yield f"load {kind}", partial(load, there)
        yield f"load file {kind}", partial(load, file)
        yield f"latest {kind}", partial(latest, place / kind)
        yield f"save {kind}", partial(save, there)
        yield f"save new {kind}", partial(save, new)
        yield f"background {kind}", partial(in_the_background, new)
        yield f"ls {kind}", partial(command, "ls", place / kind)
        yield f"verify {kind}", partial(command, "verify", there)
        yield f"inspect {kind}", partial(command, "inspect", there)
        out = mine / f"{kind}.pt"
        yield f"convert {kind}", partial(command, "convert", there, out)
        into = place / kind / "m.pt"
        yield f"convert into {kind}", partial(command, "convert", mine / "step-1", into)


def tried(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class and the sentence of what it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is told
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as warm:  # what is imported now is there later
        for kind in (*KINDS, "mine"):
            save(Path(warm) / kind / "step-1")
        for _, call in calls(Path(warm)):
            tried(call)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    outcome = {name: tried(call) for name, call in calls(Path(sys.argv[1]))}
    json.dump(outcome, sys.stdout, indent=1)
