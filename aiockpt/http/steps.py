"""The steps that a peer publishes, as an async iterator."""

from __future__ import annotations

from typing import Self

from aiockpt._lifetime import Lifetime
from aiockpt.http.client import CheckpointClient
from aiockpt.wire.http import Source

__all__ = ["Steps"]


class Steps:
    """Gives the newest step of a peer, whenever there is one after the last given.

    Between two steps nothing is held or under way, so it may be dropped at any time.

    Args:
        client: Asks the peer.
        source: Which peer.
        lifetime: Ends the waiting.
        after: The last step that is known.
        reconnect_timeout: Seconds for which a silent peer is asked again.
    """

    def __init__(
        self,
        client: CheckpointClient,
        source: Source,
        lifetime: Lifetime,
        *,
        after: int | None,
        reconnect_timeout: float,
    ) -> None:
        self._client = client
        self._source = source
        self._lifetime = lifetime
        self._after = after
        self._reconnect_timeout = reconnect_timeout

    def __repr__(self) -> str:
        return f"<Steps of {self._source.base_url} after={self._after}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Wait for the next one. If cancelled, or if it fails, none is lost."""
        with self._lifetime.call():
            found = await self._client.wait_newer(
                self._source, self._after, reconnect_timeout=self._reconnect_timeout
            )
            self._after = found.step
        return found.step
