"""What this host refuses is an error of ours; other errors stay what they are."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

import pytest

from aiockpt.errors import (
    LimitExceededError,
    StagingError,
    StorageError,
)
from aiockpt.runtime.system import failing_here
from aiockpt.testing import assert_same
from tests.support.transports import pair, receive, weights


@pytest.mark.parametrize(
    ("refused", "reason"),
    [(OSError(12, "Cannot allocate memory"), "Cannot alloc"), (MemoryError(), "Mem")],
)
def test_what_the_host_refuses_is_a_staging_error(
    refused: Exception, reason: str
) -> None:
    """It says what was done, and why it could not be."""
    with (
        pytest.raises(
            StagingError, match=f"receiving failed on this host: .*{reason}"
        ) as e,
        failing_here("receiving"),
    ):
        raise refused
    assert e.value.__cause__ is refused


@pytest.mark.parametrize("error", [StorageError("/a", "full"), ZeroDivisionError()])
def test_others_stay_what_they_are(error: Exception) -> None:
    """Our own errors stay as they are, and so do unforeseen ones."""
    with pytest.raises(type(error)) as caught, failing_here("receiving"):
        raise error
    assert caught.value is error


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE])
async def test_a_host_that_refuses_while_bytes_come(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a connection that broke, which would be tried again."""

    def refuse(size: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("aiockpt.http.manifests.memory_for", refuse)
    async with pair(state=weights()) as (sender, receiver):
        with pytest.raises(StagingError, match=os.strerror(code)):
            await receive(sender, receiver)
        assert sender.statistics().requests == 1


@pytest.mark.asyncio
async def test_more_than_the_host_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receive into the memory of a template needs no more than it."""
    monkeypatch.setattr("aiockpt.runtime.system.available_memory", lambda _: 1 << 20)
    template = weights(0.0)
    async with pair(state=weights()) as (sender, receiver):
        with pytest.raises(LimitExceededError, match="size"):
            await receive(sender, receiver)
        await receive(sender, receiver, into=template, direct=True)
    assert_same(template, weights())
