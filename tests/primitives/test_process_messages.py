"""Exceptions and keywords as data, between the checkpoint process and the trainer."""

from __future__ import annotations

import msgspec
import pytest

from aiockpt.checkpointers.messages import (
    RemoteFailure,
    error_of,
    failure_of,
)
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    IntegrityError,
    LimitExceededError,
    PeerFailedError,
    StorageError,
    TransferTimeoutError,
    WorkerError,
    WorkerTimeoutError,
)

ERRORS: list[AiockptError] = [
    StorageError("/ckpt/step-1", "No space left on device"),
    CheckpointNotFoundError("/ckpt/step-1", "there is no such checkpoint"),
    IntegrityError(chunk=3, expected="aa", actual="bb", url="/ckpt/step-1"),
    PeerFailedError(1, "its disk is full"),
    TransferTimeoutError("the barrier", 1.5),
    WorkerError("the checkpoint process ended"),
    WorkerTimeoutError("the checkpoint process did not start"),
]


def crossed(error: BaseException, doing: str = "writing /ckpt") -> AiockptError:
    """Return what the trainer raises when the process has failed with an error."""
    sent = msgspec.msgpack.encode(failure_of(error))
    return error_of(msgspec.msgpack.decode(sent, type=RemoteFailure), doing)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_package_stays_what_it_is(error: AiockptError) -> None:
    """It has its class, its facts and its message, and the traceback as a note."""
    found = crossed(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    (note,) = found.__notes__
    assert note.startswith("in the checkpoint process:\n")


@pytest.mark.parametrize("actual", [1 << 70, -(1 << 70), 1 << 5000])
def test_a_number_that_no_message_can_hold(actual: int) -> None:
    """It is about as large at the other end, and the error stays what it is."""
    error = crossed(LimitExceededError("the size", limit=1, actual=actual))
    assert isinstance(error, LimitExceededError)
    assert "the size" in str(error)


def test_text_that_is_none() -> None:
    """A path may hold bytes that are not text, and a message may be long."""
    found = crossed(StorageError("/ckpt/\udcff", "x" * 100_000))
    assert isinstance(found, StorageError)
    assert found.path == "/ckpt/\\udcff"
    assert len(str(found)) < 20_000
