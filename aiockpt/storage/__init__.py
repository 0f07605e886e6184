"""Checkpoints on a file system: files, directories, commit, retention.

This room knows bytes, names and headers, and no tensors. Everything in it blocks. A
save comes in at `commit.Draft`, which builds a checkpoint beside its name, and at
`write.write_file`, which fills one file. `directory` says which checkpoints are
whole, and `retention` removes those that need not stay. `files` holds the system calls.
"""

from __future__ import annotations
