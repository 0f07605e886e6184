"""What a save reports is what is on the disk, whoever dies or hangs, and when."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import CheckpointerConfig, list_checkpoints
from aiockpt.checkpointers import (
    CheckpointProcessConfig,
    CheckpointWriterConfig,
    WriterHook,
)
from aiockpt.errors import StorageError, WorkerError
from tests.support.saving import load, note_pid, pass_gate, sync_checkpointer
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.timeout(120)


class Troubled(WriterHook):
    """A hook that does at one of its calls what the save's keywords say."""

    def _meet(self, when: str, at: str, trouble: str, gate: str) -> None:
        if when != at:
            return
        if trouble == "hang":
            note_pid(f"{gate}.reached")
            pass_gate(gate)
        elif trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble == "raise":
            raise ZeroDivisionError("on purpose")

    def pre_commit(
        self, path: str, at: str = "", trouble: str = "", gate: str = "", **_: Any
    ) -> None:
        self._meet("pre", at, trouble, gate)

    def post_commit(
        self, path: str, at: str = "", trouble: str = "", gate: str = "", **_: Any
    ) -> None:
        self._meet("post", at, trouble, gate)


def state(value: int) -> dict[str, Any]:
    """Return what is saved."""
    return {"v": value, "w": torch.full((9,), float(value))}


@pytest.fixture
def place(tmp_path) -> Path:
    """Return the directory of the checkpoints."""
    return tmp_path / "c"


def does(at: str, trouble: str, gate: str = "") -> Any:
    """Return the keywords of a save whose hook does that."""
    return {"at": at, "trouble": trouble, "gate": gate}


CONFIG = CheckpointerConfig(
    writer_config=CheckpointWriterConfig(keep_last=1, fsync=False)
)


async def outcome(handle: Any) -> str:
    """Say what the handle says."""
    try:
        return f"written {await handle.written()}"
    except aiockpt.AiockptError as error:
        return f"{type(error).__name__}: {error}"


def check_committed(made, handle, said: str, events, log, place: Path) -> None:
    """Check that everything says that the second save is committed."""
    assert said == "written True"
    assert "written" in repr(handle)
    now = made.statistics()
    assert (now.saves, now.written, now.failed) == (2, 2, 0)
    last = [each for each in events if each.stop == "write"][-1]
    assert (last.step, last.level) == (2, logging.WARNING)
    assert "step-2 is committed, but" in last.detail
    assert not [each for each in log.messages if "saved" in each]
    assert [each.step for each in list_checkpoints(place)] == [2]  # keep_last
    assert load(place / "step-2")["v"] == 2


def check_failed(made, said: str, events, log, place: Path) -> None:
    """Check that everything says that the second save is not there."""
    assert said.startswith("WorkerError: ")
    now = made.statistics()
    assert (now.saves, now.written, now.failed) == (2, 1, 1)
    last = [each for each in events if each.stop == "write"][-1]
    assert (last.step, last.level) == (2, logging.ERROR)
    assert "step-2 is not saved: WorkerError" in last.detail
    assert [each.step for each in list_checkpoints(place)] == [1]


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("at", ["pre", "post"])
async def test_a_process_that_dies(place, events, caplog, at: str) -> None:
    """The process dies before the commit, or between the commit and its report."""
    async with aiockpt.make_async_checkpointer(CONFIG, commit_hook=Troubled()) as made:
        first = await made.save(state(1), place / "step-1")
        assert await first.written()
        handle = await made.save(state(2), place / "step-2", **does(at, "die"))
        said = await outcome(handle)
        if at == "post":
            check_committed(made, handle, said, events, caplog, place)
        else:
            check_failed(made, said, events, caplog, place)
        third = await made.save(state(3), place / "step-3")
        assert await third.written()
    assert os.listdir(place) == ["step-3"]


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("at", ["pre", "post"])
@pytest.mark.parametrize("how", ["killed", "write", "shutdown"])
async def test_a_process_that_hangs(
    place, gate, events, caplog, at: str, how: str
) -> None:
    """It is killed while it hangs, by somebody or by a timeout."""
    limits = CheckpointProcessConfig(
        write_timeout_secs=5 if how == "write" else 600,
        subprocess_shutdown_timeout_secs=0.3 if how == "shutdown" else 60,
    )
    config = replace(CONFIG, process_config=limits)
    made = aiockpt.make_async_checkpointer(config, commit_hook=Troubled())
    first = await made.save(state(1), place / "step-1")
    assert await first.written()
    options = does(at, "hang", gate.path)
    handle = await made.save(state(2), place / "step-2", **options)
    reached = Path(f"{gate.path}.reached")
    await eventually(reached.exists, "the hook")
    if how == "killed":
        pid = int(reached.read_text())  # noqa: ASYNC240
        os.kill(pid, signal.SIGKILL)
    elif how == "shutdown":
        await made.close()
    said = await outcome(handle)
    if at == "post":
        check_committed(made, handle, said, events, caplog, place)
    elif how == "killed":
        check_failed(made, said, events, caplog, place)
    else:
        assert said.startswith("WorkerTimeoutError: ")
        assert [each.step for each in list_checkpoints(place)] == [1]
    await made.close()


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("process", [True, False])
async def test_a_hook_that_raises_after_the_commit(
    place, events, caplog, process: bool
) -> None:
    """Its error is reported, and the save is a success."""
    config = replace(CONFIG, use_process=process)
    async with aiockpt.make_async_checkpointer(config, commit_hook=Troubled()) as made:
        assert await (await made.save(state(1), place / "step-1")).written()
        handle = await made.save(state(2), place / "step-2", **does("post", "raise"))
        said = await outcome(handle)
        check_committed(made, handle, said, events, caplog, place)
        written = [each.detail for each in events if each.stop == "write"]
        assert "ZeroDivisionError" in written[-1]
        assert "on purpose" in written[-1]


class Uploads(WriterHook):
    """Raises its first error again at each later save, as an uploader may."""

    def __init__(self) -> None:
        self._error: OSError | None = None

    def pre_commit(self, path: str, **_: Any) -> None:
        if self._error is not None:
            raise self._error

    def post_commit(self, path: str, **_: Any) -> None:
        self._error = OSError("the upload failed")
        raise self._error


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("process", [True, False])
async def test_an_error_that_is_raised_again(place, process: bool) -> None:
    """It came after the commit of one save, and before that of the next ones."""
    config = replace(CONFIG, use_process=process)
    async with aiockpt.make_async_checkpointer(config, commit_hook=Uploads()) as made:
        assert await (await made.save(state(1), place / "step-1")).written()
        for step in (2, 3):
            handle = await made.save(state(step), place / f"step-{step}")
            with pytest.raises(WorkerError, match="the upload failed"):
                await handle.written()
        now = made.statistics()
    assert (now.saves, now.written, now.failed) == (3, 1, 2)
    assert [each.step for each in list_checkpoints(place)] == [1]


def test_an_error_that_is_raised_again_in_the_foreground(place) -> None:
    """The note of an earlier save does not stay on the error."""
    with sync_checkpointer(Uploads()) as made:
        for step, notes in enumerate((1, 0, 0), 1):
            with pytest.raises(OSError, match="the upload failed") as caught:
                made.save(state(step), place / f"step-{step}")
            assert len(getattr(caught.value, "__notes__", ())) == notes
        now = made.statistics()
    assert (now.saves, now.written, now.failed) == (3, 1, 2)
    assert [each.step for each in list_checkpoints(place)] == [1]


@dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses attributes."""

    what: str


def test_an_error_that_refuses_attributes(place, monkeypatch) -> None:
    """It reaches the caller as it is, and the save counts as written."""

    def refuse(*_: Any, **__: Any) -> None:
        raise FrozenError("the upload failed")

    monkeypatch.setattr(Troubled, "post_commit", refuse)
    with sync_checkpointer(Troubled()) as made:
        with pytest.raises(FrozenError, match="the upload failed"):
            made.save(state(1), place / "step-1")
        assert made.statistics().written == 1


def test_a_hook_that_raises_in_the_foreground(place, events) -> None:
    """Its error is the caller's own; it is counted as written."""
    with sync_checkpointer(Troubled(), keep_last=1) as made:
        made.save(state(1), place / "step-1")
        with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
            made.save(state(2), place / "step-2", **does("post", "raise"))
        assert any("is committed" in each for each in caught.value.__notes__)
        now = made.statistics()
        assert (now.saves, now.written, now.failed, now.under_way) == (2, 2, 0, 0)
    assert [each.step for each in events] == [1, 2]
    assert [each.step for each in list_checkpoints(place)] == [2]


@pytest.mark.asyncio
@pytest.mark.allow_error_logs
@pytest.mark.parametrize("at", ["pre", "post"])
async def test_a_thread_that_hangs(place, gate, events, caplog, at: str) -> None:
    """It cannot be ended: what is not committed yet may still be."""
    limits = CheckpointProcessConfig(subprocess_shutdown_timeout_secs=0.3)
    config = replace(CONFIG, use_process=False, process_config=limits)
    made = aiockpt.make_async_checkpointer(config, commit_hook=Troubled())
    assert await (await made.save(state(1), place / "step-1")).written()
    options = does(at, "hang", gate.path)
    handle = await made.save(state(2), place / "step-2", **options)
    await eventually(Path(f"{gate.path}.reached").exists, "the hook")
    await made.close()
    said = await outcome(handle)
    if at == "post":
        check_committed(made, handle, said, events, caplog, place)
    else:
        assert isinstance(handle.error, WorkerError)
        assert handle.error.may_be_committed
        assert "step-2 may not be saved" in events[-1].detail
        assert not [each for each in caplog.messages if "is not saved" in each]
    after = threading.active_count() - 1
    gate.open()
    wait_until(lambda: threading.active_count() <= after, "the end of the thread")
    assert load(place / "step-2")["v"] == 2


def test_a_disk_that_does_not_confirm_the_name(tmp_path, monkeypatch) -> None:
    """The checkpoint is in its place, and the error says so."""
    sync = os.fsync

    def failing(fd: int) -> None:
        if (tmp_path / "s").exists():
            raise OSError(5, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with sync_checkpointer(fsync=True) as made:
        with pytest.raises(StorageError, match="the disk did not confirm it") as caught:
            made.save(state(1), tmp_path / "s")
        assert caught.value.may_be_committed
        assert made.statistics().failed == 1
    assert load(tmp_path / "s")["v"] == 1
