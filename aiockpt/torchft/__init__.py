"""Drop-in checkpoint transports for torchft's Manager.

They have torchft's interface, in which every call blocks. The transports behind them
run on a loop in a thread of their own. This is the only room that imports torchft. The
path begins at `HTTPTransport` and `PGTransport`::

    manager = torchft.Manager(
        ...,
        checkpoint_transport=aiockpt.torchft.HTTPTransport(timedelta(seconds=60)),
    )

========= ===================================================================
adapter   `Adapter`: torchft's calls over any of our transports, a receive that retries
http      `HTTPTransport`, ready to be found by other hosts
group     `PGTransport`, which takes up the group anew at every call
========= ===================================================================
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torchft") is None:
    raise ModuleNotFoundError(
        "aiockpt.torchft needs torchft, which is not installed: "
        "pip install 'aiockpt[torchft]'",
        name="torchft",
    )

from aiockpt.torchft.adapter import Adapter, adapt
from aiockpt.torchft.group import PGTransport
from aiockpt.torchft.http import HTTPTransport

__all__ = ["Adapter", "HTTPTransport", "PGTransport", "adapt"]
