"""What is kept of a failure keeps nothing else: no state dict, no arena, no frame."""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.checkpointers import CheckpointProcess, RankInfo, SaveHandle
from aiockpt.errors import (
    StorageError,
    TransferTimeoutError,
    UnsupportedLeafError,
    kept,
)
from aiockpt.runtime.lifetime import Lifetime

pytestmark = pytest.mark.allow_error_logs

ALONE = RankInfo(0, 1)
IN_BACKGROUND = pytest.mark.parametrize("use_process", [False, True])


class Watched:
    """State dicts, and whether they are still in memory."""

    def __init__(self) -> None:
        self._there: list[weakref.ref[torch.Tensor]] = []

    def state(self, **more: Any) -> dict[str, Any]:
        """Return a state dict that only its caller keeps."""
        tensor = torch.ones(1000)
        self._there.append(weakref.ref(tensor))
        return {"w": tensor, **more}

    def left(self) -> int:
        """Return how many are still there."""
        gc.collect()
        return sum(each() is not None for each in self._there)


class TestSaves:
    """A failed save keeps its error, and not its state."""

    @pytest.mark.asyncio
    @IN_BACKGROUND
    @pytest.mark.parametrize("kind", ["path", "timeout", "hook"])
    async def test_handles(self, tmp_path, use_process, kind) -> None:
        """Neither those that are kept, nor those that nobody looks at."""
        (tmp_path / "file").touch()
        watched, handles = Watched(), []
        config = aiockpt.CheckpointerConfig(use_process=use_process)
        hook = Failing() if kind == "hook" else None
        async with aiockpt.make_async_checkpointer(config, commit_hook=hook) as made:
            for _ in range(3):
                path = tmp_path / ("file/x" if kind == "path" else "s")
                limit = 1e-9 if kind == "timeout" else None
                handle = await made.save(watched.state(), path, timeout=limit)
                handles.append(handle)
            for each in handles:
                await fails(each)
                assert isinstance(each.error, aiockpt.AiockptError)
            await asyncio.sleep(0)
            assert watched.left() == 0

    @pytest.mark.asyncio
    async def test_it_is_raised_with_the_callers_frames_only(self, tmp_path) -> None:
        """They are not kept either, and what was raised tells where it began."""
        (tmp_path / "file").touch()
        watched = Watched()
        config = aiockpt.CheckpointerConfig(use_process=False)

        async def fail(handle: Any, state: Any) -> str:
            with pytest.raises(StorageError) as caught:
                await handle.written()
            return "".join(traceback.format_exception(caught.value))

        async with aiockpt.make_async_checkpointer(config) as made:
            handle = await made.save({"a": 1}, tmp_path / "file/x")
            for _ in range(2):
                text = await fail(handle, watched.state())
                assert "it was raised here:" in text
                assert "writer.py" in text
            assert watched.left() == 0

    @pytest.mark.asyncio
    async def test_they_are_bounded(self, tmp_path) -> None:
        """The errors that nobody looks at do not pile up for ever."""
        (tmp_path / "file").touch()
        async with aiockpt.make_async_checkpointer(
            aiockpt.CheckpointerConfig(use_process=False)
        ) as made:
            for step in range(100):
                await made.save({"a": 1}, tmp_path / f"file/{step}")
            errors = await made.close()
        assert 1 < len(errors) < 100
        assert made.statistics().failed == 100
        assert "file/99" in str(errors[-1])

    @pytest.mark.asyncio
    async def test_a_writers_handles(self, tmp_path) -> None:
        """A write that was handed over keeps neither its progress nor frames."""
        (tmp_path / "file").touch()
        watched = Watched()
        process = CheckpointProcess(ALONE)

        async def submit(state: Any) -> SaveHandle:
            def progress(_: object) -> None:
                assert state is not None

            handle = SaveHandle(tmp_path / "file/x", progress=progress)
            await process.submit(handle, state, {})
            with pytest.raises(StorageError):
                await handle.written()
            return handle

        handle = await submit(watched.state())
        assert watched.left() == 0
        assert handle.error is not None
        await process.close()

    @pytest.mark.asyncio
    async def test_a_process_that_cannot_start(self, monkeypatch) -> None:
        """It fails each save, and keeps none of them."""
        watched = Watched()
        process = CheckpointProcess(ALONE, subprocess_init_fn=refuse)

        async def fail(state: Any, call: Callable[[], Any]) -> None:
            with pytest.raises(aiockpt.errors.WorkerError):
                await call()

        for _ in range(2):
            await fail(watched.state(), process.ready)
        assert watched.left() == 0
        await process.close()

    def test_background(self, tmp_path) -> None:
        """A program without an event loop gets the same."""
        (tmp_path / "file").touch()
        watched = Watched()
        with aiockpt.make_background_checkpointer() as made:
            handles = [made.save(watched.state(), tmp_path / "file/x") for _ in "ab"]

            def fail(handle: Any, state: Any) -> None:
                with pytest.raises(StorageError):
                    handle.result(60)

            for each in handles:
                fail(each, watched.state())
            assert watched.left() == 0


async def fails(handle: Any) -> None:
    """Wait for a save that fails."""
    with pytest.raises(aiockpt.AiockptError):
        await handle.written()


def refuse() -> None:
    """Fail in the checkpoint process."""
    raise LookupError("no such environment")


class Failing(aiockpt.checkpointers.WriterHook):
    """Refuses every commit."""

    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Refuse it."""
        raise ZeroDivisionError("on purpose")

    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Never called."""


@pytest.mark.asyncio
async def test_an_end_that_fails_keeps_no_caller() -> None:
    """Each caller gets its own copy of the error."""
    watched, lifetime = Watched(), Lifetime("a thing")

    async def end() -> None:
        raise OSError(5, "no", "/a")

    async def close(state: Any) -> None:
        with pytest.raises(OSError, match=r"no.*'/a'"):
            await lifetime.end(end)

    for _ in range(2):
        await close(watched.state())
    assert watched.left() == 0


# --------------------------------------------------------------------- the mechanism


class OddError(Exception):
    """A caller's class, with arguments and a text of its own."""

    def __init__(self, thing: Any, *, more: int) -> None:
        super().__init__(thing, more)
        self.thing = thing

    def __str__(self) -> str:
        return f"odd: {self.thing.name}"


class WordyError(ValueError):
    """A caller's class, which names a value."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"{name} is wrong")
        self.name, self.value = name, value


def raised(error: BaseException, state: Any = None) -> BaseException:
    """Return an error that has passed this frame, with its cause."""
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise error from cause
    except BaseException as found:  # noqa: BLE001 - whatever is asked for
        return found


ERRORS = [
    *(StorageError("/a", "full"), UnsupportedLeafError("a.b", "Thing")),
    TransferTimeoutError("save", 3.0),
    *(FileNotFoundError(2, "none", "/a", None, "/b"), KeyError("a")),
    UnicodeDecodeError("utf-8", b"abc", 1, 2, "bad"),
    AttributeError("no", name="x", obj=object()),
    *(ImportError("no", name="x", path="/p"), SystemExit(3)),
    WordyError("name", [1, (2, {"a": {3}})]),
    ExceptionGroup("both", [ValueError("a"), OSError(1, "b")]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_is_like_its_original(error) -> None:
    """The copy has the class, text, facts, cause and traceback of the original."""
    copy = kept(raised(error))
    assert copy is not error
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__traceback__ is None
    assert repr(copy.__cause__) == "KeyError('cause')"
    text = "".join(traceback.format_exception(copy))
    assert "it was raised here:" in text
    assert "test_kept_errors.py" in text
    again = kept(copy)
    assert str(again) == str(error)
    assert again.__notes__ == copy.__notes__
    if isinstance(error, aiockpt.AiockptError):
        assert str(pickle.loads(pickle.dumps(copy))) == str(error)
        assert {**vars(copy), "__notes__": 0} == {**vars(error), "__notes__": 0}


def test_a_copy_refers_to_nothing_of_the_caller() -> None:
    """Neither by frames, nor by arguments, attributes, causes or contexts."""
    watched = Watched()

    def copies() -> list[BaseException]:
        states = [watched.state() for _ in range(6)]
        group = BaseExceptionGroup("g", [raised(ValueError(states[0]), states[1])])
        chain = raised(WordyError("name", [states[2]]), states[3])
        chain.__cause__ = raised(AttributeError("no", obj=states[4]), states[5])
        chain.__cause__.__cause__ = chain  # a circle
        return [kept(group), kept(chain)]

    found = copies()
    assert watched.left() == 0
    assert str(found[1]) == "name is wrong"


def test_what_cannot_be_copied_keeps_its_text() -> None:
    """It names the class that it was."""
    error = OddError(type("Thing", (), {"name": "it"})(), more=1)
    copy = kept(raised(error))
    assert type(copy) is RuntimeError
    assert str(copy) == "OddError: odd: it"
    error.thing = None
    assert "its text cannot be made" in str(kept(error))


def test_a_long_chain_ends() -> None:
    """A chain of any number of errors is shortened."""
    error: BaseException = ValueError("0")
    for number in range(sys.getrecursionlimit() * 2):
        error.__context__, error = None, ValueError(str(number))
        error.__cause__ = ValueError("x")
    last = error
    for number in range(sys.getrecursionlimit() * 2):
        last.__cause__ = ValueError(str(number))
        last = last.__cause__
    assert str(kept(error)) == str(error)
