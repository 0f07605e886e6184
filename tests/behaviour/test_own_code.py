"""Writers, callbacks and signal handlers of the caller's own, in saves and loads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import aiockpt
from aiockpt import AsyncCheckpointer, BackgroundCheckpointer
from aiockpt.checkpointers import (
    CheckpointProcess,
    CheckpointReader,
    CheckpointStagerConfig,
    CheckpointWriter,
    CheckpointWriterConfig,
    RankInfo,
)

Pair = namedtuple("Pair", "x w")

# pytest-timeout's own method uses SIGALRM, too.
no_alarm = pytest.mark.timeout(method="thread")


class Odd:
    """A leaf that only a pickle can carry."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


class Box:
    """A node that torch knows."""

    def __init__(self, content: Any) -> None:
        self.content = content


_pytree.register_pytree_node(
    Box, lambda box: ([box.content], None), lambda items, _: Box(*items)
)


class Telling(CheckpointWriter):
    """Writes down what it gets, and nothing else."""

    def write(self, path: Any, state_dict: Any, **kwargs: Any) -> None:
        """Tell the types of the values."""
        pair, box = state_dict["pair"], state_dict["box"]
        assert pair.w.tolist() == [1.0, 1.0]
        assert box.content.tolist() == [2.0]
        kinds = [f"{type(each).__name__}" for each in state_dict.values()]
        exact = type(pair) is Pair and type(box) is Box
        Path(f"{path}.txt").write_text(f"{' '.join(kinds)} {exact}")


def telling(rank_info: RankInfo) -> Telling:
    """Make it."""
    return Telling(CheckpointWriterConfig(), rank_info)


@pytest.mark.asyncio
@pytest.mark.parametrize("use_process", [True, False])
async def test_an_own_writer_gets_what_the_default_one_saves(
    tmp_path: Path, use_process: bool
) -> None:
    """Pickles, named tuples and nodes that nobody has registered with this package."""
    config = aiockpt.CheckpointerConfig(
        staging_config=CheckpointStagerConfig(allow_pickle=True),
        use_process=use_process,
    )
    state = {
        "pair": Pair(1, torch.ones(2)),
        "box": Box(torch.full((1,), 2.0)),
        "odd": Odd(),
    }
    async with aiockpt.make_async_checkpointer(
        config, checkpoint_writer_init_fn=telling
    ) as made:
        assert await (await made.save(state, tmp_path / "a")).written()
    assert (tmp_path / "a.txt").read_text() == "Pair Box Odd True"


class Inheriting(CheckpointWriter):
    """Writes as the default writer does when that has a state dict."""

    def write(self, path: Any, state_dict: Any, **kwargs: Any) -> None:
        """Pass nothing on but the arguments."""
        super().write(path, state_dict, **kwargs)


def inheriting(rank_info: RankInfo) -> Inheriting:
    """Make it."""
    return Inheriting(CheckpointWriterConfig(), rank_info)


@pytest.mark.asyncio
@pytest.mark.parametrize("use_process", [True, False])
async def test_the_trainer_knows_the_file_of_an_own_writer(
    tmp_path: Path, use_process: bool
) -> None:
    """So it can ask the disk whether the file was committed, if the writer dies."""
    async with aiockpt.make_async_checkpointer(
        aiockpt.CheckpointerConfig(use_process=use_process),
        checkpoint_writer_init_fn=inheriting,
    ) as made:
        for step in (1, 2):
            handle = await made.save({"w": torch.ones(2)}, tmp_path / f"{step}")
            assert await handle.written()
            files = [each.stat() for each in (tmp_path / f"{step}").iterdir()]
            assert handle.file in [(each.st_dev, each.st_ino) for each in files]


@pytest.mark.parametrize(
    "error", [OSError(5, "mine"), KeyError("mine"), TimeoutError()]
)
def test_an_error_of_on_bytes_is_the_callers(tmp_path: Path, error: Exception) -> None:
    """The load raises it unchanged, not as an error of the file."""
    state = {"w": torch.ones(2)}
    with aiockpt.make_sync_checkpointer() as made:
        made.save(state, tmp_path / "c")

    def fail(_: int) -> None:
        raise error

    for into in (state, None):
        with pytest.raises(type(error)) as caught:
            aiockpt.load(tmp_path / "c", into=into, on_bytes=fail)
        assert caught.value is error


class Preempted(Exception):  # noqa: N818 - as a job names it
    """What a job's handler of a signal raises."""


@pytest.fixture(params=[Preempted, TimeoutError, ConnectionError, KeyboardInterrupt])
def interrupted(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """Let SIGALRM raise in the main thread."""

    def handle(*_: object) -> None:
        raise request.param("the job's own")

    before = signal.signal(signal.SIGALRM, handle)
    yield request.param
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    for each in logging.root.handlers:
        # Python acquires the lock of a handler before its `try`. An exception in
        # between leaves it locked, and every other thread that logs then waits forever.
        each.createLock()


@contextlib.contextmanager
def _comes_out(interrupted: type[BaseException]) -> Iterator[None]:
    """Expect the handler's exception from the body.

    ``Thread.start`` of CPython 3.11 may raise a ``KeyError`` in its place, whose
    context it is: the handler ran after the thread had begun.
    """
    with pytest.raises((interrupted, KeyError)) as caught:
        yield
    error = caught.value
    if isinstance(error, KeyError) and not isinstance(error, interrupted):
        assert isinstance(error.__context__, interrupted)
        error = error.__context__
    assert str(error) == "the job's own"


@no_alarm
@pytest.mark.allow_leaks("fds")  # the exception may come just before a close
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_synchronous_save(tmp_path, interrupted) -> None:
    """Its handler's exception comes out, whatever the save did at that moment."""
    with aiockpt.make_sync_checkpointer() as made:
        state = {f"{each}": torch.full((8,), each) for each in range(2_000)}
        for moment in range(1, 40, 8):  # from the first look to the last byte
            # Again later: an exception in a finalizer reaches nobody.
            with _comes_out(interrupted):
                signal.setitimer(signal.ITIMER_REAL, moment / 1000, 5.0)
                made.save(state, tmp_path / "a")
                signal.pause()  # it was quick
            signal.setitimer(signal.ITIMER_REAL, 0)

        def on_bytes(_: int) -> None:
            signal.raise_signal(signal.SIGALRM)

        made.save({"w": torch.ones(2)}, tmp_path / "b")
        with pytest.raises(interrupted, match="the job's own"):
            made.load(tmp_path / "b", on_bytes=on_bytes)


@no_alarm
@pytest.mark.parametrize("saved", [True, False])
def test_a_signal_at_the_first_and_the_last_step(
    tmp_path, interrupted, monkeypatch, saved: bool
) -> None:
    """Its exception is not taken for one of the disk."""
    module, name = (os, "fsync") if saved else (Path, "resolve")
    real, path = getattr(module, name), tmp_path / "c" / "a"

    def signalled(what: Any, *args: Any, **kwargs: Any) -> Any:
        if path.exists() if saved else what in (path, path.parent):
            signal.raise_signal(signal.SIGALRM)
        return real(what, *args, **kwargs)

    (tmp_path / "c").mkdir()
    monkeypatch.setattr(module, name, signalled)
    made = aiockpt.make_sync_checkpointer()
    with made, pytest.raises(interrupted, match="the job's own"):
        made.save({"w": torch.ones(2)}, tmp_path / "c" / "a")
    monkeypatch.undo()
    assert (tmp_path / "c" / "a" / "commit.json").exists() is saved


@no_alarm
def test_a_signal_in_a_blocking_save(tmp_path, interrupted) -> None:
    """The save did not time out, and saves nothing."""

    class Slow(aiockpt.checkpointers.CheckpointStager):
        async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            await asyncio.Event().wait()

        async def close(self) -> None:
            return

    alone = RankInfo(0, 1)
    writer, reader = CheckpointProcess(alone), CheckpointReader(alone)
    made = BackgroundCheckpointer(AsyncCheckpointer(Slow(), writer, reader))
    with made, pytest.raises(interrupted, match="the job's own"):
        made.save({"w": torch.ones(2)}, tmp_path / "a")
    assert not (tmp_path / "a").exists()
