"""``aiockpt ls``: list the complete checkpoints of a directory, and name others."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from aiockpt.cli.text import counted, format_bytes, format_table
from aiockpt.errors import StorageError
from aiockpt.runtime.words import command_line, printable
from aiockpt.storage.directory import (
    ATTEMPT,
    MARKER,
    RANK_FILE,
    Checkpoint,
    expanded,
)
from aiockpt.storage.interface import find_checkpoint, list_checkpoints, storage_at

_HEADS = ("NAME", "STEP", "RANKS", "SIZE", "SAVED")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    place: Path = arguments.directory
    where = storage_at(place)
    _, names = where.listed()
    found = where.checkpoints()
    if not found and (itself := find_checkpoint(place)):
        found = [itself]
    if arguments.json:
        json.dump([_described(each) for each in found], sys.stdout, indent=2)
        print()
    elif found:
        for line in format_table(
            _HEADS, map(_row, found), right=(1, 2, 3), hint=" (--json)"
        ):
            print(line)
    whole = {each.name for each in found}
    for name in names:
        if name not in whole and (why := _what_is_wrong(place / name)):
            print(f"{printable(name)}: {why}", file=sys.stderr)
    if not found:
        _guide(place, names)
    return 0


def _guide(place: Path, names: list[str]) -> None:
    """Say that there is no checkpoint, and which directories below hold some."""
    lines, start = [], expanded(place)
    if start.startswith("-"):  # "." is the start of such a name, too
        start = os.path.join(".", start)
    for name in names:
        with suppress(StorageError):
            if count := len(list_checkpoints(place / name)):
                command = command_line("aiockpt", "ls", os.path.join(start, name))
                lines.append(f"  {counted(count, 'checkpoint')}: {command}")
    below = ", but there are some below:" if lines else ""
    print(
        f"{printable(expanded(place))}: there is no checkpoint here{below}",
        file=sys.stderr,
    )
    for line in lines:
        print(line, file=sys.stderr)


def _what_is_wrong(path: Path) -> str:
    """Return what is incomplete at a path; empty if it is not a checkpoint of ours."""
    if ATTEMPT.fullmatch(path.name):
        return ""
    hidden = path.name.startswith(".")
    if hidden and path.name.endswith((".part", ".old", ".trash")):
        return "not whole"
    try:
        files, directories = storage_at(path).listed()
    except StorageError as error:
        return f"cannot be read: {error.detail}"
    ours = any(each == MARKER or RANK_FILE.fullmatch(each) for each in files)
    ours = ours or any(map(ATTEMPT.fullmatch, directories))
    return "not whole" if ours else ""


def _described(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "name": checkpoint.name,
        "path": os.fspath(checkpoint),
        "step": checkpoint.step,
        "world_size": checkpoint.world_size,
        "bytes": checkpoint.nbytes,
        "serial": checkpoint.serial,
        "saved": checkpoint.saved_at,
    }


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.saved_at))
    return (
        checkpoint.name,
        str(checkpoint.step),
        str(checkpoint.world_size),
        format_bytes(checkpoint.nbytes),
        when,
    )
