"""A checkpoint file as a source: reads its ranges into memory and verifies them.

Threads read block by block and digest each block while it is in the cache. Everything
here blocks.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, get_args

from aiockpt.errors import StorageError
from aiockpt.format.chunks import ChunkHasher
from aiockpt.format.dtypes import CODE_BITS, CODES
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import ForeignHeader, Manifest
from aiockpt.format.paths import Node
from aiockpt.memory.arena import Arena
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.system import copying_threads, of_caller
from aiockpt.state.load_plan import Ranges
from aiockpt.state.segment import Segment
from aiockpt.storage.checkpoint_file import OpenFile
from aiockpt.storage.files import named
from aiockpt.storage.placement import Placement, Spare

Verify: TypeAlias = Literal["full", "none"]
"""Whether the digest of every chunk that is read is compared, or of none."""

OnBytes: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read. Its exceptions end the reading."""

_UNVERIFIED_BYTES: Final = (
    32 << 20
)  # a thread takes them at once if nothing is verified


def check_verify(verify: Verify) -> Verify:
    """Return ``verify`` if it is one of its values.

    Raises:
        ValueError: it is not.
    """
    if verify not in get_args(Verify):
        raise ValueError(f"verify is 'full' or 'none', not {verify!r}")
    return verify


class LoadSource(Protocol):
    """What a load reads from: a data segment, and how its bytes are read."""

    @property
    def segment(self) -> Segment:
        """Its data segment."""

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None = None
    ) -> None:
        """Read the ranges of ``placement``; see `FileSource.read`."""


def read_segment(
    source: LoadSource,
    ranges: Ranges,
    *,
    verify: Verify,
    on_bytes: OnBytes | None = None,
) -> None:
    """Read ranges into the memory of their segment; see `FileSource.read`.

    What is there already, as in a mapped file, is read only to be verified.
    """
    segment = source.segment
    if not segment.is_there:
        placement = Placement(segment, ranges)
    elif verify == "none" or not segment.manifest.digests:
        return
    else:
        placement = Placement(segment, ranges, in_arena=())
    source.read(placement, verify=verify, on_bytes=on_bytes)


class FileMapping(Arena):
    """The data segment of a file as private memory: writes do not reach the file.

    Pages are read when they are used. The file must not be truncated meanwhile.

    Raises:
        StorageError: the file cannot be mapped.
    """

    def __init__(self, file: OpenFile, manifest: Manifest) -> None:
        with named(file.path):
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._adopt(manifest.segment_bytes, -1, mapping)
        self._base = manifest.header_bytes
        self.address += self._base

    @property
    def buffer(self) -> memoryview:
        """The data segment."""
        return memoryview(self._map)[self._base :]

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of ``[start, stop)`` as one view."""
        return [self.buffer[start:stop]] if stop > start else []

    def check(self, start: int, stop: int) -> None:
        """Do nothing: a view keeps the mapping."""

    def populate(self, start: int, stop: int, *, every: bool = False) -> int:
        """Do nothing: a page that is made writable is a copy."""
        return sys.maxsize


class FileSource:
    """An open file that a load reads from.

    Args:
        file: The file, which must stay open while it is read.
        manifest: The result of `manifest_of_file`.
        mapped: Whether tensors lie over a mapping of the file, which outlives the
            descriptor. Otherwise they lie over a new arena.

    Attributes:
        bytes_needed: The bytes that somebody needed.
        bytes_read: The bytes that were read: whole chunks, to verify them.
        ranges_read: The ranges that were read.
    """

    bytes_needed = bytes_read = ranges_read = 0

    def __init__(self, file: OpenFile, manifest: Manifest, *, mapped: bool) -> None:
        self._file, self._manifest = file, manifest
        arena = FileMapping(file, manifest) if mapped else None
        self.segment = Segment(manifest, arena=arena, is_there=mapped)

    def read(
        self, placement: Placement, *, verify: Verify, on_bytes: OnBytes | None = None
    ) -> None:
        """Read the ranges of ``placement``; an exception of ``on_bytes`` ends it.

        A file of another tool has no digests. With ``verify="full"``, its size and its
        time of change must stay what they are.

        Raises:
            StorageError: the file cannot be read, ends too early, or was changed.
            IntegrityError: a chunk has another digest; its bytes may have been
                written.
        """
        block = self._file.block_bytes
        spans = [*_spans(self._manifest, placement.ranges, verify, block)]
        self.bytes_needed += placement.nbytes
        self.bytes_read += sum(each.stop - each.start for each in spans)
        self.ranges_read += len(placement.ranges)
        with named(self._file.path), ExitStack() as stack:
            if verify == "full" and not self._manifest.digests:
                stack.enter_context(self._file.unchanged())
            reading = _FileReading(
                self._file, self._manifest, placement, on_bytes, iter(spans)
            )
            readers = self._file.readers or copying_threads()
            helpers = min(readers, len(spans)) - 1
            with ExitStack() as threads:
                if helpers > 0:
                    bridge = Bridge(threads=helpers, name="aiockpt-read")
                    threads.callback(bridge.close)
                    for _ in range(helpers):
                        bridge.post(reading.work)
                reading.work()
            if reading.failures:
                try:
                    raise reading.failures[0]
                finally:
                    # Its traceback has this: a cycle would keep what was read into.
                    reading.failures.clear()


def manifest_of_file(file: OpenFile, *, limits: Limits) -> Manifest:
    """Return the manifest of an open safetensors file.

    The manifest of another tool's file has no digests.

    Raises:
        StorageError: the file cannot be read, or has a dtype that torch lacks.
        IntegrityError: the header of our file is damaged.
    """
    header = file.header(limits=limits)
    return header if isinstance(header, Manifest) else _adopted(file, header)


def _adopted(file: OpenFile, header: ForeignHeader) -> Manifest:
    shapes = header.entries.shapes
    for number, code in enumerate(header.entries.dtypes):
        packed = CODE_BITS[code] == 4
        if code not in CODES or (packed and (shapes[number] or (1,))[-1] % 2):
            detail = f"tensor {header.names[number]} has dtype {code} and the shape "
            detail += f"{[*shapes[number]]}, for which torch has no tensor"
            raise StorageError(str(file.path), detail)
        if packed:  # two elements in a byte, of which torch makes one
            *above, last = shapes[number]
            shapes[number] = (*above, last // 2)
    names: list[Node] = [*header.names]
    numbers: list[Node] = [*range(len(names))]
    return Manifest(
        step=0,
        snapshot_id="",
        chunk_bytes=max(header.segment_bytes, 1),
        algorithm="",
        digests=(),
        entries=header.entries,
        views=(),
        tree=["tensors", names, numbers] if names else ["dict", [], []],
        header=header.header,
        header_bytes=header.header_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes that a thread reads at once: whole chunks if they are verified."""

    start: int
    stop: int
    verified: bool = False


def _spans(
    manifest: Manifest, ranges: Ranges, verify: Verify, block: int
) -> Iterator[_Span]:
    """Yield the spans to read: whole chunks to verify, else the ranges only."""
    if verify == "none" or not manifest.digests:
        for start, stop in ranges:
            for at in range(start, stop, _UNVERIFIED_BYTES):
                yield _Span(at, min(at + _UNVERIFIED_BYTES, stop))
        return
    # Small chunks are read together, as one block.
    grid, last = manifest.grid, -1
    together = max(block // grid.chunk_bytes, 1)
    for start, stop in ranges:
        chunk = max(grid.index_of(start), last + 1)
        last = max(grid.index_of(stop - 1), last)
        while chunk <= last:
            end = min(chunk - chunk % together + together, last + 1)
            yield _Span(grid.range(chunk)[0], grid.range(end - 1)[1], verified=True)
            chunk = end


class _FileReading:
    """One call of `FileSource.read`, for all its threads.

    Attributes:
        failures: What the threads have raised. After the first one, they end.
    """

    def __init__(
        self,
        file: OpenFile,
        manifest: Manifest,
        placement: Placement,
        on_bytes: OnBytes | None,
        spans: Iterator[_Span],
    ) -> None:
        self._file, self._manifest, self._placement = file, manifest, placement
        self._on_bytes = None if on_bytes is None else of_caller(on_bytes)
        self._telling = threading.Lock()
        self._spans = spans
        self.failures: list[BaseException] = []

    def work(self) -> None:
        """Read spans until none is left; the same in each thread."""
        try:
            spare = self._placement.spare(self._file.block_bytes)
            try:
                for span in self._spans:
                    if self.failures:
                        return
                    self._read(span, spare)
            finally:
                spare.close()
        except BaseException as error:  # noqa: BLE001 - `FileSource.read` raises it
            self.failures.append(error)

    def _read(self, span: _Span, spare: Spare) -> None:
        manifest = self._manifest
        # Without digests there is no algorithm either.
        hasher = ChunkHasher(manifest.grid, manifest.digests) if span.verified else None
        base = manifest.header_bytes
        block = self._file.block_bytes
        for start in range(span.start, span.stop, block):
            stop = min(start + block, span.stop)
            self._placement.prepare(start, stop)  # while the cache has its pages
            views = self._placement.views(start, stop, spare)
            self._file.read(views, base + start)
            hashed = () if hasher is None else hasher.update(start, *views)
            spare.landed(self._placement, start, stop)
            self._tell(stop - start)
            for chunk in hashed:
                if not chunk.matches:
                    raise chunk.error(str(self._file.path))

    def _tell(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            with self._telling:
                self._on_bytes(nbytes)
