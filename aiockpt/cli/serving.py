"""What ``aiockpt serve`` offers: a file, or which checkpoint of a directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.cli.rankfiles import one_file
from aiockpt.errors import CheckpointNotFoundError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.storage.directory import find_checkpoint, list_checkpoints
from aiockpt.storage.files import named

if TYPE_CHECKING:
    from aiockpt.storage.statefile import StateFile

__all__ = ["Chosen", "choose"]

_READABLE = re.compile(r".*\.safetensors|checkpoint_[0-9]+\.pt")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be served: one file, or a directory of another tool's.

    Attributes:
        path: Where it is, as the person named it.
        file: What to read.
        rank: Whose file of a directory; None where ``file`` says it.
        remark: Why it was chosen, if a directory held several.
    """

    path: Path
    file: Path
    rank: int | None
    remark: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        with named(self.file):
            files = [*self.file.iterdir()] if self.file.is_dir() else [self.file]
            return sum(each.stat().st_size for each in files if each.is_file())

    def name_for(self, step: int) -> str:
        """Return how to call what is fetched: it names the step once."""
        stem = self.path.stem if self.path == self.file else self.path.resolve().name
        return stem if stem.endswith(f"step-{step}") else f"{stem}-step{step}"

    def read(self) -> StateFile:
        """Return the state dict; the digests of our own files are verified first."""
        from aiockpt.checkpointers.config import RankInfo
        from aiockpt.checkpointers.reader import CheckpointReader
        from aiockpt.storage.statefile import StateFile, read_state_file

        if not self.file.is_dir():
            return read_state_file(self.file, limits=FILE_LIMITS)
        reader = CheckpointReader(RankInfo(0, 1))
        return StateFile(reader.read(self.file, mmap=True, rank=self.rank)[0], None)


def choose(path: Path, rank: int | None) -> Chosen:
    """Return what to serve of a path.

    Raises:
        StorageError: there is nothing, or nothing that could be served.
        UsageError: several ranks wrote it, and none was chosen.
    """
    with named(path):
        path.stat()
    if not path.is_dir() or find_checkpoint(path):
        return Chosen(path, one_file(path, rank), None)
    if found := list_checkpoints(path):
        last = found[-1].path
        remark = f"the latest of {len(found)} there, " if len(found) > 1 else ""
        return Chosen(last, one_file(last, rank), None, remark)
    with named(path):
        names = [each.name for each in path.iterdir()]
    if not any(_READABLE.fullmatch(name) for name in names):
        detail = "there is no checkpoint and no safetensors file in it"
        raise CheckpointNotFoundError(str(path), detail)
    return Chosen(path, path, rank)
