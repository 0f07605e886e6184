"""Drop-in checkpoint transports for torchft's Manager.

They have torchft's interface: every call blocks. Each one runs a transport of this
package on an event loop in a separate thread. Only this package imports torchft. The
entry points are `HTTPTransport` and `PGTransport`::

    manager = torchft.Manager(
        ...,
        checkpoint_transport=aiockpt.torchft.HTTPTransport(timedelta(seconds=60)),
    )

========= ===================================================================
adapter   `Adapter`: torchft's calls over any of our transports; a receive with retries
http      `HTTPTransport`, reachable from other hosts by default
group     `PGTransport`, which uses the group as it is at each call
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
