"""Which error is worth another attempt, and when: plain decisions."""

from __future__ import annotations

import pytest

from aiockpt import errors
from aiockpt.errors import (
    Advice,
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    LimitExceededError,
    LocalProtocolError,
    PeerFailedError,
    PeerUnreachableError,
    StepNotFoundError,
    advice,
)
from aiockpt.http.problems import PeerBusy
from aiockpt.http.retry import (
    Liveness,
    OnRetry,
    Retries,
    backoff,
)

pytestmark = [pytest.mark.torch_free]

GONE = PeerUnreachableError("http://there/")


def retries(
    *, reconnect: float = 10.0, stall: float = 3.0, on_retry: OnRetry = print
) -> Retries:
    """Return the attempts at a peer that was last heard at 100."""
    return Retries(Liveness(reconnect, stall, 100.0), on_retry)


class TestDelay:
    """One request, and the peer's sign of life on any connection."""

    def test_a_coarse_clock_hides_no_sign_of_life(self) -> None:
        """A byte may come as the attempt begins: uvloop's has milliseconds."""
        attempts = retries(reconnect=0)
        assert attempts.delay_after(GONE, started=100, now=100) is None
        attempts.liveness.heard(110)
        assert attempts.delay_after(GONE, started=110, now=110) is not None
        assert attempts.delay_after(GONE, started=110.001, now=110.001) is None

    def test_any_byte_ends_the_silence(self) -> None:
        """Any byte starts the reconnect timeout anew."""
        attempts = retries(reconnect=10)
        attempts.delay_after(GONE, started=110, now=110)
        attempts.liveness.heard(119)
        assert attempts.delay_after(GONE, started=119, now=125) is not None
        assert attempts.delay_after(GONE, started=126, now=134) is not None
        assert attempts.delay_after(GONE, started=134, now=136) is None

    def test_busy_peer_says_when_to_come_back(self) -> None:
        """It lives; its advice is followed up to half a minute."""
        for told, least in ((None, 0), (7.0, 7), (1e9, 30)):
            attempts = retries(reconnect=0)
            busy = PeerBusy("there", retry_after=told)
            delay = attempts.delay_after(busy, started=110, now=110)
            assert delay is not None
            assert least <= delay <= least + 2

    def test_a_proxy_is_no_sign_of_the_peers_life(self) -> None:
        """It answers for a peer that is away, and its advice does not prolong that."""
        attempts = retries(reconnect=10)
        proxy = PeerBusy("there", retry_after=30, proxy=502)
        assert attempts.delay_after(proxy, started=110, now=110) is not None
        delay = attempts.delay_after(proxy, started=115, now=115)
        assert delay is not None
        assert 5 <= delay <= 7
        assert attempts.delay_after(proxy, started=119, now=120) is None
        attempts.liveness.heard(120)  # it was the sender, or another connection of it
        assert attempts.delay_after(proxy, started=120, now=121) is not None

    @pytest.mark.parametrize(
        "error",
        [
            *(AuthenticationError("there"), CheckpointChangedError(expected="a")),
            *(LimitExceededError("it", limit=1, actual=2), LocalProtocolError("mine")),
            *(PeerFailedError(None, "no memory"), StepNotFoundError(7)),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_verdict_is_final(self, error) -> None:
        """A permanent error is raised, since asking again would bring the same."""
        assert retries().delay_after(error, started=1, now=2) is None


def test_delays_grow_and_are_bounded() -> None:
    """The delays differ, so that receivers do not come back in step."""
    assert all(backoff(0) <= 0.05 for _ in range(100))
    assert 1 < max(backoff(10_000) for _ in range(100)) <= 2
    assert len({backoff(3) for _ in range(10)}) > 1


UNDER = {  # -> the classes that have it, without those whose parent has it too
    Advice.LATER: "StagingError StorageError TransportError",
    Advice.AGAIN: "CheckpointChangedError PeerUnreachableError "
    "TransferInterruptedError TransferStalledError",
    Advice.ONWARD: "TransportError UnavailableError",
    Advice.REPLACED: "UnavailableError",
    Advice.LOST: "ClosedError TransportError UnavailableError",
    Advice.WRONG: "IntegrityError RemoteProtocolError",
    Advice.OURS: "ClosedError StagingError StorageError",
    Advice.MISUSE: "LocalProtocolError",
}


@pytest.mark.parametrize("mark", Advice, ids=lambda mark: mark.name)
def test_the_table_says_what_to_do_after_each_error(mark: Advice) -> None:
    """A class has its parent's row; a peer that gave up is the exception."""
    roots = tuple(getattr(errors, name) for name in UNDER[mark].split())
    final = errors.PeerFailedError if mark is Advice.LATER else ()
    for each in (getattr(errors, name) for name in errors.__all__):
        expected = issubclass(each, roots) and not issubclass(each, final)
        bare = type("Bare", (each,), {"__init__": lambda _: None})()
        assert (mark in advice(bare)) is expected, each


def test_what_is_not_in_the_table_promises_nothing() -> None:
    """An error of a caller's callback, or a plain one of the system."""
    for error in (ValueError("x"), OSError("x"), KeyboardInterrupt(), AiockptError()):
        assert advice(error) == Advice.NONE
