"""The requests to the bucket of an object store, and what its errors mean.

Only this module imports obstore. obstore repeats a request for minutes if the store is
silent, and nothing ends it. So each request has a thread of its own. An interrupt, or a
cancellation of the caller, ends the wait for it within a second. The thread is left
behind then, and the bucket answers no more.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from html import unescape
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from aiockpt.errors import MissingExtraError, StorageError
from aiockpt.format.limits import raise_if_cancelled
from aiockpt.runtime.bridge import run_interruptibly

if TYPE_CHECKING:
    from obstore import GetOptions, ListResult, ObjectMeta, PutMode
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

T = TypeVar("T")

_PARTS_AT_ONCE: Final = 4
_SHOWN_CHARACTERS: Final = 200
_SIGNED_FOR: Final = timedelta(minutes=5)
_UPLOAD: Final = re.compile(r"<Key>([^<]+)</Key>\s*<UploadId>([^<]+)</UploadId>")
# obstore's own ten tries take a few seconds.
_RETRIES: Final[Any] = {"max_retries": 1000, "retry_timeout": timedelta(minutes=3)}
_REFUSED: Final = AlreadyExistsError, PreconditionError, FileNotFoundError

_users: list[int] = []  # the process that has begun to use obstore
_conditional: dict[int, ObjectStore] = {}  # that are known to have conditional puts


class StoredContent(NamedTuple):
    """The properties of an object, and its content, or a part of it."""

    meta: ObjectMeta
    data: memoryview

    @property
    def version(self) -> Any:
        """What a put names that replaces this version only."""
        # Google's store asks for its own number, the others for the entity tag.
        found = {"e_tag": self.meta["e_tag"], "version": self.meta["version"]}
        return {name: value for name, value in found.items() if value}


class Bucket:
    """A bucket, for one call of the public interface.

    Every method blocks, and raises `StorageError` with the address if the request
    fails. The text of the store's answer is left out: it may name a key of an account.

    Args:
        root: The scheme and the bucket.
        stores: The registered stores, by scheme and bucket. None: it is unknown here.

    Raises:
        StorageError: there is no such store, or this process was forked.
    """

    def __init__(self, root: str, stores: Mapping[str, ObjectStore | None]) -> None:
        self.root = root
        self._left = threading.Event()  # a request is, and so the bucket is no use
        if (pid := os.getpid()) not in _users:
            if _users:
                detail = "obstore does not work in a forked process: start it by spawn"
                raise StorageError(root, detail)
            _users.append(pid)
        make = partial(_store_at, root)
        store = stores[root] if root in stores else self._asked("", make)
        if store is None:
            detail = (
                "this process has no such store: register it (aiockpt.register_store); "
                "if it cannot be pickled, save with "
                "CheckpointerConfig(use_process=False)"
            )
            raise StorageError(root, detail)
        self._store = store

    def address(self, key: str) -> str:
        """Return the address of a key."""
        return f"{self.root}/{key}" if key else self.root

    def head(self, key: str) -> Mapping[str, object] | None:
        """Return the properties of an object; None if there is none."""
        return self._found(key, partial(obstore.head, self._store, key))

    def get(
        self,
        key: str,
        span: tuple[int, int] | None = None,
        *,
        tag: str | None = None,
        limit: int | None = None,
    ) -> StoredContent | None:
        """Return an object; None if there is none.

        Args:
            key: Its key.
            span: Return these of its bytes only.
            tag: Return None if it has another entity tag.
            limit: Return no content if it is larger.
        """
        options: GetOptions = {}
        if span is not None:
            options["range"] = span
        if tag is not None:
            options["if_match"] = tag

        def get() -> StoredContent | None:
            try:
                found = obstore.get(self._store, key, options=options)
                is_small = limit is None or found.meta["size"] <= limit
                data = found.bytes() if is_small else b""
                return StoredContent(found.meta, memoryview(data))
            except PreconditionError:
                return None
            except BaseError:  # an empty object has no ranges
                meta = obstore.head(self._store, key)
                if meta["size"] or span is None:
                    raise
                return StoredContent(meta, memoryview(b""))

        return self._found(key, get)

    def listed(self, key: str) -> ListResult[Sequence[ObjectMeta]]:
        """Return the objects, and the directories, in a directory."""
        return self._asked(
            key, partial(obstore.list_with_delimiter, self._store, key or None)
        )

    def below(self, key: str) -> Iterator[ObjectMeta]:
        """Yield all objects below a key."""
        begin = partial(obstore.list, self._store, key or None, chunk_size=1000)
        stream = self._asked(key, begin)
        while some := self._asked(key, partial(next, stream, None)):
            yield from some

    def put(self, key: str, data: bytes, mode: PutMode | None = None) -> bool:
        """Put an object in one request; return False if the store refuses ``mode``."""

        def put() -> bool:
            try:
                obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except _REFUSED as error:
                if mode is None or "NoSuchBucket" in str(error):
                    raise
                return False
            return True

        return self._asked(key, put)

    def put_parts(self, key: str, parts: Iterable[Any], part_bytes: int) -> None:
        """Put an object in parts, which are made in another thread.

        If this raises, the store forgets the parts, unless it does not answer.
        """

        def stopping() -> Iterator[Any]:
            for each in parts:
                raise_if_cancelled()
                yield each

        def put() -> None:
            try:
                obstore.put(
                    self._store,
                    key,
                    stopping(),
                    chunk_size=part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                detail = (
                    "the upload was aborted, by a rule of the bucket, or by another "
                    "save that took it for abandoned: save again"
                )
                raise StorageError(self.address(key), detail) from None

        self._asked(key, put)

    def require_conditions(self, key: str) -> None:
        """Refuse a store that puts an object although it is there already.

        Args:
            key: The key of an object that is there.
        """
        if id(self._store) in _conditional:
            return

        def has_conditions() -> bool:
            try:
                obstore.put(self._store, key, b"", mode="create")
            except _REFUSED:
                return True
            except (BaseError, NotImplementedError) as error:
                known = isinstance(error, NotSupportedError | NotImplementedError)
                if not known and " 501 " not in str(error):
                    raise
            return False

        if not self._asked(key, has_conditions):
            detail = (
                "this store has no conditional puts, so that two savers could "
                "overwrite each other: save to a disk, or to another store"
            )
            raise StorageError(self.root, detail)
        _conditional[id(self._store)] = self._store

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, if they are there."""
        if not keys:
            return
        which = keys[0] if len(keys) == 1 else keys  # in one request, either way
        self._found(keys[0], partial(obstore.delete, self._store, which))

    def abort_uploads(self, directory: str, names: Collection[str]) -> None:
        """Abort the uploads below some names of a directory that are open in S3.

        obstore has no call for that, but it signs the requests: the endpoint of another
        store has the query of the request in it. Errors are logged, and ignored: a rule
        of the bucket may abort such uploads, too.
        """
        if not isinstance(self._store, obstore.store.S3Store):
            return
        store, base = self._store, f"{directory}/"

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
                if unescape(key).removeprefix(base).partition("/")[0] in names:
                    query = f"uploadId={quote(unescape(upload), safe='')}"
                    ask("DELETE", f"/{quote(unescape(key))}", query)
        except (BaseError, HTTPException, OSError, ValueError) as error:
            kind = type(error).__name__  # its text may have a signature
            where = self.address(directory)
            logger.info("open uploads below %s are not aborted: %s", where, kind)

    def _found(self, key: str, request: Callable[[], T]) -> T | None:
        """Return the answer; None if there is no such object."""

        def ask() -> T | None:
            try:
                return request()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

        return self._asked(key, ask)

    def _asked(self, key: str, request: Callable[[], T]) -> T:
        """Return the answer to a request, or raise ``StorageError``."""
        if self._left.is_set():
            detail = "an earlier request was interrupted"
            raise StorageError(self.address(key), detail)
        try:
            return run_interruptibly("aiockpt-request", request, self._left)
        except (BaseError, FileNotFoundError, ValueError) as error:
            detail = _detail(error)  # a ValueError: no store has such a key
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # obstore has no other name
                raise
            detail = (
                "obstore does not work with this endpoint, or with the store's "
                "credentials: check both, and that no line break is at their ends"
            )
        raise StorageError(self.address(key), detail)


@lru_cache(maxsize=16)
def _store_at(root: str) -> ObjectStore | None:
    is_in_memory = root.startswith("memory:")  # so it would be another one each time
    return None if is_in_memory else obstore.store.from_url(root, retry_config=_RETRIES)


def _detail(error: Exception) -> str:
    """Say what an error of obstore means, and what helps."""
    text = str(error)
    # The request comes first, then the cause, then perhaps the text of the answer. In
    # quotes, there may be a secret of the environment.
    cause = re.split(r"[\n<\"'`]", text)[0].rpartition(" - ")[2]
    code = re.search(r"<Code>(\w{1,40})</Code>", text)
    said = f" ({code[1]})" if code else ""
    if "NoSuchBucket" in text:
        return "there is no such bucket"
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if is_refused or re.search(r" 40[13] ", cause) or "Token)" in said:
        return (
            f"the store refuses access{said}: check the store's credentials that "
            "obstore finds, and what they may do in this bucket"
        )
    shown = f"the store failed: {cause[:_SHOWN_CHARACTERS].strip(' :')}{said}"
    if "error sending request" in cause or "builder error" in cause:
        shown += (
            "; check the endpoint (for S3, AWS_ENDPOINT_URL; http:// needs "
            "AWS_ALLOW_HTTP=true), and that this host reaches it"
        )
    return shown
