"""The copy that training waits for: a state dict becomes a snapshot in an arena.

The stager computes no digests, encodes nothing and touches no file: the writer does
that. The arenas are kept and reused, so only the first saves pay for new memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from aiockpt.checkpointers.config import CheckpointStagerConfig
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.memory.device import PortFor, port_for
from aiockpt.memory.snapshot import Snapshot
from aiockpt.runtime.bridge import Bridge, Inline
from aiockpt.runtime.lifetime import Lifetime
from aiockpt.state.nodes import Decoders, decoders_for
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.transfer.stager import Stager, StagerOptions
from aiockpt.transport import exact_step

__all__ = ["CheckpointStager", "DefaultStager", "StagedState", "stager_of"]

_ARENAS: Final = 2  # one is written while the next save is staged
_CLOSING: Final = 5.0
_LIMITS: Final = replace(FILE_LIMITS, max_header_bytes=1 << 40)


class StagedState:
    """A staged state dict, with the memory that it lies in.

    Leaving its ``with`` block releases it. The checkpointer that it is given to
    releases it, too, when it is written.
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

    def __repr__(self) -> str:
        return f"<StagedState {self.snapshot!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.snapshot.manifest.segment_bytes

    def state_dict(self) -> Any:
        """Return the state dict: tensors over the arena, ties and containers kept.

        The tensors are valid until :meth:`release`: then another save may use the
        memory.
        """
        manifest = self.snapshot.manifest
        found = self.snapshot.buffers(0, manifest.segment_bytes)
        tensors = tensors_over(manifest, found[0] if found else memoryview(b""))
        return assemble(
            Frame.of(manifest),
            tensors,
            limits=_LIMITS,
            allow_pickle=self._allow_pickle,
            nodes=self._nodes,
        )

    def release(self) -> None:
        """Let the next save have the memory. Idempotent."""
        if not self._released:
            self._released = True
            self.snapshot.release()


class CheckpointStager(ABC):
    """Copies a state dict, so that training may go on. You may derive your own.

    ``stage`` may return a :class:`StagedState`, or a state dict in memory of its own.
    """

    @abstractmethod
    async def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """Return the copy; ``state_dict`` may be mutated from then on.

        ``kwargs`` are those of ``save``.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all memory."""


class DefaultStager(CheckpointStager):
    """Stages into arenas that are shared with the checkpoint process, and reused.

    Args:
        config: What kind of memory to use, and how to copy.
        ports: Finds the port of a device; tests give a fake one.
    """

    def __init__(
        self,
        config: CheckpointStagerConfig = CheckpointStagerConfig(),  # noqa: B008 - frozen
        *,
        ports: PortFor = port_for,
    ) -> None:
        self._config = config
        self._lifetime = Lifetime("the stager")
        self._bridge: Bridge | None = None
        if config.use_async_staging:
            self._bridge = Bridge(threads=config.threads, name="aiockpt-stage")
        self._stager = stager_of(
            self._bridge or Inline(),
            config,
            shared=config.use_shared_memory,
            kept=_ARENAS,
            ports=ports,
        )

    def __repr__(self) -> str:
        return f"<DefaultStager {self._config}>"

    async def stage(
        self, state_dict: Any, *, step: int = 0, **kwargs: Any
    ) -> StagedState:
        """Copy a state dict; it may be mutated when this returns.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; nothing was copied.
            StagingError: a copy failed.

        If cancelled, waits for the copy of at most 64 MiB and keeps nothing.
        """
        del kwargs  # for other stagers
        with self._lifetime.call():
            snapshot = await self._stager.stage(state_dict, step=exact_step(step))
        return StagedState(
            snapshot,
            allow_pickle=self._config.allow_pickle,
            nodes=decoders_for(state_dict),
        )

    async def close(self) -> None:
        """Release all memory, also that of a state which is still staged."""
        self._lifetime.bind()
        self._stager.close()
        steps = [partial(self._lifetime.calls_ended, timeout=_CLOSING)]
        if self._bridge is not None:
            steps.append(partial(self._bridge.aclose, timeout=_CLOSING))
        await self._lifetime.end(*steps)


def stager_of(
    bridge: Bridge | Inline,
    config: CheckpointStagerConfig,
    *,
    shared: bool,
    kept: int,
    ports: PortFor = port_for,
) -> Stager:
    """Return a stager that copies, and computes no digests."""
    return Stager(
        bridge,
        StagerOptions(
            threads=config.threads,
            chunk_bytes=config.chunk_bytes,
            limits=_LIMITS,
            allow_pickle=config.allow_pickle,
            shared=shared,
            kept=kept,
            seal=False,
            pin=config.use_pinned_memory,
            poll=config.use_non_blocking_copy,
        ),
        ports=ports,
    )
