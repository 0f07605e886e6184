"""Checkpoints on a file system: files, directories, commit, retention.

This package knows bytes, names and headers, and mostly no tensors. Everything in it
blocks. A save uses `commit.Draft`, which builds a checkpoint directory beside its final
name, and `write.write_file`, which fills one file. `directory` finds the committed
checkpoints, and `retention` removes those that are no longer needed. `files` holds the
system calls.
"""

from __future__ import annotations
