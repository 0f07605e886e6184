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
whatever dies and when, a later save finds everything that it may delete. It judges the
age of a note by the clock of the store.

Everything here blocks. Only this module imports obstore.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn
from urllib.parse import quote

import msgspec

from aiockpt.errors import (
    CheckpointNotFoundError,
    MissingExtraError,
    StorageError,
)
from aiockpt.format.manifest import Manifest
from aiockpt.runtime.bridge import share_out
from aiockpt.storage.checkpoint_file import OpenFile
from aiockpt.storage.directory import (
    ATTEMPT,
    MARKER,
    Checkpoint,
    Commit,
    RankFile,
    commit_order,
    decode_commit,
    described,
    encode_commit,
    rank_file,
    split_address,
    what_is_in,
)
from aiockpt.storage.retention import superfluous
from aiockpt.storage.write import Writable

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
except ModuleNotFoundError as missing:
    raise MissingExtraError("obstore", extra="objects") from missing

logger = logging.getLogger("aiockpt")

_NOTES: Final = ".aiockpt"
_HEAD_BYTES: Final = 256 << 10  # that are read when an object is opened
_PART_BYTES: Final = 8 << 20  # a slow line sends it before obstore gives up
_PARTS_AT_ONCE: Final = 4
_MAX_PARTS: Final = 9_000  # of the 10,000 that S3 allows
_SHOWN_CHARACTERS: Final = 200
_SIGNED_FOR: Final = timedelta(minutes=5)
_UPLOAD: Final = re.compile(r"<Key>([^<]+)</Key>\s*<UploadId>([^<]+)</UploadId>")

_ABANDONED_AFTER_S: Final = 3600.0
_MIN_RATE: Final = 10e6
"""How many bytes in a second a save uploads that has not been abandoned."""


# -------------------------------------------------------------------- stores and errors

_users: list[int] = []  # the process that has begun to use obstore
_conditional: set[str] = set()  # the buckets that are known to have conditional puts


def object_storage(
    address: str, stores: Mapping[str, ObjectStore | None]
) -> ObjectStorage:
    """Return what is stored at a normalized address.

    Args:
        address: The address.
        stores: The registered stores, by scheme and bucket. None: it is unknown here.

    Raises:
        StorageError: there is no such store, or this process was forked.
    """
    if (pid := os.getpid()) not in _users:
        if _users:
            detail = "obstore does not work in a forked process: start it by spawn"
            raise StorageError(address, detail)
        _users.append(pid)
    root, key = split_address(address)
    with _naming(address):
        store = stores[root] if root in stores else _store_at(root)
    if store is None:
        detail = (
            "this process has no such store: register it (aiockpt.register_store); if "
            "it cannot be pickled, save with CheckpointerConfig(use_process=False)"
        )
        raise StorageError(address, detail)
    return ObjectStorage(store, root, key)


@lru_cache(maxsize=16)
def _store_at(root: str) -> ObjectStore | None:
    is_in_memory = root.startswith("memory:")  # so it would be another one each time
    return None if is_in_memory else obstore.store.from_url(root)


@contextmanager
def _naming(address: str) -> Iterator[None]:
    """Raise ``StorageError`` where obstore raises an error.

    The text of the store's answer is left out: it may name a key of an account.
    """
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError(address, _missing(error)) from None
    except BaseError as error:
        raise StorageError(address, _detail(error)) from None


def _missing(error: Exception) -> str:
    lacks_bucket = "NoSuchBucket" in str(error)
    return "there is no such bucket" if lacks_bucket else "there is no such object"


def _detail(error: Exception) -> str:
    # The request comes first, then the cause, then perhaps the text of the answer.
    cause = re.split(r"[\n<]", str(error))[0].rpartition(" - ")[2]
    is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if is_refused or re.search(r" 40[13] ", cause):
        return (
            "the store refuses access: check the store's credentials that obstore "
            "finds, and what they may do in this bucket"
        )
    if "NoSuchBucket" in str(error):
        return _missing(error)
    return f"the store failed: {cause[:_SHOWN_CHARACTERS].strip(' :')}"


# ----------------------------------------------------------------------------- reading


class StoredObject(OpenFile):
    """An object that is open for reading.

    Raises:
        StorageError: there is no such object, or it cannot be read.
    """

    block_bytes = 8 << 20  # of one request
    readers = 4  # so 32 MiB are in memory beside the state

    def __init__(self, store: ObjectStore, key: str, address: str) -> None:
        self.path = address
        self._store, self._key = store, key
        with _naming(address):
            self._meta = obstore.head(store, key)
        self._head = self._fetched(0, min(_HEAD_BYTES, self.size()))

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self._meta["size"])

    def read(self, views: Sequence[memoryview], at: int) -> None:
        """Fill views one after another from an offset, all of them."""
        stop = at + sum(view.nbytes for view in views)
        if stop > self.size():
            raise StorageError(str(self.path), f"it ends at byte {self.size()}")
        is_here = stop <= self._head.nbytes
        found = self._head[at:stop] if is_here else self._fetched(at, stop)
        for view in views:
            view[:] = found[: view.nbytes]
            found = found[view.nbytes :]

    def unchanged(self) -> AbstractContextManager[None]:
        """Do nothing: each request names the version that was opened."""
        return nullcontext()

    def fileno(self) -> int:
        """Raise StorageError: it has no descriptor."""
        _refuse(str(self.path))

    def _fetched(self, start: int, stop: int) -> memoryview:
        if start == stop:  # obstore refuses it
            return memoryview(b"")
        tag = self._meta["e_tag"]
        options: GetOptions = {"range": (start, stop), "if_match": tag}
        with _naming(str(self.path)):
            try:
                found = obstore.get(self._store, self._key, options=options).bytes()
            except (PreconditionError, FileNotFoundError):
                detail = "it was replaced or removed while it was read; try again"
                raise StorageError(str(self.path), detail) from None
        return memoryview(found)


def _refuse(address: str) -> NoReturn:
    detail = "only a file system can do that: copy it to a disk first"
    raise StorageError(address, detail)


class _Marker(NamedTuple):
    commit: Commit
    tag: str | None
    saved_at: float


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a note: what is to be deleted.

    Attributes:
        name: The checkpoint's name.
        attempts: The attempts, unless the checkpoint's marker names them.
        nbytes: The bytes of an attempt that is being uploaded.
    """

    name: str
    attempts: list[str]
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """An address of an object store; see `Storage`.

    Attributes:
        store: The store of the bucket.
        root: The scheme and the bucket.
        key: The key of the address, without slashes at its ends.
    """

    store: ObjectStore
    root: str
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

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
        if self.is_object():
            return "file"
        return "directory" if any(self.listed()) else None

    def is_object(self) -> bool:
        """Say whether an object has this key."""
        with _naming(str(self)), suppress(FileNotFoundError):
            return bool(self.key and obstore.head(self.store, self.key))
        return False

    def listed(self) -> tuple[list[str], list[str]]:
        """Return the names of the objects and of the directories in a directory."""
        with _naming(str(self)):
            found = obstore.list_with_delimiter(self.store, self.key or None)
        objects = (each["path"].rpartition("/")[2] for each in found["objects"])
        directories = (each.rpartition("/")[2] for each in found["common_prefixes"])
        return sorted(objects), sorted(directories)

    def open(self, name: str = "") -> AbstractContextManager[OpenFile]:
        """Open an object for reading."""
        place = self.below(name) if name else self
        return nullcontext(StoredObject(self.store, place.key, str(place)))

    def local(self) -> Path:
        """Raise StorageError: it is not on a file system."""
        _refuse(str(self))

    def checkpoint(self) -> Checkpoint:
        """Return the complete checkpoint that is stored there."""
        if (found := self.marker()) is None:
            raise CheckpointNotFoundError(str(self), self._what_is_there())
        held = self.held()
        for said in found.commit.files.values():
            if held.get(said.key) != said.bytes:
                detail = f"missing, or not of the size that its marker says: {said.key}"
                raise CheckpointNotFoundError(str(self), detail)
        return self._described(found)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints of a directory, as their markers say."""
        found: list[Checkpoint] = []

        def read(name: str) -> None:
            child = self.below(name)
            try:
                if (marker := child.marker()) is not None:
                    found.append(child._described(marker))  # noqa: SLF001 - its own class
            except StorageError as error:
                logger.warning("a checkpoint is left out: %s", error)

        share_out(read, [name for name in self.listed()[1] if name[0] != "."])
        return sorted(found, key=commit_order)

    def was_saved(self) -> bool:
        """Say whether a checkpointer has committed a checkpoint there."""
        return self.below(MARKER).is_object()

    def version(self) -> object:
        """Return the entity tag of the marker; None if there is none."""
        with _naming(str(self)), suppress(FileNotFoundError):
            return obstore.head(self.store, self.below(MARKER).key)["e_tag"]
        return None

    def marker(self) -> _Marker | None:
        """Return the content of the marker; None if there is none.

        Raises:
            StorageError: another tool wrote it, or it is damaged.
        """
        place = self.below(MARKER)
        with _naming(str(place)):
            try:
                found = obstore.get(self.store, place.key)
                meta, text = found.meta, bytes(found.bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
        commit = decode_commit(str(place), text)
        return _Marker(commit, meta["e_tag"], meta["last_modified"].timestamp())

    def held(self) -> dict[str, int]:
        """Return the sizes of all objects below the address, by their keys there."""
        with _naming(str(self)):
            found = obstore.list(self.store, self.key or None).collect()
        base = len(self.key) + 1 if self.key else 0
        return {each["path"][base:]: each["size"] for each in found}

    def _described(self, found: _Marker) -> Checkpoint:
        return described(found.commit, Path(str(self)), self.name, found.saved_at)

    def _what_is_there(self) -> str:
        objects, directories = self.listed()
        if not objects and not directories:
            is_object = self.is_object()
            return "it is a file" if is_object else "there is no such checkpoint"
        return what_is_in(str(self), self.checkpoints(), objects)

    # -------------------------------------------------------------- saving and removing

    def draft(self, rank: int, *, durable: bool, shared: bool) -> Upload:
        """Begin to save one rank's file. A store confirms only what is durable."""
        del durable, shared
        return Upload(self, rank)

    def is_committed(self, rank: int, identity: tuple[int, int]) -> bool:
        """Say whether the checkpoint has the file of a rank's draft."""
        found, (high, low) = self.marker(), identity
        file = found and found.commit.files.get(rank_file(rank))
        return bool(file and file.key.startswith(f"{high << 64 | low:032x}/"))

    def retire_others(self, *, keep_last: int, keep_every: int | None) -> None:
        """Remove the checkpoints beside this one that need not be kept."""
        found = superfluous(
            self.parent.checkpoints(),
            keep_last=keep_last,
            keep_every=keep_every,
            spare={Path(str(self))},
        )
        failures: list[StorageError] = []
        for each in found:
            try:
                self.parent.below(each.name).retire(_attempts(each.files))
            except StorageError as error:  # the others are removed all the same
                failures.append(error)
        for failure in failures:
            raise failure

    def retire(self, attempts: Sequence[str]) -> None:
        """Remove the marker of this checkpoint, then its attempts."""
        self.put_note(attempts)
        with _naming(str(self)):
            obstore.delete(self.store, self.below(MARKER).key)
        self.remove(attempts)
        self.remove_note(attempts)

    def put_note(self, attempts: Sequence[str], nbytes: int = 0) -> None:
        """Note that attempts are to be deleted, unless the marker names them."""
        place, note = self._note(attempts), Note(self.name, [*attempts], nbytes)
        with _naming(str(place)):
            obstore.put(self.store, place.key, msgspec.json.encode(note))

    def require_conditions(self, attempts: Sequence[str]) -> None:
        """Refuse a store that puts an object although it is there already.

        Args:
            attempts: The attempts of a note that is there.
        """
        place = self._note(attempts)
        if self.root in _conditional:
            return
        with _naming(str(place)):
            try:
                obstore.put(self.store, place.key, b"", mode="create")
            except (AlreadyExistsError, PreconditionError):
                _conditional.add(self.root)
                return
            except (NotImplementedError, NotSupportedError):
                pass
            except BaseError as error:
                if " 501 " not in str(error):
                    raise
        detail = (
            "this store has no conditional puts, so that two savers could overwrite "
            "each other: save to a disk, or to another store"
        )
        raise StorageError(self.root, detail)

    def remove_note(self, attempts: Sequence[str]) -> None:
        """Remove the note of attempts."""
        place = self._note(attempts)
        with _naming(str(place)), suppress(FileNotFoundError):
            obstore.delete(self.store, place.key)

    def remove(self, attempts: Sequence[str]) -> None:
        """Delete attempts."""
        for attempt in attempts:
            place = self.below(attempt)
            if keys := [place.below(name).key for name in place.held()]:
                with _naming(str(place)):
                    obstore.delete(self.store, keys)

    def sweep(self) -> None:
        """Delete what dead saves have left in a directory. Errors are ignored."""
        with suppress(StorageError):
            place = self.below(_NOTES)
            with _naming(str(place)):
                notes = obstore.list(self.store, place.key).collect()
            now = max(each["last_modified"] for each in notes)  # by the store's clock
            for each in notes:
                age = (now - each["last_modified"]).total_seconds()
                if age > _ABANDONED_AFTER_S:
                    self._sweep(each["path"], age)

    def _sweep(self, key: str, age: float) -> None:
        """Delete what a note names, unless that is committed or being uploaded."""
        with suppress(StorageError, msgspec.MsgspecError), _naming(self.root):
            text = bytes(obstore.get(self.store, key).bytes())
            note = msgspec.json.decode(text, type=Note)
            child = self.below(note.name)
            if age > _ABANDONED_AFTER_S + note.nbytes / _MIN_RATE:
                found = child.marker()
                kept = _attempts(found.commit.files) if found else ()
                lost = [each for each in note.attempts if each not in kept]
                for attempt in lost:
                    _abort_uploads(self.store, child.below(attempt).key)
                child.remove(lost)
                obstore.delete(self.store, key)

    def _note(self, attempts: Sequence[str]) -> ObjectStorage:
        return self.parent.below(f"{_NOTES}/{attempts[0]}.json")


def _attempts(files: Mapping[str, RankFile]) -> list[str]:
    """Return the attempts of the files in a marker."""
    return [*{each.key.partition("/")[0]: None for each in files.values() if each.key}]


def _abort_uploads(store: ObjectStore, prefix: str) -> None:
    """Abort the uploads below a key of S3 that dead saves have left open.

    obstore has no call for that, but it signs the requests: the endpoint of another
    store has the query of the request in it. Errors are logged, and ignored: a rule of
    the bucket may abort such uploads, too.
    """
    if not isinstance(store, obstore.store.S3Store):
        return

    def ask(method: Literal["GET", "DELETE"], path: str, query: str) -> bytes:
        config: Any = {**store.config, "virtual_hosted_style_request": "true"}
        config["endpoint"] = f"{bucket}{path}?{query}&x-id="
        signer = obstore.store.S3Store(
            config=config,
            client_options=store.client_options,
            credential_provider=store.credential_provider,
        )
        url = obstore.sign(signer, method, "x", _SIGNED_FOR)
        request = urllib.request.Request(url, method=method)  # noqa: S310 - the store's
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return bytes(answer.read())

    try:
        signed = obstore.sign(store, "GET", "x", _SIGNED_FOR)
        bucket = signed.partition("?")[0].removesuffix("/x")
        found = ask("GET", "", f"uploads=&prefix={quote(prefix, safe='')}")
        for key, upload in _UPLOAD.findall(found.decode()):
            query = f"uploadId={quote(unescape(upload), safe='')}"
            ask("DELETE", f"/{quote(unescape(key))}", query)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - obstore's panics are no others
        logger.info("open uploads below %s are not aborted: %s", prefix, error)


# ------------------------------------------------------------------------------ saving


class Upload(AbstractContextManager["Upload"]):
    """One rank's file of a save to an object store; see `RankDraft`.

    Raises:
        StorageError: no checkpoint can be saved there.
    """

    def __init__(self, destination: ObjectStorage, rank: int) -> None:
        self._destination, self._rank = destination, rank
        self._attempt = secrets.token_hex(16)
        self._before: _Marker | None = None
        self._is_noted = self._in_doubt = False
        if not rank:
            self._before = destination.marker()
            self._check_free()

    def __exit__(self, *_: object) -> None:
        """Remove the note of a committed file. A sweep removes any other."""
        there = self._destination
        with suppress(StorageError):
            if self._is_noted and self._is_in_marker():
                # A lost answer may have made obstore begin a second upload.
                _abort_uploads(there.store, there.below(self._attempt).key)
                there.remove_note([self._attempt])

    @property
    def identity(self) -> tuple[int, int]:
        """The two halves of the attempt."""
        return divmod(int(self._attempt, 16), 1 << 64)

    def write(self, writable: Writable) -> Manifest:
        """Upload the file, in parts; return its header.

        If this raises, or is interrupted, the store forgets the parts.
        """
        header, there = writable.seal(), self._destination
        there.put_note([self._attempt], header.total_bytes)
        self._is_noted = True
        there.require_conditions([self._attempt])
        if not self._rank:
            there.parent.sweep()
        place = there.below(self._key)
        part = max(_PART_BYTES, -(-header.total_bytes // _MAX_PARTS))
        data: Any = _parts(header, writable, part)
        if header.total_bytes <= part:
            data = b"".join(data)  # one request
        with _naming(str(place)):
            obstore.put(
                there.store,
                place.key,
                data,
                chunk_size=part,
                max_concurrency=_PARTS_AT_ONCE,
            )
        return writable.seal()  # it raises if the bytes have changed since then

    def arrival(self, header: Manifest) -> str:
        """Return what the file is, and its attempt."""
        return f"{header.snapshot_id}/{self._attempt}"

    def commit(self, step: int, arrivals: Mapping[int, str]) -> list[Path]:
        """Put the marker, unless another saver has put one since this save began."""
        there, files = self._destination, dict[str, RankFile]()
        held = there.held()
        for rank, said in sorted(arrivals.items()):
            snapshot, _, attempt = said.partition("/")
            name = rank_file(rank)
            key = f"{attempt}/{name}"
            if key not in held:
                detail = (
                    "this rank's file is not there; do all ranks save to one store?"
                )
                raise StorageError(str(there.below(key)), detail)
            files[name] = RankFile(held[key], snapshot, key)
        serials = (each.serial for each in there.parent.checkpoints())
        text = encode_commit(step, files, 1 + max(serials, default=0))
        if self._before is not None and (old := _attempts(self._before.commit.files)):
            there.put_note(old)
        self._put_marker(text)
        return []

    def is_committed(self) -> bool:
        """Say whether a checkpoint with this rank's file is committed."""
        with suppress(StorageError):
            return self._is_in_marker()
        return False

    def discard(self) -> None:
        """Delete what this rank has uploaded, unless it may be committed."""
        with suppress(StorageError):
            if self._is_noted and not self._in_doubt and not self._is_in_marker():
                self._destination.remove([self._attempt])
                self._destination.remove_note([self._attempt])

    @property
    def _key(self) -> str:
        return f"{self._attempt}/{rank_file(self._rank)}"

    def _is_in_marker(self) -> bool:
        return self._destination.is_committed(self._rank, self.identity)

    def _check_free(self) -> None:
        """Refuse a destination that holds something else."""
        there = self._destination
        if not there.key:
            raise StorageError(str(there), "this is the bucket: name something in it")
        if there.is_object():
            raise StorageError(str(there), "it is a file; name a directory")
        if self._before is None and any(
            not ATTEMPT.fullmatch(key.partition("/")[0]) for key in there.held()
        ):
            detail = "it holds files, and no checkpoint; choose a new directory"
            raise StorageError(str(there), detail)

    def _put_marker(self, text: bytes) -> None:
        there, before = self._destination, self._before
        place = there.below(MARKER)
        mode: Any = "create" if before is None else {"e_tag": before.tag}
        self._in_doubt = True
        try:
            obstore.put(there.store, place.key, text, mode=mode)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            # The answer to an earlier try of the same request may have been lost.
            self._in_doubt = False
            if not self._is_in_marker():
                detail = (
                    "another process has saved to it, or removed it, since this save "
                    "began: nothing of this save is there; save again, or elsewhere"
                )
                raise StorageError(str(there), detail) from None
        except BaseError as error:
            if not self.is_committed():
                detail = f"it is not known whether it was committed: {_detail(error)}"
                failure = StorageError(str(there), detail)
                failure.may_be_committed = True
                raise failure from None


def _parts(header: Manifest, writable: Writable, size: int) -> Iterator[Any]:
    """Yield the header and the views of the data segment, part by part."""
    yield header.header
    for start in range(0, writable.segment_bytes, size):
        yield from writable.views(start, min(start + size, writable.segment_bytes))
