"""Checkpointers: save without stalling, load what is whole.

========== ==================================================================
config     every option, as frozen dataclasses
hooks      `WriterHook`, called in the writer around the commit
barriers   where ranks wait for each other: TCP store, process group
writer     `CheckpointWriter`: one rank's file, durable, then the commit
reader     `CheckpointReader`: whole, in place, or only some keys
sync       `SyncCheckpointer`: saves and loads without an event loop
base       `Checkpointer`, what all of them promise
stager     `CheckpointStager`, `DefaultStager`: the copy that training waits for
channel    messages between the trainer and the checkpoint process
process    `CheckpointProcess`: the trainer's end of the checkpoint process
worker     what runs in that process
keeper     hands the last staged snapshot to a restarted trainer
background `AsyncCheckpointer`: stages, and leaves the writing to the process
builder    `make_sync_checkpointer`, `make_async_checkpointer`
========== ==================================================================
"""
