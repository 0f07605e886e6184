"""Checkpointers: save without stalling training, and load complete checkpoints.

This package turns state dicts into checkpoint directories and back. It may import every
lower layer; only the command line and the tests import it. `factories` makes a
checkpointer from one config. A save begins at `SyncCheckpointer.save` or
`AsyncCheckpointer.save`. Both end in `CheckpointWriter`, which writes one rank's file
and commits it with the other ranks. A load begins at `CheckpointReader.read`.

Public names load on first use.

================== ==========================================================
base               the interface of all checkpointers, their statistics
config             every option, as frozen dataclasses
factories          a checkpointer with everything it needs, from one config
sync               saves and loads in the foreground
async_checkpointer stages, and passes the copy on; also without an event loop
stager             the copy that training waits for
handle             one save until it is durable, and the background writers' interface
process            the trainer's end of the checkpoint process
spawning           pickles the init functions for that process
messages           the messages between trainer and process
worker             the loop that writes; the main function of that process
thread             runs the loop in a thread instead
recovery           the last snapshot, from a dead trainer to a restarted one
writer             one rank's file, durable; then the commit
barriers           where ranks wait for each other
reader             loads: whole, in place, or only some keys
fingerprint        sums that do not know the mesh, of a state or a checkpoint
sources, peer      opens a path: a directory, a file, or the URL of a peer
================== ==========================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.checkpointers.async_checkpointer import (
        AsyncCheckpointer,
        BackgroundCheckpointer,
    )
    from aiockpt.checkpointers.barriers import (
        TCPStoreBarrier,
        create_barrier_from_config,
    )
    from aiockpt.checkpointers.base import (
        Checkpointer,
        CheckpointerStatistics,
        LoadStatistics,
        Written,
    )
    from aiockpt.checkpointers.config import (
        BarrierConfig,
        CheckpointerConfig,
        CheckpointProcessConfig,
        CheckpointStagerConfig,
        CheckpointWriterConfig,
        RankInfo,
    )
    from aiockpt.checkpointers.factories import (
        load,
        make_async_checkpointer,
        make_background_checkpointer,
        make_sync_checkpointer,
    )
    from aiockpt.checkpointers.handle import BackgroundWriter, SaveHandle
    from aiockpt.checkpointers.process import CheckpointProcess
    from aiockpt.checkpointers.reader import CheckpointReader
    from aiockpt.checkpointers.recovery import Recovered, recover
    from aiockpt.checkpointers.stager import (
        CheckpointStager,
        DefaultStager,
        StagedState,
    )
    from aiockpt.checkpointers.sync import SyncCheckpointer
    from aiockpt.checkpointers.writer import CheckpointWriter, WriterHook
    from aiockpt.storage.directory import Checkpoint, RankFile
    from aiockpt.storage.interface import latest, list_checkpoints
    from aiockpt.storage.write import Writable, WritableSnapshot

__all__ = [
    "AsyncCheckpointer",
    "BackgroundCheckpointer",
    "BackgroundWriter",
    "BarrierConfig",
    "Checkpoint",
    "CheckpointProcess",
    "CheckpointProcessConfig",
    "CheckpointReader",
    "CheckpointStager",
    "CheckpointStagerConfig",
    "CheckpointWriter",
    "CheckpointWriterConfig",
    "Checkpointer",
    "CheckpointerConfig",
    "CheckpointerStatistics",
    "DefaultStager",
    "LoadStatistics",
    "RankFile",
    "RankInfo",
    "Recovered",
    "SaveHandle",
    "StagedState",
    "SyncCheckpointer",
    "TCPStoreBarrier",
    "Writable",
    "WritableSnapshot",
    "WriterHook",
    "Written",
    "create_barrier_from_config",
    "latest",
    "list_checkpoints",
    "load",
    "make_async_checkpointer",
    "make_background_checkpointer",
    "make_sync_checkpointer",
    "recover",
]

_HOMES = {
    "AsyncCheckpointer": "aiockpt.checkpointers.async_checkpointer",
    "BackgroundCheckpointer": "aiockpt.checkpointers.async_checkpointer",
    "BackgroundWriter": "aiockpt.checkpointers.handle",
    "BarrierConfig": "aiockpt.checkpointers.config",
    "Checkpoint": "aiockpt.storage.directory",
    "CheckpointProcess": "aiockpt.checkpointers.process",
    "CheckpointProcessConfig": "aiockpt.checkpointers.config",
    "CheckpointReader": "aiockpt.checkpointers.reader",
    "CheckpointStager": "aiockpt.checkpointers.stager",
    "CheckpointStagerConfig": "aiockpt.checkpointers.config",
    "CheckpointWriter": "aiockpt.checkpointers.writer",
    "CheckpointWriterConfig": "aiockpt.checkpointers.config",
    "Checkpointer": "aiockpt.checkpointers.base",
    "CheckpointerConfig": "aiockpt.checkpointers.config",
    "CheckpointerStatistics": "aiockpt.checkpointers.base",
    "DefaultStager": "aiockpt.checkpointers.stager",
    "LoadStatistics": "aiockpt.checkpointers.base",
    "RankFile": "aiockpt.storage.directory",
    "RankInfo": "aiockpt.checkpointers.config",
    "Recovered": "aiockpt.checkpointers.recovery",
    "SaveHandle": "aiockpt.checkpointers.handle",
    "WritableSnapshot": "aiockpt.storage.write",
    "Writable": "aiockpt.storage.write",
    "StagedState": "aiockpt.checkpointers.stager",
    "SyncCheckpointer": "aiockpt.checkpointers.sync",
    "TCPStoreBarrier": "aiockpt.checkpointers.barriers",
    "WriterHook": "aiockpt.checkpointers.writer",
    "Written": "aiockpt.checkpointers.base",
    "create_barrier_from_config": "aiockpt.checkpointers.barriers",
    "latest": "aiockpt.storage.interface",
    "list_checkpoints": "aiockpt.storage.interface",
    "load": "aiockpt.checkpointers.factories",
    "make_async_checkpointer": "aiockpt.checkpointers.factories",
    "make_background_checkpointer": "aiockpt.checkpointers.factories",
    "make_sync_checkpointer": "aiockpt.checkpointers.factories",
    "recover": "aiockpt.checkpointers.recovery",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
