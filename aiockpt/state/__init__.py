"""From a state dict to a manifest and tensors, and back; no I/O.

This room knows torch's tensors and containers, and copies nothing but values. It may
use `format`, `memory` and `runtime`. A send begins in `flatten`: `describe` turns a
state dict into a tree and entries, with `overlaps` for tensors that share memory,
`distributed` for those of several ranks, and `leaves` and `nodes` for other values. A
receive plans here which bytes go into which memory (`template`, `pairing`,
`load_plan`), and ends in `rebuild`, which makes a state dict of tensors and the tree.

`catalogue`, `match` and `dispositions` plan the same for every way, and `mesh` for any
mesh. So far only tests use them, which run them beside the others and compare.
"""

from __future__ import annotations
