"""Checkpoints as directories: their names, and which of them are complete.

A checkpoint is a directory with a file per rank and, written last, a *marker*::

    checkpoints/step-100/checkpoint_0.safetensors, ..., commit.json

Incomplete directories have other names in the same parent. ``.step-100.part`` is being
written, and ``.step-100.*.part`` is being committed. ``.step-100.old`` is the previous
checkpoint, on a file system that cannot exchange names. Where the old directory cannot
be renamed, it is a copy, and the directory of that name loses its marker first.
``.step-100.*.trash`` is being removed. So the name itself always leads to the complete
old checkpoint or the complete new one, whatever dies and when.

Each commit has a *serial number*, which is higher than those of all checkpoints beside
it. So a list is in the order of the commits, whatever the steps are.

All functions block, and none needs a tensor.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from aiockpt.errors import CheckpointNotFoundError, StorageError
from aiockpt.format.entries import Count
from aiockpt.runtime.system import is_programs
from aiockpt.runtime.words import command_line
from aiockpt.storage.files import named, regular_file

logger = logging.getLogger("aiockpt")

StrPath: TypeAlias = str | os.PathLike[str]

MARKER: Final = "commit.json"
"""The file that makes a directory a checkpoint."""

RANK_FILE: Final = re.compile(r"checkpoint_[0-9]+\.safetensors")
"""The names that `rank_file` returns."""

ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")
"""The names of directories that hold the ranks' files in an object store."""

_KEY: Final = rf"\A({ATTEMPT.pattern}/{RANK_FILE.pattern})?\Z"
_VERSION: Final = 2
_VERSIONS: Final = (1, 2)  # version 1 has no serial number
_DCP: Final = ".metadata"
_FILES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_SHOWN_NAMES: Final = 5
_MAX_TRIES: Final = 10  # while others replace it
_MARKER_LIMIT: Final = 64 << 20
_MARKER_HEAD: Final = 128
MAX_SERIAL: Final = 2**63 - 1
# "step-12" and "epoch=0-step=10-loss=0.25.ckpt"; else a whole number at the end.
_NAMED_STEP = re.compile(r"(?<![a-z])step[=_-]?([0-9]{1,18})(?![0-9])", re.IGNORECASE)
_STEP = re.compile(r"(?<![0-9]\.)(?<![0-9])([0-9]{1,18})(\.[a-z_]+)?$", re.IGNORECASE)
# One slash is left of a URL that went through `Path`. A drive has one letter.
_STORE = re.compile(r"(s3a?|gs|az|memory):/", re.IGNORECASE)
_ADDRESS = re.compile(r"([a-z0-9]+):/{1,2}([^/?#@]+(?:/[^/?#@]+)*)/*", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/{1,2}", re.IGNORECASE)
_OLD = re.compile(r"\.(.+)\.old", re.DOTALL)
_SERIAL = re.compile(rb'\{\s*"aiockpt": [0-9]+,\s*"serial": ([0-9]{1,19}),')


class RankFile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The entry of a rank's file in the marker.

    Attributes:
        bytes: Its size.
        snapshot: Its `Manifest.snapshot_id`.
        key: Where it is below the checkpoint's path. Empty: it has its own name there.
    """

    bytes: Count
    snapshot: str
    key: Annotated[str, Meta(pattern=_KEY)] = ""


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a marker; ``files`` are the ranks' files by name."""

    aiockpt: Count = _VERSION
    serial: Count = 0
    step: Count
    world_size: Annotated[int, Meta(ge=1)]
    files: dict[str, RankFile]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its directory and the content of its marker.

    Attributes:
        path: The directory. After a crash in the middle of a replacement, it may be the
            ``.old`` one.
        name: The name under which it was saved.
        step: Its training step.
        world_size: How many ranks wrote it.
        files: The ranks' files by name.
        serial: Higher than those of earlier commits beside it; 0 in an older marker.
        saved_at: When its marker was written, in seconds since the epoch.
    """

    path: Path
    name: str
    step: int
    world_size: int
    files: Mapping[str, RankFile]
    serial: int = 0
    saved_at: float = 0.0

    def __fspath__(self) -> str:
        """Return the directory, so that ``load`` takes a checkpoint for a path."""
        return expanded(self.path)

    @property
    def nbytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.bytes for file in self.files.values())

    def file_of(self, rank: int) -> Path:
        """Return a rank's file.

        Raises:
            CheckpointNotFoundError: fewer ranks wrote the checkpoint.
        """
        name = rank_file(rank)
        if name not in self.files:
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            detail = f"{ranks} wrote it, and none of them was rank {rank}"
            raise CheckpointNotFoundError(os.fspath(self), detail)
        return self.path / (self.files[name].key or name)


def keys_of(files: Mapping[str, RankFile]) -> dict[str, RankFile]:
    """Return the files of a marker by their keys below the checkpoint's path."""
    return {said.key or name: said for name, said in files.items()}


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"checkpoint_{rank}.safetensors"


def step_in(path: StrPath) -> int | None:
    """Return the step in a checkpoint's name; None if there is none.

    That is the number behind the word ``step``, else the whole number at the end, or
    before a suffix such as ``.ckpt``.
    """
    name = Path(path).name
    found = _NAMED_STEP.search(name) or _STEP.search(name)
    return int(found[1]) if found else None


def step_of(path: StrPath) -> int:
    """Return the step in a checkpoint's name; 0 if there is none."""
    return step_in(path) or 0


def text_of(path: StrPath) -> str:
    """Return a path, or a peer's URL, as text.

    Raises:
        TypeError: it is neither text nor a path.
    """
    text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        kind = type(text).__name__
        raise TypeError(f"path must be a str or an os.PathLike, got {kind}")
    return text


def expanded(path: StrPath) -> str:
    """Return a path as text, with the home directory in place of a leading ``~``.

    The address of an object store has two slashes after its scheme, and none at its
    end.

    Raises:
        StorageError: there is no such home directory; or the path is empty or a URL.
        TypeError: it is no path.
    """
    text = text_of(path)
    if not text:  # a variable that is not set; pathlib takes it for "."
        raise StorageError("''", "the path is empty; write . for this directory")
    if is_address(text):
        return _normalized(text)
    if scheme := _SCHEME.match(text):
        text, _, _ = text.partition("#")  # without the token of a URL
        detail = (
            f"it begins with {scheme[0]}, as a URL does: name a path of a file system"
        )
        raise StorageError(text, f"{detail}, or write ./{text} if it is one")
    found = os.path.expanduser(text) if text.startswith("~") else text
    if found.startswith("~"):
        detail = f"there is no such home directory; write ./{text} for a name with ~"
        raise StorageError(text, detail)
    return found


def is_address(text: str) -> bool:
    """Say whether a path is the address of an object store."""
    return _STORE.match(text) is not None


def _normalized(address: str) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or {".", ".."} & {*found[2].split("/")}:
        shown = f"{address.partition(':')[0]}://..."  # the rest may have a secret
        detail = "it is no address of an object store, such as s3://bucket/run/step-100"
        raise StorageError(shown, detail)
    return f"{found[1].lower()}://{found[2]}"


def split_address(address: str) -> tuple[str, str]:
    """Return the scheme and bucket of a normalized address, and the key below them."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def absolute(path: StrPath, *, follow_links: bool = False) -> str:
    """Return an absolute path, or a normalized address.

    Raises:
        StorageError: see `expanded`.
        OSError: the path is relative, and the working directory is gone.
    """
    text = expanded(path)
    if is_address(text):
        return text
    return os.path.realpath(text) if follow_links else os.path.abspath(text)


def local_path(path: StrPath) -> Path:
    """Return the path that `expanded` returns, so that it stays if expanded again.

    A path loses its leading ``./``, which may have kept a name with ``~`` from that.
    """
    text = expanded(path)
    found = Path(text)
    again = f"{found}"
    if is_address(text):
        return found
    if again.startswith("~") or _SCHEME.match(again):
        return Path(os.path.abspath(text))
    return found


def resolve_target(path: StrPath) -> Path:
    """Return the path of a checkpoint with all symbolic links resolved.

    Raises:
        StorageError: the path is the root, or the system cannot look it up.
    """
    resolved = resolve_path(path)
    if not resolved.name:
        raise StorageError(str(path), "this is the root directory: name one below it")
    return resolved


def resolve_path(path: StrPath) -> Path:
    """Return any path with all symbolic links resolved; see `resolve_target`."""
    try:
        if is_address(text := expanded(path)):
            detail = "this needs a path of a file system: copy the checkpoint to one"
            raise StorageError(text, detail)
        resolved = Path(text).resolve()
        with suppress(FileNotFoundError, NotADirectoryError):
            resolved.stat()  # raises if the path is too long, or may not be looked up
    except StorageError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL in it
        if is_programs(error):
            raise
        said = getattr(error, "strerror", None) or str(error)
        raise StorageError(str(path), said) from error
    return resolved


def part_of(path: Path) -> Path:
    """Return the directory in which all ranks write a checkpoint."""
    return path.with_name(f".{path.name}.part")


def old_of(path: Path) -> Path:
    """Return the name of the previous checkpoint during a replacement."""
    return path.parent / f".{path.name}.old"  # of the root, nothing


def encode_commit(step: int, files: Mapping[str, RankFile], serial: int) -> bytes:
    """Return the marker of a checkpoint, as readable JSON."""
    commit = Commit(serial=serial, step=step, world_size=len(files), files=dict(files))
    return msgspec.json.format(msgspec.json.encode(commit), indent=2) + b"\n"


def next_serial(directory: Path) -> int:
    """Return a serial number higher than those of all checkpoints in a directory.

    Two savers that commit at the same time may get the same number.
    """
    found = (_serial_in(each) for each in _names_in(directory))
    return min(1 + max(found, default=0), MAX_SERIAL)


def _serial_in(directory: Path) -> int:
    # Only the start is read: a marker of many ranks is long.
    for each in (directory, old_of(directory)):
        with suppress(OSError):
            with regular_file(each / MARKER) as file:
                said = _SERIAL.match(os.pread(file.fileno(), _MARKER_HEAD, 0))
            if said is None:  # an older one, or one that another program has rewritten
                found = _read_marker(each / MARKER)
                return found[0].serial if found else 0
            return int(said[1])
    return 0


def checkpoint_at(path: StrPath) -> Checkpoint:
    """Return the complete checkpoint of this name.

    Raises:
        CheckpointNotFoundError: there is none; the message says what was found.
        StorageError: the marker is damaged, or has a later version.
    """
    directory = resolve_target(path)
    if (found := complete_at(directory)) is not None:
        return found
    with named(directory):
        raise CheckpointNotFoundError(str(path), _what_is_at(directory))


def complete_at(directory: Path) -> Checkpoint | None:
    """Return the complete checkpoint of this name, or None.

    Nothing below other directories is looked at: there may be millions of files.

    Raises:
        StorageError: the marker is damaged, or has a later version.
    """
    for _ in range(_MAX_TRIES):
        before = identity(directory)
        if (found := _checkpoint_in(directory, directory.name)) is not None:
            return found
        if not (directory / MARKER).exists():
            found = _checkpoint_in(old_of(directory), directory.name)
            if found is not None:
                return found
        if identity(directory) == before:  # else it was replaced meanwhile
            break
    return None


def identity(directory: Path) -> tuple[int, int] | None:
    """Return the device and inode of a directory, or None if it does not exist."""
    with suppress(OSError):
        found = directory.stat()
        return found.st_dev, found.st_ino
    return None


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a directory, in the order of their commits.

    Raises:
        StorageError: the directory cannot be read.
    """
    readable = map(_readable, _names_in(directory))
    found = {each.path: each for each in readable if each}  # a link may name one again
    return sorted(found.values(), key=commit_order)


def commit_order(checkpoint: Checkpoint) -> tuple[int, float, int, str]:
    """Return the key that sorts checkpoints by their commits."""
    serial = checkpoint.serial
    time = 0.0 if serial else checkpoint.saved_at
    return serial, time, checkpoint.step, checkpoint.name


def _readable(path: Path) -> Checkpoint | None:
    try:
        return complete_at(resolve_target(path))
    except StorageError as error:
        logger.warning("a checkpoint is left out: %s", error)
        return None


def _names_in(directory: Path) -> Iterator[Path]:
    """Yield the paths at which there may be checkpoints."""
    names: dict[str, None] = {}
    with named(directory), suppress(FileNotFoundError):
        for each in os.scandir(directory):
            if not each.name.startswith("."):
                names[each.name] = None
            elif old := _OLD.fullmatch(each.name):
                names[old[1]] = None
    return (directory / name for name in names)


def _checkpoint_in(directory: Path, name: str) -> Checkpoint | None:
    """Return the checkpoint in a directory if its marker and all files are there."""
    found = _read_marker(directory / MARKER)
    if found is None:
        return None
    commit, saved_at = found
    checkpoint = described(commit, directory, name, saved_at)
    if any(
        _size(directory / key) != said.bytes
        for key, said in keys_of(commit.files).items()
    ):
        return None
    return checkpoint


def described(commit: Commit, path: Path, name: str, saved_at: float) -> Checkpoint:
    """Return the checkpoint of a marker.

    Raises:
        StorageError: the marker does not name exactly one file for each rank.
    """
    if len(commit.files) != commit.world_size:
        detail = f"it names {len(commit.files)} files for {commit.world_size} ranks"
        raise StorageError(str(path / MARKER), detail)
    for file in commit.files.keys() - map(rank_file, range(commit.world_size)):
        detail = f"{file!r} is not the name of a rank's file"
        raise StorageError(str(path / MARKER), detail)
    return Checkpoint(
        path=path,
        name=name,
        step=commit.step,
        world_size=commit.world_size,
        files=commit.files,
        serial=commit.serial,
        saved_at=saved_at,
    )


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return -1


def _read_marker(path: Path) -> tuple[Commit, float] | None:
    """Return the content of a marker and its file time; None if it is not there."""
    with named(path):
        try:
            file = regular_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with file:
            said = os.fstat(file.fileno())
            saved_at = said.st_mtime
            text = file.read(min(said.st_size, _MARKER_LIMIT))
    return decode_commit(str(path), text), saved_at


class _VersionedMarker(msgspec.Struct):
    aiockpt: int


def decode_commit(path: str, text: bytes) -> Commit:
    """Return the content of a marker; ``path`` is for errors.

    Raises:
        StorageError: it is no marker of this library, or has a later version.
    """
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise StorageError(path, f"it is not a valid marker: {error}") from error


_VERSION_JSON: Final = msgspec.json.Decoder(_VersionedMarker)
_COMMIT_JSON: Final = msgspec.json.Decoder(Commit)


def _decode(text: bytes) -> Commit:
    version = _VERSION_JSON.decode(text).aiockpt
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        detail = f"format version {version}; this library knows versions {known}"
        raise msgspec.ValidationError(detail)
    commit = _COMMIT_JSON.decode(text)
    if (commit.serial > 0) is not (version > 1):
        detail = f"serial number {commit.serial} in a marker of version {version}"
        raise msgspec.ValidationError(detail)
    return commit


def _what_is_at(directory: Path) -> str:
    """Return why there is no complete checkpoint."""
    if not directory.exists():
        return "there is no such checkpoint"
    if not directory.is_dir():
        return "it is a file"
    if (found := _read_marker(directory / MARKER)) is not None:
        files = sorted(keys_of(found[0].files).items())
        lost = [key for key, said in files if _size(directory / key) != said.bytes]
        shown = ", ".join(lost[:_SHOWN_NAMES]) + ", ..." * (len(lost) > _SHOWN_NAMES)
        return f"missing, or not of the size that its marker says: {shown}"
    names = sorted(each.name for each in directory.iterdir() if each.is_file())
    return what_is_in(str(directory), checkpoints_in(directory), names)


def what_is_in(
    directory: str, found: Sequence[Checkpoint], names: Sequence[str]
) -> str:
    """Return what a directory without a marker holds, and how to load that."""
    if found:
        count = len(found)
        many = "1 checkpoint" if count == 1 else f"{count} checkpoints"
        return (
            f"it holds {many}, the newest is {os.fspath(found[-1])}; load that, or "
            f"aiockpt.latest({directory!r})"
        )
    if _DCP in names:
        command = command_line("aiockpt", "convert", directory, "NEW")
        return (
            "it is a checkpoint of torch.distributed.checkpoint: aiockpt.load() loads "
            f"it, and {command} makes one of ours of it"
        )
    files = [name for name in names if name.endswith(_FILES)]
    if files:
        shown = ", ".join(files[:_SHOWN_NAMES]) + ", ..." * (len(files) > _SHOWN_NAMES)
        return f"it holds no marker, but {shown}; load one file by its own path"
    return "it holds no marker: no save to it was completed"
