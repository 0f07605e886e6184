"""Checkpoints on a file system: files, directories, commit, retention."""

from __future__ import annotations
