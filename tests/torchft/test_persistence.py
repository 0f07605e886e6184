"""Which errors pass by themselves, and a receive that outlasts them."""

from __future__ import annotations

import asyncio

import pytest

from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    ClosedError,
    IntegrityError,
    PeerFailedError,
    PeerUnreachableError,
    StepNotFoundError,
    TransferInterruptedError,
    TransferStalledError,
    TransferTimeoutError,
)
from aiockpt.torchft.adapter import passes, receive

pytestmark = pytest.mark.asyncio

URL = "http://peer/"


def caused(error: AiockptError, cause: BaseException) -> AiockptError:
    """Return an error as ``raise ... from`` leaves it."""
    error.__cause__ = cause
    return error


PASSING = [
    CheckpointChangedError(expected="a", actual="b"),
    TransferInterruptedError(URL, received=1, expected=2),
    TransferStalledError(URL, idle=1.0),
    caused(PeerUnreachableError(URL), OSError(113, "no route to host")),
    PeerUnreachableError(URL),
]
FINAL = [
    caused(PeerUnreachableError(URL), ConnectionRefusedError(111, "refused")),
    PeerFailedError(None, "it could not"),
    StepNotFoundError(1, serving=2),
    AuthenticationError(URL),
    IntegrityError(expected="a", actual="b"),
    ClosedError("the transport"),
]


class Fetch:
    """Raises some errors, then returns."""

    def __init__(self, *errors: AiockptError) -> None:
        self.errors = list(errors)
        self.left: list[float] = []

    async def __call__(self, left: float) -> str:
        self.left.append(left)
        if left == 0:
            raise TransferTimeoutError("fetch_manifest", left)
        if self.errors:
            raise self.errors.pop(0)
        return "state"


@pytest.mark.parametrize("error", PASSING, ids=repr)
async def test_what_passes_is_outlasted(error: AiockptError) -> None:
    """Each attempt has what is left of the time."""
    assert passes(error)
    fetch = Fetch(error, error)
    assert await receive(fetch, 10) == "state"
    assert 10 == fetch.left[0] > fetch.left[1] > fetch.left[2]


@pytest.mark.parametrize("error", FINAL, ids=repr)
async def test_what_does_not_pass_is_raised_at_once(error: AiockptError) -> None:
    """Everybody waits for this receive."""
    assert not passes(error)
    with pytest.raises(type(error)):
        await receive(Fetch(error), 10)


async def test_a_cancel_ends_it() -> None:
    """A cancel between two attempts ends it, too."""
    task = asyncio.ensure_future(receive(Fetch(*[PASSING[0]] * 1000), 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
