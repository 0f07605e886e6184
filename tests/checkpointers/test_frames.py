"""A save and a load are short ways: few frames lie between a verb and the disk."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import aiockpt
from aiockpt import CheckpointerConfig

PACKAGE = str(Path(aiockpt.__file__).parent)
MOST = 15
STATE = {"weight": torch.ones(1 << 20)}


class Spy:
    """Notes our own frames whenever the package calls one of some system calls."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.ways: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in self.calls:
            self.ways.append([*self._own(frame)])

    @property
    def longest(self) -> list[str]:
        """The longest way, from the system call outwards."""
        return max(self.ways, key=len)

    def _own(self, frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                yield frame.f_code.co_qualname
            frame = frame.f_back


@contextmanager
def watching(*calls: str) -> Iterator[Spy]:
    """Watch this thread, and those that are started meanwhile."""
    spy = Spy(*calls)
    threading.setprofile(spy)
    sys.setprofile(spy)
    try:
        yield spy
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_save(tmp_path: Path) -> None:
    """From ``save`` to the write that fills the file."""
    with aiockpt.make_sync_checkpointer() as made, watching("pwritev") as spy:
        made.save(STATE, tmp_path / "c")
    assert spy.longest[-1] == "SyncCheckpointer.save"
    assert len(spy.longest) <= MOST, spy.longest


def test_a_background_write(tmp_path: Path) -> None:
    """From the top of the writer's thread."""
    config = CheckpointerConfig(use_process=False)
    with (
        watching("pwritev") as spy,
        aiockpt.make_background_checkpointer(config) as made,
    ):
        made.save(STATE, tmp_path / "c").result(timeout=60)
    assert "write_staged" in spy.longest
    assert len(spy.longest) <= MOST, spy.longest


def test_a_load(tmp_path: Path) -> None:
    """From ``load`` to the read that fills the tensors."""
    with aiockpt.make_sync_checkpointer() as made:
        made.save(STATE, tmp_path / "c")
    with watching("preadv", "readinto") as spy:
        aiockpt.load(tmp_path / "c", {"weight": torch.zeros(1 << 20)})
    assert len(spy.longest) <= MOST, spy.longest
