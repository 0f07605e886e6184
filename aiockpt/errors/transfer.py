"""What goes wrong between two peers: the way, the other end, the token."""

from __future__ import annotations

from aiockpt.errors.root import AiockptError

__all__ = [
    "AuthenticationError",
    "CheckpointChangedError",
    "ForgedManifestError",
    "PeerFailedError",
    "PeerUnreachableError",
    "ProcessGroupError",
    "StepNotFoundError",
    "TransferInterruptedError",
    "TransferStalledError",
    "TransferTimeoutError",
    "TransportError",
    "UnavailableError",
]

_DOING = {
    "stage": "staging",
    "retract": "retracting",
    "serve": "sending",
    "fetch_manifest": "waiting for",
    "allocate": "allocating memory for",
    "plan": "comparing what is there with",
    "fetch_chunk": "fetching",
    "rebuild": "rebuilding",
    "load": "copying",
    "write": "writing",
    "recv": "receiving",
    "save": "saving",
}
"""What a call does at a stop, before its object."""


class TransportError(AiockptError):
    """The transfer failed on its way; trying again may help."""


class PeerUnreachableError(TransportError, ConnectionError):
    """The peer refused, reset or could not be resolved."""

    def __init__(self, url: str, detail: str = "") -> None:
        super().__init__(detail)
        self.url = url

    def __str__(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        return f"cannot reach {self.url}{why}; is the sender running there?"


class TransferInterruptedError(TransportError, ConnectionError):
    """The connection closed before the last byte of a chunk (or of the manifest)."""

    def __init__(
        self, url: str, *, received: int, expected: int, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.url = url
        self.chunk = chunk
        self.received = received
        self.expected = expected

    def __str__(self) -> str:
        what = "the manifest" if self.chunk is None else f"chunk {self.chunk}"
        return (
            f"{self.url} closed the connection after {self.received} of "
            f"{self.expected} bytes of {what}"
        )


class TransferStalledError(TransportError):
    """The peer is connected and sent nothing for the stall timeout."""

    def __init__(self, url: str, *, idle: float, chunk: int | None = None) -> None:
        super().__init__()
        self.url = url
        self.chunk = chunk
        self.idle = idle

    def __str__(self) -> str:
        what = "" if self.chunk is None else f" in chunk {self.chunk}"
        return f"{self.url} sent nothing for {self.idle:.3g} s{what}"


class TransferTimeoutError(TransportError, TimeoutError, RuntimeError):
    """The deadline of the whole call passed; ``stop`` is where it caught the call.

    It is a ``RuntimeError`` too: torch raises one when a process group times out.

    ``what`` names the step and the peer, where they are known.
    """

    def __init__(
        self, stop: str, timeout: float, *, what: str = "", last_error: str = ""
    ) -> None:
        super().__init__()
        self.stop = stop
        self.timeout = timeout
        self.what = what
        self.last_error = last_error

    def __str__(self) -> str:
        where = f"in {self.stop}"
        if self.stop in _DOING:
            where = f"while {_DOING[self.stop]} {self.what or 'the checkpoint'}"
        last = f"; last error: {self.last_error}" if self.last_error else ""
        return f"timed out after {self.timeout:.3g} s {where}{last}"


class PeerFailedError(TransportError):
    """The peer at ``rank``, or at ``url``, gave up for a reason of its own."""

    def __init__(self, rank: int | None, reason: str, *, url: str = "") -> None:
        super().__init__()
        self.rank = rank
        self.reason = reason
        self.url = url

    def __str__(self) -> str:
        who = self.url or "the sender"
        if self.rank is not None:
            who = f"rank {self.rank}"
        return f"{who} gave up: {self.reason}"


class ProcessGroupError(TransportError):
    """A process-group operation failed; the group cannot be used any more."""

    def __init__(self, detail: str, *, rank: int | None = None) -> None:
        super().__init__(detail)
        self.rank = rank

    def __str__(self) -> str:
        whom = "" if self.rank is None else f" with rank {self.rank}"
        return f"process group operation{whom} failed: {self.detail}; make a new group"


class UnavailableError(AiockptError):
    """The peer is well and does not have what was asked for."""


class StepNotFoundError(UnavailableError, LookupError):
    """The step is not published yet, or a newer one has taken its place."""

    def __init__(
        self, step: int | None, *, serving: int | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.step = step
        self.serving = serving
        self.url = url

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        now = "nothing" if self.serving is None else f"step {self.serving}"
        what = "no checkpoint" if self.step is None else f"step {self.step} is not"
        return f"{what} published{where}; being served is {now}"


class CheckpointChangedError(UnavailableError):
    """The checkpoint was replaced or retracted while it was being fetched."""

    def __init__(
        self, *, expected: str, actual: str | None = None, url: str = ""
    ) -> None:
        super().__init__()
        self.expected = expected
        self.actual = actual
        self.url = url

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        now = "is gone" if self.actual is None else f"is now {self.actual}"
        return f"snapshot {self.expected}{where} {now}; receive again"


class AuthenticationError(AiockptError, PermissionError):
    """The peer wants a token that was not given, or refuses the one given."""

    def __init__(self, url: str, detail: str = "") -> None:
        super().__init__(detail)
        self.url = url

    def __str__(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        return (
            f"{self.url} refused the token{why}; pass the sender's metadata() "
            "whole, or the same token on both sides"
        )


class ForgedManifestError(AuthenticationError):
    """The manifest has no MAC (``missing``), or none made with this side's key."""

    def __init__(self, url: str, *, missing: bool) -> None:
        super().__init__(url)
        self.missing = missing

    def __str__(self) -> str:
        fault = "no MAC" if self.missing else "a MAC of another key or manifest"
        return (
            f"the manifest of {self.url} has {fault}; is it the sender that you mean, "
            "and were both ends given the same manifest_key?"
        )
