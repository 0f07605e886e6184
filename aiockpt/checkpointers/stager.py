"""The copy that training waits for: a state dict becomes a snapshot in an arena.

The stager only copies. The writer computes digests, encodes and writes files. Arenas
are reused, so only the first saves pay for new memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from aiockpt.checkpointers.config import CLOSING_S, CheckpointStagerConfig
from aiockpt.errors import LocalProtocolError
from aiockpt.format.limits import FILE_LIMITS, OF_A_SAVE, advising
from aiockpt.format.paths import NAMED_TUPLE, PYTREE
from aiockpt.memory.device import Marks, PortFor, completed, port_for
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.runtime.system import copying_threads, failing_here
from aiockpt.state.nodes import Decoders, decoders_for
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.storage.checkpoint_file import blaming_file
from aiockpt.transfer.stager import Stager, StagerOptions
from aiockpt.transport import exact_step

_ARENAS: Final = 2  # one is written while the next save is staged into the other
_LIMITS: Final = replace(FILE_LIMITS, max_header_bytes=1 << 40)


class StagedState:
    """A staged state dict and its memory.

    It is released at the end of its ``with`` block. If you pass it to a checkpointer,
    the checkpointer releases it after the write.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        allow_pickle: bool = False,
        nodes: Decoders | None = None,
    ) -> None:
        self.snapshot = snapshot
        self._allow_pickle, self._nodes = allow_pickle, nodes
        self._released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.snapshot.manifest.segment_bytes

    def state_dict(self) -> Any:
        """Return the state dict with tensors over the arena.

        Shared storage and container types are as in the original. The tensors are
        valid until :meth:`release`, which lets another save use the memory.

        Raises:
            UnsupportedLeafError: a leaf has a type that this process does not know any
                more; names its path.
        """
        manifest = self.snapshot.manifest
        found = self.snapshot.buffers(0, manifest.segment_bytes)
        with blaming_file("the staged state"):
            tensors = tensors_over(manifest, found[0] if found else memoryview(b""))
            return assemble(
                Frame.of(manifest),
                tensors,
                limits=_LIMITS,
                allow_pickle=self._allow_pickle,
                nodes=self._nodes,
            )

    def release(self) -> None:
        """Give the memory back for the next save. Idempotent."""
        if not self._released:
            self._released = True
            self.snapshot.release()


class CheckpointStager(ABC):
    """Copies a state dict so that training can continue. You may subclass it.

    ``stage`` may return a :class:`StagedState`, or a state dict with new tensors. A
    checkpointer calls a stager of your own after the device work that the caller of
    ``save`` had enqueued. It also waits for what the stager has enqueued.

    Attributes:
        ports: Returns the port of a device; tests pass a fake one.
    """

    ports: PortFor = staticmethod(port_for)

    @abstractmethod
    async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """Return a copy. The caller may change ``state_dict`` afterwards.

        ``kwargs`` are those of ``save``.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all memory."""


class DefaultStager(CheckpointStager):
    """Stages into arenas, which are reused and shared with the checkpoint process.

    Args:
        config: The size of a chunk, and whether pickles may travel.
        shared: Whether another process will map the memory. Private memory can have
            huge pages.
        ports: Returns the port of a device; tests pass a fake one.
    """

    def __init__(
        self,
        config: CheckpointStagerConfig = CheckpointStagerConfig(),  # noqa: B008 - frozen
        *,
        shared: bool = True,
        ports: PortFor = port_for,
    ) -> None:
        self._config, self._shared = config, shared
        self.ports = ports
        self._lifetime = Lifetime("the stager")
        self._bridge = Bridge(threads=copying_threads(), name="aiockpt-stage")
        options = StagerOptions(
            threads=copying_threads(),
            chunk_bytes=config.chunk_bytes,
            limits=_LIMITS,
            readers=FILE_LIMITS,
            allow_pickle=config.allow_pickle,
            shared=shared,
            kept=_ARENAS,
            seal=False,  # whoever writes computes the digests
        )
        self._stager = Stager(self._bridge, options, ports=ports)

    async def stage(
        self, state_dict: Any, *, step: int = 0, **kwargs: Any
    ) -> StagedState:
        """Copy a state dict. The caller may change it afterwards.

        The copy waits for the device work that the current streams have when this call
        begins to run. If cancelled, this waits until at most 64 MiB are copied, and
        keeps nothing.

        Raises:
            UnsupportedLeafError: a leaf has a type that cannot be saved; nothing was
                copied.
            StagingError: a copy failed, or the host lacks memory.
        """
        del kwargs  # for other stagers
        return await self._stage(state_dict, step, Marks.of(self.ports))

    async def snapshot(self, staged: Any, *, step: int) -> Snapshot:
        """Return a snapshot for a background writer; the caller releases it.

        Args:
            staged: What a stager has returned; anything but a snapshot is copied.
            step: The step of such a copy.

        Raises:
            LocalProtocolError: another process cannot map what was staged.
            StagingError, UnsupportedLeafError: see :meth:`stage`.
        """
        found = staged.snapshot if isinstance(staged, StagedState) else staged
        if not isinstance(found, Snapshot):
            marks = Marks.of_caller(self.ports)
            return (await self._stage(found, step, marks)).snapshot
        if self._shared and (found.arena is None or found.arena.fd < 0):
            raise LocalProtocolError(
                "another process cannot map what was staged: stage it with "
                "DefaultStager(), without shared=False"
            )
        found.acquire()
        return found

    async def _stage(self, state_dict: Any, step: int, marks: Marks) -> StagedState:
        with self._lifetime.call(), advising(OF_A_SAVE):
            snapshot = await self._stager.stage(
                state_dict, step=exact_step(step), marks=marks
            )
            try:
                with failing_here(f"staging step {step}"):
                    nodes = await self._bridge.run(_nodes, snapshot, state_dict)
            except BaseException:
                snapshot.release()
                raise
        pickles = self._config.allow_pickle
        return StagedState(snapshot, allow_pickle=pickles, nodes=nodes)

    async def close(self) -> None:
        """Release all memory, including that of states that are still staged."""
        self._lifetime.bind()
        self._stager.close()
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=CLOSING_S),
            partial(self._bridge.aclose, timeout=CLOSING_S),
        )


async def stage_after(
    stager: CheckpointStager, marks: Marks, state_dict: Any, **kwargs: Any
) -> Any:
    """Return what ``stager.stage`` does; its copies wait for the caller's marks.

    A stager of the user's knows no marks, so the device work around it is awaited.
    """
    if isinstance(stager, DefaultStager) and type(stager).stage is DefaultStager.stage:
        return await stager._stage(state_dict, kwargs["step"], marks)  # noqa: SLF001 - its own module
    await completed(*marks.events.values())
    staged = await stager.stage(state_dict, **kwargs)
    await completed(*Marks.of(port_for).events.values())
    return staged


def _nodes(snapshot: Snapshot, state_dict: Any) -> Decoders:
    """Return the decoders of the types in the state dict, which is walked for them."""
    header = snapshot.manifest.header
    found = any(prefix.encode() in header for prefix in (NAMED_TUPLE, PYTREE))
    return decoders_for(state_dict) if found else {}
