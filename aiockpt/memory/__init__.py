"""Host memory and the accelerator: arenas, copies, snapshots."""

from __future__ import annotations
