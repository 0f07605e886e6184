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
messages   what trainer and checkpoint process say to each other
failures   exceptions as data, between the two
channel    the socket between the two
submission what was handed over to be written
handover   whatever was staged becomes memory that the process can map
process    `CheckpointProcess`: the trainer's end of the checkpoint process
supervisor keeps one such process running; `watched` is one of them
thread     `CheckpointThread`: the same promises kept by a thread
defaults   the init functions, if nobody says otherwise
worker     what runs in the process
control    the process's end of the socket, beside the writer
jobs       one write, in whatever thread or process it happens
keeper     keeps the last staged snapshot for a restarted trainer
rendezvous where the two meet
recovery   `recover`, what a restarted trainer calls
handle     one save as its caller sees it, and the account of all
loading    a load that can be cancelled
background `AsyncCheckpointer`: stages, and leaves the writing to the process
builder    `make_sync_checkpointer`, `make_async_checkpointer`
========== ==================================================================
"""
