"""Moves a live PyTorch state dict between processes, from asyncio.

Importing this package is cheap: a public name loads its module when it is first
used, so neither torch nor aiohttp is imported before something needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy
from aiockpt.errors import (
    AiockptError,
    AuthenticationError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    ClosedError,
    DeviceMeshError,
    IntegrityError,
    LimitExceededError,
    LocalProtocolError,
    MissingKeysError,
    PeerFailedError,
    PeerUnreachableError,
    ProcessGroupError,
    ProtocolError,
    RemoteProtocolError,
    SaveInProgressError,
    StagingError,
    StateDictError,
    StepNotFoundError,
    StorageError,
    TemplateMismatchError,
    TransferInterruptedError,
    TransferStalledError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
    UnsupportedLeafError,
    WorkerError,
)

if TYPE_CHECKING:
    from aiockpt.flatten import register_leaf
    from aiockpt.http.transport import HTTPTransport
    from aiockpt.observe import Progress, TransferEvent
    from aiockpt.pg.transport import PGTransport
    from aiockpt.transport import CheckpointTransport
    from aiockpt.wire.limits import Limits

__version__ = "0.1.0"

__all__ = [
    "AiockptError",
    "AuthenticationError",
    "CheckpointChangedError",
    "CheckpointNotFoundError",
    "CheckpointTransport",
    "ClosedError",
    "DeviceMeshError",
    "HTTPTransport",
    "IntegrityError",
    "LimitExceededError",
    "Limits",
    "LocalProtocolError",
    "MissingKeysError",
    "PGTransport",
    "PeerFailedError",
    "PeerUnreachableError",
    "ProcessGroupError",
    "Progress",
    "ProtocolError",
    "RemoteProtocolError",
    "SaveInProgressError",
    "StagingError",
    "StateDictError",
    "StepNotFoundError",
    "StorageError",
    "TemplateMismatchError",
    "TransferEvent",
    "TransferInterruptedError",
    "TransferStalledError",
    "TransferTimeoutError",
    "TransportError",
    "UnavailableError",
    "UnsupportedLeafError",
    "WorkerError",
    "__version__",
    "register_leaf",
]

# Where each lazy name lives; the imports under TYPE_CHECKING tell type checkers the
# same, and tests/test_exports.py holds the two together.
_HOMES = {
    "CheckpointTransport": "aiockpt.transport",
    "HTTPTransport": "aiockpt.http.transport",
    "Limits": "aiockpt.wire.limits",
    "PGTransport": "aiockpt.pg.transport",
    "Progress": "aiockpt.observe",
    "TransferEvent": "aiockpt.observe",
    "register_leaf": "aiockpt.flatten",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
