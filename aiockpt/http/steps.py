"""The steps that a peer publishes, as an async iterator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from aiockpt._lifetime import Lifetime
from aiockpt.errors import LocalProtocolError
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
        self._asks = False
        self._reconnect_timeout = reconnect_timeout

    def __repr__(self) -> str:
        return f"<Steps of {self._source.base_url} after={self._after}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Wait for the next one. If cancelled, or if it fails, none is lost.

        Raises:
            LocalProtocolError: another task waits already.
        """
        with self._lifetime.call(), self._alone():
            found = await self._client.wait_newer(
                self._source, self._after, reconnect_timeout=self._reconnect_timeout
            )
            self._after = found.step
        return found.step

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Two would be given the same step, or an older one after a newer.
        if self._asks:
            raise LocalProtocolError(
                "two tasks iterate over the same steps: call steps() for each"
            )
        self._asks = True
        try:
            yield
        finally:
            self._asks = False
