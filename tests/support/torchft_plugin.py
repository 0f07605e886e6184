"""A pytest plugin that puts our transports in the place of torchft's own.

``pytest -p injected`` then runs torchft's tests, as they come in its wheel, with them.
What cannot pass is listed here one by one, with its reason and the error that it must
fail with: each such test runs up to that point.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import pytest
import torchft.checkpointing
import torchft.checkpointing.http_transport
import torchft.checkpointing.pg_transport
import torchft.manager

import aiockpt.torchft
from aiockpt.errors import TransferTimeoutError

T = TypeVar("T")

calls: Counter[str] = Counter()


class HTTPTransport(aiockpt.torchft.HTTPTransport[T]):
    """Ours, counting."""

    def send_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        calls["http sends"] += 1
        super().send_checkpoint(*args, **kwargs)

    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> T:
        calls["http receives"] += 1
        return super().recv_checkpoint(*args, **kwargs)


class PGTransport(aiockpt.torchft.PGTransport[T]):
    """Ours, counting."""

    def send_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        calls["pg sends"] += 1
        super().send_checkpoint(*args, **kwargs)

    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> T:
        calls["pg receives"] += 1
        return super().recv_checkpoint(*args, **kwargs)


torchft.checkpointing.HTTPTransport = HTTPTransport
torchft.checkpointing.http_transport.HTTPTransport = HTTPTransport
torchft.manager.HTTPTransport = HTTPTransport
torchft.checkpointing.pg_transport.PGTransport = PGTransport

URLLIB = (
    "asserts urllib's exceptions after it has received; ours is a TransferTimeoutError"
)
FAILS = {
    "TestHTTPTransport::test_checkpoint_server_0_no_chunks": (
        URLLIB,
        TransferTimeoutError,
    ),
    "TestHTTPTransport::test_checkpoint_server_1_chunked": (
        URLLIB,
        TransferTimeoutError,
    ),
    "TestHTTPTransport::test_checkpoint_server_locking": (
        "looks at torchft's private lock",
        AttributeError,
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect what is listed to fail in its way."""
    for item in items:
        name = item.nodeid.partition("::")[2]
        if name in FAILS:
            reason, error = FAILS[name]
            item.add_marker(pytest.mark.xfail(reason=reason, raises=error, strict=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show that our classes were used."""
    counts = ", ".join(f"{count} {name}" for name, count in sorted(calls.items()))
    terminalreporter.write_line(f"through aiockpt: {counts or 'nothing'}")
