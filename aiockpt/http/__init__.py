"""HTTP: serves what was sent, and fetches from its like.

This package and `aiockpt.swarm` are the only ones that import aiohttp. It knows nothing
of process groups, nor of other processes of its host: `aiockpt.http_transport` hands it
what it needs of `aiockpt.local`. A send publishes a snapshot in a `store`. `handlers`
answer requests from it (admit, find, plan, send), on the loop of their `server`. A
receive reads from a `source`: `peers` are asked for the manifest. A `download` requests
runs of chunks, as its `planner` decides; a `range_fetcher` requests each of them over
the `client`, and `body_reader` puts the bytes into memory. Both ends use `protocol`,
`problems` and `tokens`. Receivers of one snapshot may serve each other: `aiockpt.swarm`
extends the handlers, the `membership` of a receive serves a relay of what has arrived,
its `neighbours` are the other members in a download, and `swarm` decides who serves
whom what. Names load on first use: the server and the client inside need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt._lazy import lazy

if TYPE_CHECKING:
    from aiockpt.http.embedding import (
        APP_KEY,
        create_app,
        get_transport,
        routes,
        serves,
        setup,
    )

__all__ = [
    "APP_KEY",
    "create_app",
    "get_transport",
    "routes",
    "serves",
    "setup",
]

_HOMES = dict.fromkeys(__all__, "aiockpt.http.embedding")

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)
