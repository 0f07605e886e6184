"""Host memory and the accelerator: arenas, copies, snapshots.

This package moves bytes. It knows where the tensors of a state dict are, but not the
state dict itself. It may use `format` and `runtime`. Only `device` names an
accelerator.
An `arena` is reusable memory that may be shared with another process. A `CopyPlan` in
`copies` copies between a state dict's own memory and the data segment, in both
directions. A `Snapshot` is a staged checkpoint, which never changes and counts its
readers.
"""

from __future__ import annotations
