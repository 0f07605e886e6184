"""Checkpointers: save without stalling training, load what is whole.

This room turns state dicts into checkpoint directories and back. It may use every
lower room; only the command line, the bench and the tests use it. `factories` puts a
checkpointer together from one config. A save begins at `SyncCheckpointer.save` or
`AsyncCheckpointer.save`. Both end in `CheckpointWriter`, which writes one rank's file
and commits it with the other ranks. A load begins at `CheckpointReader.read`.

================== ==========================================================
base               the interface of all checkpointers, their statistics
config             every option, as frozen dataclasses
factories          a checkpointer with everything it needs, from one config
sync               saves and loads in the foreground
async_checkpointer stages, and leaves the writing to a background writer
background         the same, for programs without an event loop
stager             the copy that training waits for
submission         what is handed over, and the interface of who writes it
process            the trainer's end of the checkpoint process
launch             starts that process, and ends it
messages           what the two say to each other
worker             what runs in that process
thread             writes in a thread instead
recovery           the last snapshot, from a dead trainer to a restarted one
writer             one rank's file, durable; then the commit
barriers           where ranks wait for each other
reader             loads: whole, in place, or only some keys
loading            a load that can be cancelled
sources, peer      what a path may name: a directory, a file, a peer
================== ==========================================================
"""

from __future__ import annotations
