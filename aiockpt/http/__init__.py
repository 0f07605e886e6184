"""The HTTP transport, and what mounts it in an aiohttp application.

Names load on first use: the server and the client inside need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.http.embedding import (
        APP_KEY,
        create_app,
        get_transport,
        routes,
        serves,
        setup,
    )
    from aiockpt.http.transport import HTTPTransport

__all__ = [
    "APP_KEY",
    "HTTPTransport",
    "create_app",
    "get_transport",
    "routes",
    "serves",
    "setup",
]

_HOMES = {
    **dict.fromkeys(__all__, "aiockpt.http.embedding"),
    "HTTPTransport": "aiockpt.http.transport",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
