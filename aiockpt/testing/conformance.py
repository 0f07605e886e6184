"""The suite that every transport passes: subclass, say how to make yours, run pytest.

::

    @pytest.mark.asyncio
    class TestMyTransport(TransportConformance[MyTransport]):
        @asynccontextmanager
        async def transports(self, count):
            async with AsyncExitStack() as stack:
                made = [MyTransport() for _ in range(count)]
                yield [await stack.enter_async_context(each) for each in made]

The tests are coroutines; which plugin runs them is the subclass's choice. A transport
that lacks an option inherits from the parts that it can pass.
"""

from __future__ import annotations

from typing import Any, TypeVar

from aiockpt.testing.suite.endings import Endings
from aiockpt.testing.suite.offers import Offers
from aiockpt.testing.suite.round_trips import RoundTrips
from aiockpt.testing.suite.selections import Selections
from aiockpt.testing.suite.templates import Templates
from aiockpt.transport import CheckpointTransport

__all__ = [
    "Endings",
    "Offers",
    "RoundTrips",
    "Selections",
    "Templates",
    "TransportConformance",
]

T = TypeVar("T", bound=CheckpointTransport[Any])


class TransportConformance(
    RoundTrips[T], Offers[T], Endings[T], Templates[T], Selections[T]
):
    """All parts of the suite."""
