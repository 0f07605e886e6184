"""From a state dict to a manifest and tensors, and back; no I/O.

This package knows torch's tensors and containers, and copies nothing but values. It may
use `format`, `memory` and `runtime`. A send begins in `flatten`: `describe` turns a
state dict into a tree and entries, with `overlaps` for tensors that share memory,
`distributed` for those of several ranks, and `leaves` and `nodes` for other values. A
receive and a load plan here which bytes go into which memory: `catalogue` says what
the sources hold, `match` pairs it with a template, `dispositions` compares the memory
of both, and `load_plan` makes the plan. They end in `rebuild`, which makes a state dict
of tensors and the tree, and in `containers`, which puts values into a template.
"""

from __future__ import annotations
