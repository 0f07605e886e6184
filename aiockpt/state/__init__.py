"""State dict to manifest and tensors, and back; no I/O."""

from __future__ import annotations
