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

Everything here blocks. Only this module imports obstore.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from html import unescape
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, NoReturn
from urllib.parse import quote

import msgspec
from msgspec import Meta

from aiockpt.errors import (
    AiockptError,
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
    split_address,
    what_is_in,
)
from aiockpt.storage.retention import remove_each, superfluous
from aiockpt.storage.write import Writable

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, ObjectMeta
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
_HEAD_BYTES: Final = 64 << 10  # that are read when an object is opened
_PART_BYTES: Final = 8 << 20  # a slow line sends it before obstore gives up
_PARTS_AT_ONCE: Final = 4
_MAX_PARTS: Final = 9_000  # of the 10,000 that S3 allows
_MARKERS_AT_ONCE: Final = 16
_MARKER_LIMIT: Final = 64 << 20
_SHOWN_CHARACTERS: Final = 200
_SIGNED_FOR: Final = timedelta(minutes=5)
_UPLOAD: Final = re.compile(r"<Key>([^<]+)</Key>\s*<UploadId>([^<]+)</UploadId>")
# obstore's own ten tries take a few seconds.
_RETRIES: Final[Any] = {"max_retries": 1000, "retry_timeout": timedelta(minutes=3)}
_REFUSED: Final = AlreadyExistsError, PreconditionError, FileNotFoundError
_NOTE: Final = re.compile(rf"(?:.*/)?{re.escape(_NOTES)}/({ATTEMPT.pattern})\.json")
_PART: Final = rf"\A({ATTEMPT.pattern}|{RANK_FILE.pattern})\Z"

_RENEWED_AFTER_S: Final = 600.0
_EXPIRED_AFTER_S: Final = 2700.0
_ABANDONED_AFTER_S: Final = 3600.0
"""The age at which a note is written again, allows no commit, and is swept.

Between the last two, a commit ends that has begun in time.
"""


# -------------------------------------------------------------------- stores and errors

_users: list[int] = []  # the process that has begun to use obstore
_conditional: set[str] = set()  # the buckets that are known to have conditional puts
_serials: dict[str, int] = {}  # the last one of this process, by directory


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
    return None if is_in_memory else obstore.store.from_url(root, retry_config=_RETRIES)


@contextmanager
def _naming(address: str) -> Iterator[None]:
    """Raise ``StorageError`` where obstore raises an error.

    The text of the store's answer is left out: it may name a key of an account.
    """
    try:
        yield
    except AiockptError:
        raise
    except FileNotFoundError as error:
        raise StorageError(address, _missing(error)) from None
    except (BaseError, ValueError) as error:  # a path that no store can have
        raise StorageError(address, _detail(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # obstore has no other name for it
            raise
        detail = (
            "obstore does not work with this endpoint, or with the store's credentials"
        )
        raise StorageError(address, detail) from None


def _missing(error: Exception) -> str:
    lacks_bucket = "NoSuchBucket" in str(error)
    return "there is no such bucket" if lacks_bucket else "there is no such object"


def _detail(error: Exception) -> str:
    # The request comes first, then the cause, then perhaps the text of the answer. In
    # quotes, there may be a secret of the environment.
    cause = re.split(r"[\n<\"'`]", str(error))[0].rpartition(" - ")[2]
    code = re.search(r"<Code>(\w{1,40})</Code>", str(error))
    said = f" ({code[1]})" if code else ""
    is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if is_refused or re.search(r" 40[13] ", cause) or "Token)" in said:
        return (
            f"the store refuses access{said}: check the store's credentials that "
            "obstore finds, and what they may do in this bucket"
        )
    if "NoSuchBucket" in str(error):
        return _missing(error)
    return f"the store failed: {cause[:_SHOWN_CHARACTERS].strip(' :')}{said}"


# ----------------------------------------------------------------------------- reading


class StoredObject(OpenFile):
    """An object that is open for reading. The first request comes when it is read.

    Raises:
        StorageError: there is no such object, or it cannot be read.
    """

    block_bytes = 8 << 20  # of one request
    readers = 4  # so 32 MiB are in memory beside the state

    def __init__(self, store: ObjectStore, key: str, address: str) -> None:
        self.path = address
        self._store, self._key = store, key

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self._opened.meta["size"])

    def read(self, views: Sequence[memoryview], at: int) -> None:
        """Fill views one after another from an offset, all of them."""
        stop, head = at + sum(view.nbytes for view in views), self._opened.content
        if stop > self.size():
            raise StorageError(str(self.path), f"it ends at byte {self.size()}")
        is_here = stop <= len(head)
        found = memoryview(head[at:stop] if is_here else self._fetched(at, stop))
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
    def _opened(self) -> _Content:
        address = str(self.path)
        with _naming(address):
            try:
                options: GetOptions = {"range": (0, _HEAD_BYTES)}
                found = obstore.get(self._store, self._key, options=options)
                return _Content(address, found.meta, bytes(found.bytes()))
            except BaseError:  # an empty object has no first bytes
                return _Content(address, obstore.head(self._store, self._key), b"")

    def _fetched(self, start: int, stop: int) -> Bytes | bytes:
        if start == stop:  # obstore refuses it
            return b""
        tag = self._opened.meta["e_tag"]
        options: GetOptions = {"range": (start, stop), "if_match": tag}
        with _naming(str(self.path)):
            try:
                return obstore.get(self._store, self._key, options=options).bytes()
            except (PreconditionError, FileNotFoundError):
                detail = "it was replaced or removed while it was read; try again"
                raise StorageError(str(self.path), detail) from None


def _refuse(address: str) -> NoReturn:
    detail = "only a file system can do that: copy it to a disk first"
    raise StorageError(address, detail)


class _Content(NamedTuple):
    """The properties of an object, and its content, or the start of it."""

    address: str
    meta: ObjectMeta
    content: bytes

    @property
    def version(self) -> Any:
        """What a put names that replaces this version only."""
        # Google's store asks for its own number, the others for the entity tag.
        found = {"e_tag": self.meta["e_tag"], "version": self.meta["version"]}
        return {name: value for name, value in found.items() if value}

    def commit(self) -> Commit:
        """Return the content of a marker; see `decode_commit`."""
        return decode_commit(self.address, self.content)


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a note: what is to be deleted.

    Attributes:
        name: The checkpoint's name.
        attempts: The attempts, unless the checkpoint's marker names them. Files that
            were copied from a disk are without attempts, and named themselves.
    """

    name: Annotated[str, Meta(pattern=r"\A[^/]+\Z")]
    attempts: list[Annotated[str, Meta(pattern=_PART)]]


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
        if self.head():
            return "file"
        return "directory" if any(self.held()) else None

    def head(self) -> ObjectMeta | None:
        """Return the properties of the object with this key; None if there is none."""
        with _naming(str(self)), suppress(FileNotFoundError):
            return obstore.head(self.store, self.key) if self.key else None
        return None

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the keys of all objects below the address, and their sizes."""
        base = len(self.key) + 1 if self.key else 0
        with _naming(str(self)):
            for some in obstore.list(self.store, self.key or None, chunk_size=1000):
                for each in some:
                    if key := each["path"][base:]:  # consoles put directories there
                        yield key, each["size"]

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

    def marker(self) -> _Content | None:
        """Return the marker; None if there is none."""
        return self.below(MARKER).content()

    def content(self) -> _Content | None:
        """Return a small object; None if there is none."""
        with _naming(str(self)):
            try:
                found = obstore.get(self.store, self.key)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            # A larger one is not ours, and does not decode.
            is_small = found.meta["size"] <= _MARKER_LIMIT
            content = bytes(found.bytes()) if is_small else b""
            return _Content(str(self), found.meta, content)

    def described(self, found: _Content) -> Checkpoint:
        """Return the checkpoint of its marker.

        Raises:
            CheckpointNotFoundError: it is being removed.
            StorageError: the marker is damaged, or has a later version.
        """
        commit = found.commit()
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
        file = found and found.commit().files.get(rank_file(rank))
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
        if found is None or (commit := found.commit()).files != checkpoint.files:
            return False
        there.put_note(note, attempts)
        empty = msgspec.json.encode(msgspec.structs.replace(commit, files={}))
        with _naming(str(there)), suppress(*_REFUSED):
            obstore.put(self.store, place.key, empty, mode=found.version)
            obstore.delete(self.store, place.key)
            there.remove(attempts)
            there.remove_note(note)
            return True
        return False

    def put_note(self, note: str, attempts: Sequence[str]) -> None:
        """Note that attempts are to be deleted, unless the marker names them."""
        place, content = self._note(note), Note(self.name, [*attempts])
        with _naming(str(place)):
            obstore.put(self.store, place.key, msgspec.json.encode(content))

    def require_conditions(self, note: str) -> None:
        """Refuse a store that puts an object although it is there already.

        Args:
            note: A note that is there.
        """
        place = self._note(note)
        if self.root in _conditional:
            return
        with _naming(str(place)):
            try:
                obstore.put(self.store, place.key, b"", mode="create")
            except _REFUSED:
                _conditional.add(self.root)
                return
            except (BaseError, NotImplementedError) as error:
                known = isinstance(error, NotSupportedError | NotImplementedError)
                if not known and " 501 " not in str(error):
                    raise
        detail = (
            "this store has no conditional puts, so that two savers could overwrite "
            "each other: save to a disk, or to another store"
        )
        raise StorageError(self.root, detail)

    def remove_note(self, note: str) -> None:
        """Remove a note."""
        place = self._note(note)
        with _naming(str(place)), suppress(FileNotFoundError):
            obstore.delete(self.store, place.key)

    def remove(self, attempts: Sequence[str]) -> None:
        """Delete the ranks' files of attempts, and abort their uploads."""
        self.abort_uploads(attempts)
        keys = [
            self.below(key).key
            for key, _ in self.held()
            if key.partition("/")[0] in attempts
            and RANK_FILE.fullmatch(key.rpartition("/")[2])
        ]
        with _naming(str(self)):
            obstore.delete(self.store, keys)

    def noted(self) -> dict[str, float]:
        """Return when the notes of a directory were written, by the store's clock."""
        place = self.below(_NOTES)
        with _naming(str(place)):
            found = obstore.list(self.store, place.key).collect()
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
            if (content := place.content()) is None:
                return
            note = msgspec.json.decode(content.content, type=Note)
            child = self.below(note.name)
            marker = child.marker()
            files = marker.commit().files if marker else {}
            with _naming(str(place)):
                if marker and not files:  # its removal was interrupted
                    obstore.delete(self.store, child.below(MARKER).key)
                kept = _attempts(files)
                child.remove([each for each in note.attempts if each not in kept])
                obstore.delete(self.store, place.key)

    def _note(self, note: str) -> ObjectStorage:
        return self.parent.below(f"{_NOTES}/{note}.json")

    def abort_uploads(self, attempts: Sequence[str]) -> None:
        """Abort the uploads of attempts that are still open in S3.

        obstore has no call for that, but it signs the requests: the endpoint of another
        store has the query of the request in it. Errors are logged, and ignored: a rule
        of the bucket may abort such uploads, too.
        """
        if not isinstance(self.store, obstore.store.S3Store):
            return
        store, base = self.store, f"{self.key}/"

        def ask(method: Literal["GET", "DELETE"], path: str, query: str) -> bytes:
            config: Any = {**store.config, "virtual_hosted_style_request": "true"}
            config.pop("endpoint_url_s3", None)  # obstore does not know it here
            for each in ("endpoint", "aws_endpoint_url_s3"):
                config[each] = f"{bucket}{path}?{query}&x-id="
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
            found = ask("GET", "", f"uploads=&prefix={quote(base, safe='')}")
            for key, upload in _UPLOAD.findall(found.decode()):
                if unescape(key).removeprefix(base).partition("/")[0] in attempts:
                    query = f"uploadId={quote(unescape(upload), safe='')}"
                    ask("DELETE", f"/{quote(unescape(key))}", query)
        except (BaseError, HTTPException, OSError, ValueError) as error:
            kind = type(error).__name__  # its text may have a signature
            logger.info("open uploads below %s are not aborted: %s", self, kind)


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
        self._before: _Content | None = None
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
                there.abort_uploads([self._attempt])
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
        there.require_conditions(self._attempt)
        place = there.below(f"{self._attempt}/{rank_file(self._rank)}")
        part = max(_PART_BYTES, -(-header.total_bytes // _MAX_PARTS))
        data: Any = self._parts(header, writable, part)
        self._is_in_parts = header.total_bytes > part
        if not self._is_in_parts:
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
        return [] if self._before is None else _attempts(self._before.commit().files)

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
        directory = str(self._destination.parent)
        before = 0 if self._before is None else self._before.commit().serial
        before = max(before, _serials.get(directory, 0))
        serial = int(1000 * min(max(time.time(), now), now + 0.999))
        _serials[directory] = min(max(serial, before + 1), MAX_SERIAL)
        return _serials[directory]

    def _put_marker(self, text: bytes) -> None:
        there, before = self._destination, self._before
        place = there.below(MARKER)
        mode: Any = "create" if before is None else before.version
        self._is_offered = True
        try:
            obstore.put(there.store, place.key, text, mode=mode)
            self._is_committed = True
            return
        except (BaseError, FileNotFoundError) as error:
            failure = error
        detail = f"it is not known whether it was committed: {_detail(failure)}"
        with suppress(StorageError):
            # The answer to an earlier try of the same request may have been lost.
            if self._is_in_marker():
                return
            if isinstance(failure, _REFUSED):
                self._is_offered = False
                detail = (
                    "another process has saved to it, or removed it, since this save "
                    "began: nothing of this save is there; save again, or elsewhere"
                )
        told = StorageError(str(there), detail)
        told.may_be_committed = self._is_offered
        raise told from None

    def _parts(self, header: Manifest, writable: Writable, size: int) -> Iterator[Any]:
        """Yield the header and the views of the data segment, part by part."""
        yield header.header
        for start in range(0, writable.segment_bytes, size):
            if time.monotonic() - self._noted_at > _RENEWED_AFTER_S:
                share_out(Upload._renew, [self])  # this thread is inside of obstore
            yield from writable.views(start, min(start + size, writable.segment_bytes))
