"""The HTTP transport, and what mounts it in an aiohttp application.

Names load on first use: the server and the client inside need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiockpt.http.embedding import APP_KEY, create_app, get_transport, routes, setup
    from aiockpt.http.transport import HTTPTransport

__all__ = [
    "APP_KEY",
    "HTTPTransport",
    "create_app",
    "get_transport",
    "routes",
    "setup",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "transport" if name == "HTTPTransport" else "embedding"
    return getattr(import_module(f"aiockpt.http.{room}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
