"""What goes wrong on this side: the call, the device, the disk, the own worker."""

from __future__ import annotations

from aiockpt.errors.root import AiockptError

__all__ = [
    "CheckpointNotFoundError",
    "ClosedError",
    "DeviceMeshError",
    "MissingExtraError",
    "MissingKeysError",
    "SaveInProgressError",
    "StagingError",
    "StateDictError",
    "StorageError",
    "TemplateMismatchError",
    "UnsupportedLeafError",
    "WorkerError",
    "WorkerTimeoutError",
    "WorldSizeMismatchError",
]


class StateDictError(AiockptError, ValueError):
    """The state dict that the caller passed cannot be used."""


class UnsupportedLeafError(StateDictError, TypeError):
    """A leaf of a type that has no encoding; ``path`` says where it is."""

    def __init__(self, path: str, type_name: str, detail: str = "") -> None:
        super().__init__(detail)
        self.path = path
        self.type_name = type_name

    def __str__(self) -> str:
        register = "convert it, or call aiockpt.register_leaf for its type on both ends"
        remedy = self.detail or register
        return f"{self.path or 'the state dict'} is a {self.type_name}: {remedy}"


class TemplateMismatchError(StateDictError):
    """A tensor of ``into`` differs from the checkpoint's; nothing was received."""

    def __init__(self, path: str, *, expected: str, actual: str) -> None:
        super().__init__()
        self.path = path
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return (
            f"template {self.path}: the checkpoint has {self.expected}, "
            f"the template has {self.actual}"
        )


class MissingKeysError(StateDictError, RuntimeError):
    """A strict load found no ``keys`` of the template in the checkpoint."""

    def __init__(self, path: str, keys: list[str]) -> None:
        super().__init__()
        self.path = path
        self.keys = keys

    def __str__(self) -> str:
        shown = ", ".join(self.keys[:10])
        more = f" and {len(self.keys) - 10} more" if len(self.keys) > 10 else ""
        return f"{self.path} is missing keys: {shown}{more}"


class DeviceMeshError(StateDictError):
    """A distributed tensor has no place among this process's process groups."""

    def __init__(self, what: str, detail: str, *, path: str = "") -> None:
        super().__init__(detail)
        self.what = what
        self.path = path

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.what} has no place here: {self.detail}"


class StagingError(AiockptError):
    """This host could not copy, allocate or compute what a call needed of it."""


class StorageError(AiockptError, OSError):
    """A checkpoint file was not written, or is not a checkpoint."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(detail)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """No whole checkpoint is there; ``detail`` says what there is."""


class WorldSizeMismatchError(StorageError):
    """``saved`` ranks wrote the checkpoint, and ``loading`` ranks load it."""

    def __init__(self, path: str, *, saved: int, loading: int) -> None:
        super().__init__(path, "")
        self.saved = saved
        self.loading = loading

    def __str__(self) -> str:
        return (
            f"{self.path}: {_ranks(self.saved)} wrote it, each its own part, and "
            f"{_ranks(self.loading)} would load it; say rank= for one of these parts"
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


class WorkerError(AiockptError, RuntimeError):
    """The checkpoint process died, or raised ``remote_traceback``."""

    def __init__(
        self, detail: str, *, exitcode: int | None = None, remote_traceback: str = ""
    ) -> None:
        super().__init__(detail)
        self.exitcode = exitcode
        self.remote_traceback = remote_traceback


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The checkpoint process was killed: it did not start, write or end in time."""


class SaveInProgressError(AiockptError, BlockingIOError):
    """A save was refused, as the policy says: ``under_way`` others are not written."""

    def __init__(self, path: str, *, under_way: int) -> None:
        super().__init__()
        self.path = path
        self.under_way = under_way

    def __str__(self) -> str:
        return f"{self.path}: {self.under_way} saves before it are not written yet"


class MissingExtraError(AiockptError, ImportError):
    """An optional library is not installed; ``extra`` brings it."""

    def __init__(self, library: str, *, extra: str) -> None:
        super().__init__()
        self.library = library
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.library} is not installed: pip install 'aiockpt[{self.extra}]'"


class ClosedError(AiockptError, RuntimeError):
    """The object was used after it was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed; make a new one")
        self.what = what
