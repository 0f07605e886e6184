"""Host memory and the accelerator: arenas, copies, snapshots.

This room moves bytes and knows no state dict, only where the tensors of one are. It may
use `format` and `runtime`; only `device` names an accelerator. An `arena` is memory
that is used again and may be shared with another process. A `CopyPlan` in `copies`
copies between a state dict's own memory and the data segment, in both directions. What
was staged is a `Snapshot`, which never changes and counts its readers.
"""

from __future__ import annotations
