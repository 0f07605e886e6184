"""Checkpoints in an object store: S3, GCS, Azure, or any other store of obstore.

A store has no directories, no renames and no locks. A checkpoint is this::

    run/step-100/<attempt>/checkpoint_0.safetensors, ...
    run/step-100/commit.json
    run/.aiockpt/<attempt>.json

Each rank writes its file below a random *attempt*. When all files are there, rank 0
writes the marker, which names them. That is one conditional request. It fails if
another saver has committed since this save began. So of several savers, one wins.

A *note* names attempts that are deleted later, unless the marker of their checkpoint
names them. A rank writes its note before its file, and removes it after the commit. So
whatever dies and when, a later save finds everything that it may delete.

A sweep deletes what notes name that are older than an hour by the clock of the store.
A saver writes its note again in time, and commits only while the notes of all its ranks
are younger. Only one process writes or removes a note, until it is swept.

Before a checkpoint is removed, its marker is replaced by one without files. Nobody
replaces that, so deleting it cannot hit the marker of another save.

Everything here blocks.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import msgspec
from msgspec import Meta

from aiockpt.errors import CheckpointNotFoundError, StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.runtime.bridge import share_out
from aiockpt.storage.bucket import Bucket, StoredContent
from aiockpt.storage.checkpoint_file import OpenFile
from aiockpt.storage.directory import (
    ATTEMPT,
    MARKER,
    MAX_SERIAL,
    RANK_FILE,
    Checkpoint,
    Commit,
    RankFile,
    commit_order,
    decode_commit,
    described,
    encode_commit,
    keys_of,
    rank_file,
    what_is_in,
)
from aiockpt.storage.retention import remove_each, superfluous
from aiockpt.storage.write import Writable

logger = logging.getLogger("aiockpt")

_NOTES: Final = ".aiockpt"
_HEAD_BYTES: Final = 64 << 10  # that are read when an object is opened
_PART_BYTES: Final = 8 << 20  # a slow line sends it before obstore gives up
_MAX_PARTS: Final = 9_000  # of the 10,000 that S3 allows
_MARKERS_AT_ONCE: Final = 16
_MARKER_LIMIT: Final = 64 << 20
_NOTE: Final = re.compile(rf"(?:.*/)?{re.escape(_NOTES)}/({ATTEMPT.pattern})\.json")
_PART: Final = rf"\A({ATTEMPT.pattern}|{RANK_FILE.pattern})\Z"

_RENEWED_AFTER_S: Final = 600.0
_EXPIRED_AFTER_S: Final = 2700.0
_ABANDONED_AFTER_S: Final = 3600.0
"""The age at which a note is written again, allows no commit, and is swept.

Between the last two, a commit ends that has begun in time.
"""


_serials: dict[str, int] = {}  # the last one of this process, by directory


# ----------------------------------------------------------------------------- reading


class StoredObject(OpenFile):
    """An object that is open for reading. The first request comes when it is read.

    Raises:
        StorageError: there is no such object, or it cannot be read.
    """

    block_bytes = 8 << 20  # of one request
    readers = 4  # so 32 MiB are in memory beside the state

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.path = bucket.address(key)
        self._bucket, self._key = bucket, key

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self._opened.meta["size"])

    def read(self, views: Sequence[memoryview], at: int) -> None:
        """Fill views one after another from an offset, all of them."""
        stop, head = at + sum(view.nbytes for view in views), self._opened.data
        if stop > self.size():
            raise StorageError(str(self.path), f"it ends at byte {self.size()}")
        is_here = stop <= len(head)
        found = head[at:stop] if is_here else self._fetched(at, stop)
        for view in views:
            view[:] = found[: view.nbytes]
            found = found[view.nbytes :]

    def unchanged(self) -> AbstractContextManager[None]:
        """Do nothing: each request names the version that was opened."""
        return nullcontext()

    def fileno(self) -> int:
        """Raise StorageError: it has no descriptor."""
        _refuse(str(self.path))

    @cached_property
    def _opened(self) -> StoredContent:
        if (found := self._bucket.get(self._key, (0, _HEAD_BYTES))) is None:
            raise StorageError(str(self.path), "there is no such object")
        return found

    def _fetched(self, start: int, stop: int) -> memoryview:
        if start == stop:  # a store refuses that
            return memoryview(b"")
        tag = self._opened.meta["e_tag"]
        found = self._bucket.get(self._key, (start, stop), tag=tag)
        if found is None:
            detail = "it was replaced or removed while it was read; try again"
            raise StorageError(str(self.path), detail)
        return found.data


def _refuse(address: str) -> NoReturn:
    detail = "only a file system can do that: copy it to a disk first"
    raise StorageError(address, detail)


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a note: what is to be deleted.

    Attributes:
        name: The checkpoint's name.
        attempts: The attempts, unless the checkpoint's marker names them. Files that
            were copied from a disk are without attempts, and named themselves.
    """

    name: Annotated[str, Meta(pattern=r"\A[^/]+\Z")]
    attempts: list[Annotated[str, Meta(pattern=_PART)]]


_NOTE_JSON: Final = msgspec.json.Decoder(Note)


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """An address of an object store; see `Storage`.

    Attributes:
        bucket: The bucket.
        key: The key of the address, without slashes at its ends.
    """

    bucket: Bucket
    key: str

    def __str__(self) -> str:
        return self.bucket.address(self.key)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectStorage:
        """The directory in which the checkpoint is."""
        return replace(self, key=self.key.rpartition("/")[0])

    def below(self, name: str) -> ObjectStorage:
        """Return what is below the address."""
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    # ------------------------------------------------------------------------- looking

    def kind(self) -> Literal["file", "directory"] | None:
        """Say what is there, or None if nothing is."""
        if self.head():
            return "file"
        return "directory" if any(self.held()) else None

    def head(self) -> Mapping[str, object] | None:
        """Return the properties of the object with this key; None if there is none."""
        return self.bucket.head(self.key) if self.key else None

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the keys of all objects below the address, and their sizes."""
        base = len(self.key) + 1 if self.key else 0
        for each in self.bucket.below(self.key):
            if key := each["path"][base:]:  # consoles put directories there
                yield key, each["size"]

    def listed(self) -> tuple[list[str], list[str]]:
        """Return the names of the objects and of the directories in a directory."""
        found = self.bucket.listed(self.key)
        objects = (each["path"].rpartition("/")[2] for each in found["objects"])
        directories = (each.rpartition("/")[2] for each in found["common_prefixes"])
        return sorted(objects), sorted(directories)

    def open(self, name: str = "") -> AbstractContextManager[OpenFile]:
        """Open an object for reading."""
        place = self.below(name) if name else self
        return nullcontext(StoredObject(self.bucket, place.key))

    def local(self) -> Path:
        """Raise StorageError: it is not on a file system."""
        _refuse(str(self))

    def checkpoint(self) -> Checkpoint:
        """Return the complete checkpoint that is stored there."""
        if (found := self.marker()) is None:
            raise CheckpointNotFoundError(str(self), self._what_is_there())
        checkpoint, held = self.described(found), dict(self.held())
        for key, said in keys_of(checkpoint.files).items():
            if held.get(key) != said.bytes:
                detail = f"missing, or not of the size that its marker says: {key}"
                raise CheckpointNotFoundError(str(self), detail)
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints of a directory, as their markers say."""
        found: list[Checkpoint] = []

        def read(name: str) -> None:
            child = self.below(name)
            if (marker := child.marker()) is not None:
                try:
                    found.append(child.described(marker))
                except CheckpointNotFoundError:
                    pass  # it is being removed
                except StorageError as error:
                    logger.warning("a checkpoint is left out: %s", error)

        names = [name for name in self.listed()[1] if name[0] != "."]
        share_out(read, names, at_once=_MARKERS_AT_ONCE)
        return sorted(found, key=commit_order)

    def was_saved(self) -> bool:
        """Say whether a checkpointer has committed a checkpoint there."""
        return self.version() is not None

    def version(self) -> object:
        """Return the entity tag of the marker; None if there is none."""
        found = self.below(MARKER).head()
        return found and found["e_tag"]

    def marker(self) -> StoredContent | None:
        """Return the marker; None if there is none."""
        # A larger one is not ours, and does not decode.
        return self.bucket.get(self.below(MARKER).key, limit=_MARKER_LIMIT)

    def commit_in(self, marker: StoredContent) -> Commit:
        """Return what the marker says; see `decode_commit`."""
        return decode_commit(str(self.below(MARKER)), bytes(marker.data))

    def described(self, found: StoredContent) -> Checkpoint:
        """Return the checkpoint of its marker.

        Raises:
            CheckpointNotFoundError: it is being removed.
            StorageError: the marker is damaged, or has a later version.
        """
        commit = self.commit_in(found)
        if not commit.files:
            raise CheckpointNotFoundError(str(self), "it is being removed")
        saved_at = found.meta["last_modified"].timestamp()
        return described(commit, Path(str(self)), self.name, saved_at)

    def _what_is_there(self) -> str:
        objects, directories = self.listed()
        if not objects and not directories:
            return "it is a file" if self.head() else "there is no such checkpoint"
        return what_is_in(str(self), self.checkpoints(), objects)

    # -------------------------------------------------------------- saving and removing

    def draft(self, rank: int, *, durable: bool, shared: bool) -> Upload:
        """Begin to save one rank's file. A store confirms only what is durable."""
        del durable, shared
        return Upload(self, rank)

    def is_committed(self, rank: int, identity: tuple[int, int]) -> bool:
        """Say whether the checkpoint has the file of a rank's draft."""
        found, (high, low) = self.marker(), identity
        file = found and self.commit_in(found).files.get(rank_file(rank))
        return bool(file and file.key.startswith(f"{high << 64 | low:032x}/"))

    def retire_others(self, *, keep_last: int, keep_every: int | None) -> None:
        """Remove the checkpoints beside this one that need not be kept."""
        found = superfluous(
            self.parent.checkpoints(),
            keep_last=keep_last,
            keep_every=keep_every,
            spare={Path(str(self))},
        )
        remove_each(found, self.parent.retire)

    def retire(self, checkpoint: Checkpoint) -> bool:
        """Remove a checkpoint of this directory; return False if it was replaced."""
        there, note = self.below(checkpoint.name), secrets.token_hex(16)
        place, attempts = there.below(MARKER), _attempts(checkpoint.files)
        found = there.marker()
        if (
            found is None
            or (commit := there.commit_in(found)).files != checkpoint.files
        ):
            return False
        there.put_note(note, attempts)
        empty = msgspec.json.encode(msgspec.structs.replace(commit, files={}))
        if not self.bucket.put(place.key, empty, found.version):
            return False
        self.bucket.delete([place.key])
        there.remove(attempts)
        there.remove_note(note)
        return True

    def put_note(self, note: str, attempts: Sequence[str]) -> None:
        """Note that attempts are to be deleted, unless the marker names them."""
        content = msgspec.json.encode(Note(self.name, [*attempts]))
        self.bucket.put(self.note(note).key, content)

    def remove_note(self, note: str) -> None:
        """Remove a note."""
        self.bucket.delete([self.note(note).key])

    def remove(self, attempts: Sequence[str]) -> None:
        """Delete the ranks' files of attempts, and abort their uploads."""
        self.bucket.abort_uploads(self.key, attempts)
        keys = [
            self.below(key).key
            for key, _ in self.held()
            if key.partition("/")[0] in attempts
            and RANK_FILE.fullmatch(key.rpartition("/")[2])
        ]
        self.bucket.delete(keys)

    def noted(self) -> dict[str, float]:
        """Return when the notes of a directory were written, by the store's clock."""
        found = self.bucket.below(self.below(_NOTES).key)
        names = ((_NOTE.fullmatch(each["path"]), each) for each in found)
        return {
            name[1]: each["last_modified"].timestamp() for name, each in names if name
        }

    def sweep(self, notes: Mapping[str, float]) -> None:
        """Delete what dead saves have left in a directory. Errors are ignored."""
        newest = max(notes.values(), default=0.0)
        for name, written in notes.items():
            if newest - written > _ABANDONED_AFTER_S:
                self._sweep(self.below(f"{_NOTES}/{name}.json"))

    def _sweep(self, place: ObjectStorage) -> None:
        """Delete what a note names, unless that is committed."""
        with suppress(StorageError, msgspec.MsgspecError):
            found = self.bucket.get(place.key, limit=_MARKER_LIMIT)
            if found is None:
                return
            note = _NOTE_JSON.decode(found.data)
            child = self.below(note.name)
            marker = child.marker()
            files = child.commit_in(marker).files if marker else {}
            if marker and not files:  # its removal was interrupted
                self.bucket.delete([child.below(MARKER).key])
            kept = _attempts(files)
            child.remove([each for each in note.attempts if each not in kept])
            self.bucket.delete([place.key])

    def note(self, name: str) -> ObjectStorage:
        """Return where a note of this checkpoint is."""
        return self.parent.below(f"{_NOTES}/{name}.json")


def _attempts(files: Mapping[str, RankFile]) -> list[str]:
    """Return what a marker names below its checkpoint; see `Note`."""
    return [*{key.partition("/")[0]: None for key in keys_of(files)}]


# ------------------------------------------------------------------------------ saving


class Upload(AbstractContextManager["Upload"]):
    """One rank's file of a save to an object store; see `RankDraft`.

    Raises:
        StorageError: no checkpoint can be saved there.
    """

    def __init__(self, destination: ObjectStorage, rank: int) -> None:
        self._destination, self._rank = destination, rank
        self._attempt = secrets.token_hex(16)
        self._before: StoredContent | None = None
        self._noted_at = 0.0  # the note is not there yet
        self._is_offered = self._is_committed = False  # may rank 0 commit it?
        self._is_in_parts = False
        self._notes: dict[str, float] = {}
        if not rank:
            self._before = destination.marker()
            self._check_free()

    def __exit__(self, *_: object) -> None:
        """Remove the note of a committed file. A sweep removes any other."""
        there, old = self._destination, self._replaced()
        with suppress(StorageError):
            if not self._noted_at or not self._is_in_marker():
                return
            if self._is_in_parts:
                # A lost answer may have made obstore begin a second upload.
                there.bucket.abort_uploads(there.key, [self._attempt])
            if old:  # they stay for their readers, until they are swept
                there.put_note(self._attempt, old)
            else:
                there.remove_note(self._attempt)
            there.parent.sweep(self._notes)

    @property
    def identity(self) -> tuple[int, int]:
        """The two halves of the attempt."""
        return divmod(int(self._attempt, 16), 1 << 64)

    def write(self, writable: Writable) -> Manifest:
        """Upload the file, in parts; return its header.

        If this raises, or is interrupted, the store forgets the parts.
        """
        header, there = writable.seal(), self._destination
        self._renew(at_once=True)
        there.bucket.require_conditions(there.note(self._attempt).key)
        place = there.below(f"{self._attempt}/{rank_file(self._rank)}")
        part = max(_PART_BYTES, -(-header.total_bytes // _MAX_PARTS))
        data = self._parts(header, writable, part)
        self._is_in_parts = header.total_bytes > part
        if self._is_in_parts:
            there.bucket.put_parts(place.key, data, part)
        else:
            there.bucket.put(place.key, b"".join(data))
        return writable.seal()  # it raises if the bytes have changed since then

    def arrival(self, header: Manifest) -> str:
        """Return what the file is, its attempt, and its size."""
        self._renew()
        self._is_offered = self._rank > 0
        return f"{header.snapshot_id}/{self._attempt}/{header.total_bytes}"

    def commit(self, step: int, arrivals: Mapping[int, str]) -> list[Path]:
        """Put the marker, unless another saver has put one since this save began."""
        there, files = self._destination, dict[str, RankFile]()
        old = self._replaced()
        self._renew(old, at_once=bool(old))
        self._notes = notes = there.parent.noted()
        own = notes.get(self._attempt, 0.0)
        now = own + time.monotonic() - self._noted_at  # by the store's clock
        for rank, said in sorted(arrivals.items()):
            snapshot, attempt, size = said.split("/")
            name = rank_file(rank)
            files[name] = RankFile(int(size), snapshot, f"{attempt}/{name}")
            noted = notes.get(attempt)
            if noted is None or now - noted > _EXPIRED_AFTER_S:
                detail = (
                    "this rank's file is not there, or has waited for too long: do all "
                    "ranks save to one store, and at one time?"
                )
                raise StorageError(str(there.below(files[name].key)), detail)
        self._put_marker(encode_commit(step, files, self._next_serial(now)))
        return []

    def is_committed(self) -> bool:
        """Say whether a checkpoint with this rank's file is committed."""
        with suppress(StorageError):
            return self._is_in_marker()
        return False

    def discard(self, *, agreed: bool = False) -> None:
        """Delete what this rank has uploaded, unless it may be committed."""
        with suppress(StorageError):
            is_free = agreed or not self._is_offered
            if self._noted_at and is_free and not self._is_in_marker():
                self._destination.remove([self._attempt])
                self._destination.remove_note(self._attempt)

    def _is_in_marker(self) -> bool:
        there = self._destination
        return self._is_committed or there.is_committed(self._rank, self.identity)

    def _replaced(self) -> list[str]:
        """Return the attempts of the checkpoint that this save replaces."""
        there, before = self._destination, self._before
        return [] if before is None else _attempts(there.commit_in(before).files)

    def _check_free(self) -> None:
        """Refuse a destination that holds something else."""
        there = self._destination
        if not there.key:
            raise StorageError(str(there), "this is the bucket: name something in it")
        if _NOTES in there.key.split("/"):
            raise StorageError(str(there), f"{_NOTES} is for the notes of saves")
        if there.head():
            raise StorageError(str(there), "it is a file; name a directory")
        below = (key.partition("/")[0] for key, _ in there.held())
        if self._before is not None:
            there.described(self._before)  # or it is being removed
        elif not all(map(ATTEMPT.fullmatch, below)):
            detail = "it holds files, and no checkpoint; choose a new directory"
            raise StorageError(str(there), detail)

    def _renew(self, replaced: Sequence[str] = (), *, at_once: bool = False) -> None:
        """Write the note, or write it again before a sweep takes it for abandoned.

        Raises:
            StorageError: it is too late for that.
        """
        now = time.monotonic()
        age = now - self._noted_at if self._noted_at else 0.0
        if age > _EXPIRED_AFTER_S:
            detail = f"this save has paused for {age:.0f} s, and may have been deleted"
            raise StorageError(str(self._destination), detail)
        if at_once or age > _RENEWED_AFTER_S:
            self._destination.put_note(self._attempt, [self._attempt, *replaced])
            self._noted_at = now

    def _next_serial(self, now: float) -> int:
        """Return a number above those of all commits before.

        It is the time in milliseconds. A store tells whole seconds, which this host's
        clock divides.
        """
        there = self._destination
        directory = str(there.parent)
        before = 0 if self._before is None else there.commit_in(self._before).serial
        before = max(before, _serials.get(directory, 0))
        serial = int(1000 * min(max(time.time(), now), now + 0.999))
        _serials[directory] = min(max(serial, before + 1), MAX_SERIAL)
        return _serials[directory]

    def _put_marker(self, text: bytes) -> None:
        there, before = self._destination, self._before
        self._is_offered = True
        detail = ""
        try:
            self._is_committed = there.bucket.put(
                there.below(MARKER).key,
                text,
                "create" if before is None else before.version,
            )
        except StorageError as error:
            detail = f"it is not known whether it was committed: {error.detail}"
        with suppress(StorageError):
            # The answer to an earlier try of the same request may have been lost.
            if self._is_in_marker():
                return
            if not detail:
                self._is_offered = False
                detail = (
                    "another process has saved to it, or removed it, since this save "
                    "began: nothing of this save is there; save again, or elsewhere"
                )
        told = StorageError(str(there), detail)
        told.may_be_committed = self._is_offered
        raise told

    def _parts(self, header: Manifest, writable: Writable, size: int) -> Iterator[Any]:
        """Yield the header and the views of the data segment, part by part."""
        yield header.header
        for start in range(0, writable.segment_bytes, size):
            self._renew()
            yield from writable.views(start, min(start + size, writable.segment_bytes))
