"""Writes a file from a live state dict, without a copy of the state dict.

The caller blocks until everything is written, and nobody may mutate the state dict
meanwhile. Host memory is digested and written where it is. Bytes of a device, and
tensors that are copied element by element, are staged a block ahead of the writing. One
thread computes the digest of a block while the block is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from aiockpt.errors import AiockptError, StagingError
from aiockpt.format.chunks import BLOCK, ChunkGrid, ChunkHasher
from aiockpt.format.limits import FILE_LIMITS, OF_A_SAVE, advising
from aiockpt.format.manifest import Manifest
from aiockpt.memory.arena import Arena, ArenaPool
from aiockpt.memory.copies import CopyPlan
from aiockpt.memory.device import Event, PortFor, port_for
from aiockpt.runtime.bridge import SerialThread
from aiockpt.runtime.system import is_programs
from aiockpt.state.flatten import describe
from aiockpt.transfer.remarks import Remarks
from aiockpt.transfer.stager import manifest_of

_BYTES_AHEAD: Final = 64 << 20  # that devices copy ahead of the writing
_COPY_BYTES: Final = 16 << 20  # of one device copy, enough for full speed


class LiveState:
    """A state dict that `storage` can write. Blocks; nobody may mutate it meanwhile.

    Args:
        state_dict: The state dict to save.
        step: The step of the checkpoint.
        chunk_bytes: The size of a chunk.
        allow_pickle: Whether leaves without another encoding travel as pickles.
        pool: The pool of the arena for the bytes of devices.
        remarks: Warns of what loads will refuse; None: nothing does.
        ports: Returns the port of a device; tests pass a fake one.

    Raises:
        UnsupportedLeafError: a leaf cannot be saved.
        StagingError: a copy failed.
    """

    def __init__(
        self,
        state_dict: object,
        *,
        step: int,
        chunk_bytes: int,
        allow_pickle: bool,
        pool: ArenaPool,
        remarks: Remarks | None = None,
        ports: PortFor = port_for,
    ) -> None:
        with advising(OF_A_SAVE):
            found = describe(state_dict, limits=FILE_LIMITS, allow_pickle=allow_pickle)
        self._description, self._step = found, step
        self._grid = ChunkGrid(found.entries.nbytes, chunk_bytes)
        self._hasher = ChunkHasher(self._grid)
        self._digests = [self._grid.unsealed] * len(self._grid)
        self._digesting = SerialThread("aiockpt-digest")
        manifest = self._manifest()
        if remarks is not None:
            remarks.on(manifest, found.strangers, step=step)
        self.header_bytes = manifest.header_bytes
        away = any(map(ports, found.backings.devices()))
        self._pool = pool if away else None
        # If all is in host memory, only tensors in parts use pages of the arena.
        nbytes = self.segment_bytes
        self._arena = arena = pool.take(nbytes) if away else Arena(nbytes)
        self._plan = CopyPlan(
            found.backings, found.entries, arena=arena, port_for=ports
        )
        self._memory = self._arena if away else self._plan.in_place()
        self._under_way: deque[tuple[int, Sequence[Event]]] = deque()
        self._enqueued = self._digested = 0
        with self._copying():
            self._plan.pin()
            self._fences = self._plan.fences()
            for event in self._plan.stage_parts(self._fences):
                event.synchronize()

    @property
    def segment_bytes(self) -> int:
        """The length of the data segment."""
        return self._grid.segment_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._digesting.close()
        self._plan.drain()
        if self._pool is not None:
            self._pool.give_back(self._arena)
        else:
            self._arena.close()

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the staged bytes ``[start, stop)``; a thread begins to digest them."""
        if self._pool is not None:
            with self._copying():
                self._stage(start, stop)
        self._digested = max(self._digested, stop)
        self._digesting.call(self._digest, start, stop)
        return self._memory.buffers(start, stop)

    def seal(self) -> Manifest:
        """Return the manifest; bytes that `views` has not returned are digested now.

        Raises:
            StagingError: `views` has returned other bytes the second time.
        """
        for start in range(self._digested, self.segment_bytes, BLOCK):
            self.views(start, min(start + BLOCK, self.segment_bytes))
        self._digesting.wait()
        return self._manifest()

    def _manifest(self) -> Manifest:
        return manifest_of(self._description, self._step, self._grid, self._digests)

    def _digest(self, start: int, stop: int) -> None:
        for each in self._hasher.update(start, *self._memory.buffers(start, stop)):
            if self._digests[each.chunk] not in (self._grid.unsealed, each.digest):
                raise StagingError("the state dict was changed while it was saved")
            self._digests[each.chunk] = each.digest

    def _stage(self, start: int, stop: int) -> None:
        """Copy ``[start, stop)``, with the devices' copies enqueued ahead."""
        while self._enqueued < min(stop + _BYTES_AHEAD, self.segment_bytes):
            first = self._enqueued
            self._enqueued = min(first + _COPY_BYTES, self.segment_bytes)
            events = self._plan.stage_device(first, self._enqueued, self._fences)
            self._under_way.append((first, events))
        self._plan.stage_host(start, stop)
        while self._under_way and self._under_way[0][0] < stop:
            for event in self._under_way.popleft()[1]:
                event.synchronize()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            yield
        except AiockptError:
            raise
        except Exception as error:
            if is_programs(error):
                raise
            detail = f"staging step {self._step} failed: {error}"
            raise StagingError(detail) from error
