"""Moves a live PyTorch state dict between processes, from asyncio.

This namespace has what most programs need. The other public names are in
`aiockpt.checkpointers`, `aiockpt.errors`, `aiockpt.http` and `aiockpt.testing`.
Importing this package is cheap: a name or a package loads its module when it is first
used, so neither torch nor aiohttp is imported before something needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy
from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    IntegrityError,
    StepNotFoundError,
    StorageError,
    TemplateMismatchError,
    TransportError,
)

if TYPE_CHECKING:
    from aiockpt import checkpointers as checkpointers
    from aiockpt import errors as errors
    from aiockpt import http as http
    from aiockpt import testing as testing
    from aiockpt.background_transport import (
        BackgroundTransport,
        make_background_transport,
    )
    from aiockpt.checkpointers.async_checkpointer import (
        AsyncCheckpointer,
        BackgroundCheckpointer,
    )
    from aiockpt.checkpointers.config import CheckpointerConfig
    from aiockpt.checkpointers.factories import (
        load,
        make_async_checkpointer,
        make_background_checkpointer,
        make_sync_checkpointer,
    )
    from aiockpt.checkpointers.fingerprint import fingerprint
    from aiockpt.checkpointers.recovery import recover
    from aiockpt.checkpointers.sync import SyncCheckpointer
    from aiockpt.events import Progress, TransferEvent, add_hook
    from aiockpt.format.fingerprint import Fingerprint
    from aiockpt.format.limits import Limits
    from aiockpt.http.options import Auth, Receive, Server, Swarm
    from aiockpt.http.protocol import join_metadata
    from aiockpt.http.tokens import make_token
    from aiockpt.http_transport import HTTPTransport
    from aiockpt.pg.transport import PGTransport
    from aiockpt.state.flatten import register_leaf
    from aiockpt.storage.interface import latest, list_checkpoints, register_store
    from aiockpt.transfer.prepared import Prepared
    from aiockpt.transport import CheckpointTransport

__version__ = "0.1.0"

__all__ = [
    "AiockptError",
    "AsyncCheckpointer",
    "Auth",
    "AuthenticationError",
    "BackgroundCheckpointer",
    "BackgroundTransport",
    "CheckpointTransport",
    "CheckpointerConfig",
    "Fingerprint",
    "HTTPTransport",
    "IntegrityError",
    "Limits",
    "PGTransport",
    "Prepared",
    "Progress",
    "Receive",
    "Server",
    "StepNotFoundError",
    "StorageError",
    "Swarm",
    "SyncCheckpointer",
    "TemplateMismatchError",
    "TransferEvent",
    "TransportError",
    "__version__",
    "add_hook",
    "fingerprint",
    "join_metadata",
    "latest",
    "list_checkpoints",
    "load",
    "make_async_checkpointer",
    "make_background_checkpointer",
    "make_background_transport",
    "make_sync_checkpointer",
    "make_token",
    "recover",
    "register_leaf",
    "register_store",
]

# Where each lazy name lives; the imports under TYPE_CHECKING tell type checkers the
# same, and tests/behaviour/test_exports.py holds the two together.
_HOMES = {
    "AsyncCheckpointer": "aiockpt.checkpointers.async_checkpointer",
    "Auth": "aiockpt.http.options",
    "BackgroundCheckpointer": "aiockpt.checkpointers.async_checkpointer",
    "BackgroundTransport": "aiockpt.background_transport",
    "CheckpointTransport": "aiockpt.transport",
    "CheckpointerConfig": "aiockpt.checkpointers.config",
    "Fingerprint": "aiockpt.format.fingerprint",
    "HTTPTransport": "aiockpt.http_transport",
    "Limits": "aiockpt.format.limits",
    "PGTransport": "aiockpt.pg.transport",
    "Prepared": "aiockpt.transfer.prepared",
    "Progress": "aiockpt.events",
    "Receive": "aiockpt.http.options",
    "Server": "aiockpt.http.options",
    "Swarm": "aiockpt.http.options",
    "SyncCheckpointer": "aiockpt.checkpointers.sync",
    "TransferEvent": "aiockpt.events",
    "add_hook": "aiockpt.events",
    "fingerprint": "aiockpt.checkpointers.fingerprint",
    "join_metadata": "aiockpt.http.protocol",
    "latest": "aiockpt.storage.interface",
    "list_checkpoints": "aiockpt.storage.interface",
    "load": "aiockpt.checkpointers.factories",
    "make_async_checkpointer": "aiockpt.checkpointers.factories",
    "make_background_checkpointer": "aiockpt.checkpointers.factories",
    "make_background_transport": "aiockpt.background_transport",
    "make_sync_checkpointer": "aiockpt.checkpointers.factories",
    "make_token": "aiockpt.http.tokens",
    "recover": "aiockpt.checkpointers.recovery",
    "register_leaf": "aiockpt.state.flatten",
    "register_store": "aiockpt.storage.interface",
}
_PACKAGES = ("checkpointers", "http", "testing")

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES, packages=_PACKAGES)
