"""Every exception of the package.

The parent class answers *what should I do*; each class also inherits the builtin
that a caller would guess::

    AiockptError
    ├── TransportError                    try again, it may help
    │   ├── PeerUnreachableError              refused, reset, unresolved
    │   ├── TransferInterruptedError          closed before the last byte
    │   ├── TransferStalledError              no progress for the stall timeout
    │   ├── TransferTimeoutError              the deadline (TimeoutError, RuntimeError)
    │   ├── PeerFailedError                   the peer gave up, and said so
    │   └── ProcessGroupError                 the process group is broken
    ├── UnavailableError                  the peer is well and does not have it
    │   ├── StepNotFoundError                 not published, superseded (LookupError)
    │   └── CheckpointChangedError            replaced while it was being fetched
    ├── ProtocolError                     bytes against the wire format
    │   ├── LocalProtocolError                ours: a bug or misuse
    │   ├── RemoteProtocolError               the peer's, or an unknown version
    │   ├── LimitExceededError                larger than the receiver allows
    │   └── IntegrityError                    a whole chunk with the wrong digest
    ├── AuthenticationError               wrong or no token (PermissionError)
    │   └── ForgedManifestError               not of a sender that knows the key
    ├── StateDictError                    what the caller passed (ValueError)
    │   ├── UnsupportedLeafError              and where (TypeError)
    │   ├── TemplateMismatchError             ``into`` does not fit
    │   ├── MissingKeysError                  the checkpoint lacks them (RuntimeError)
    │   └── DeviceMeshError                   no such process group or rank here
    ├── StagingError                      a copy or an allocation failed here
    ├── StorageError                      not written, or no checkpoint (OSError)
    │   ├── CheckpointNotFoundError           no whole one is there (FileNotFoundError)
    │   └── WorldSizeMismatchError            more or fewer ranks load it than saved it
    ├── WorkerError                       the checkpoint process died (RuntimeError)
    │   └── WorkerTimeoutError            it took too long (TimeoutError)
    ├── SaveInProgressError               two saves are under way (BlockingIOError)
    ├── MissingExtraError                 a library is not installed (ImportError)
    └── ClosedError                       used after close (RuntimeError)

An exception carries its facts as attributes and composes its sentence from them.
"""

from __future__ import annotations

from aiockpt.errors.local import (
    CheckpointNotFoundError,
    ClosedError,
    DeviceMeshError,
    MissingExtraError,
    MissingKeysError,
    SaveInProgressError,
    StagingError,
    StateDictError,
    StorageError,
    TemplateMismatchError,
    UnsupportedLeafError,
    WorkerError,
    WorkerTimeoutError,
    WorldSizeMismatchError,
)
from aiockpt.errors.protocol import (
    IntegrityError,
    LimitExceededError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.errors.root import (
    AiockptError,
)
from aiockpt.errors.transfer import (
    AuthenticationError,
    CheckpointChangedError,
    ForgedManifestError,
    PeerFailedError,
    PeerUnreachableError,
    ProcessGroupError,
    StepNotFoundError,
    TransferInterruptedError,
    TransferStalledError,
    TransferTimeoutError,
    TransportError,
    UnavailableError,
)

__all__ = [
    "AiockptError",
    "AuthenticationError",
    "CheckpointChangedError",
    "CheckpointNotFoundError",
    "ClosedError",
    "DeviceMeshError",
    "ForgedManifestError",
    "IntegrityError",
    "LimitExceededError",
    "LocalProtocolError",
    "MissingExtraError",
    "MissingKeysError",
    "PeerFailedError",
    "PeerUnreachableError",
    "ProcessGroupError",
    "ProtocolError",
    "RemoteProtocolError",
    "SaveInProgressError",
    "StagingError",
    "StateDictError",
    "StepNotFoundError",
    "StorageError",
    "TemplateMismatchError",
    "TransferInterruptedError",
    "TransferStalledError",
    "TransferTimeoutError",
    "TransportError",
    "UnavailableError",
    "UnsupportedLeafError",
    "WorkerError",
    "WorkerTimeoutError",
    "WorldSizeMismatchError",
]
