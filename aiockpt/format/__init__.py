"""The file format, without I/O: header, manifest, tree, chunk grid, limits."""

from __future__ import annotations
