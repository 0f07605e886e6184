"""``aiockpt bench --delta``: what an older state spares, over a slow line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from aiockpt.bench.link import Link, hindrance
from aiockpt.bench.measuring import Pair
from aiockpt.bench.process import BenchError, Worker
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.rows import Row
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series

__all__ = ["measure_delta", "rows_of_delta"]

RATE = "1gbit"
_SHARES = {"nothing": 0.0, "2 % of chunks": 0.02, "every chunk": 1.0}
_TIMES = 10.0
_WHOLE = {True: "all of it, in place", False: "all of it, fresh"}


class DeltaPair(Pair):
    """A sender, and a receiver behind a line that has most of it already."""

    def __init__(
        self, sender: Worker, receiver: Worker, shape: Shape, size: int, host: str
    ) -> None:
        super().__init__(sender, receiver, shape, size)
        self._metadata = sender.call("offer", host=host)
        receiver.call("make_template")

    def candidates(self) -> list[Candidate]:
        """Return receives of the whole, and of what has changed."""
        return [
            *(Candidate(name, self._whole(into=into)) for into, name in _WHOLE.items()),
            *(
                Candidate(_name(what, into=into), self._changed(share, into=into))
                for what, share in _SHARES.items()
                for into in (True, False)
            ),
        ]

    def _whole(self, *, into: bool) -> Callable[[], Sample]:
        # The template keeps its bytes: it is what the others have.
        return lambda: self.received("receive", metadata=self._metadata, into=into)

    def _changed(self, share: float, *, into: bool) -> Callable[[], Sample]:
        return lambda: self.received(
            "receive_delta", metadata=self._metadata, share=share, into=into
        )


def measure_delta(
    shape: Shape, size: int, repeat: int, note: Note
) -> dict[str, Series]:
    """Measure everything in two processes.

    Raises:
        BenchError: there can be no line here.
    """
    if why := hindrance():
        raise BenchError(why)
    with (
        Link(RATE) as line,
        Worker("sender") as sender,
        Worker("keeper", line.inside) as receiver,
    ):
        pair = DeltaPair(sender, receiver, shape, size, line.address)
        found = take_turns(pair.candidates(), repeat, note)
    return {
        name: Series(name, shape.nbytes, samples) for name, samples in found.items()
    }


def rows_of_delta(shape: Shape, found: Mapping[str, Series]) -> Iterator[Row]:
    """Yield how fast a state dict is there that was there already, mostly."""
    for what, share in _SHARES.items():
        for into in (True, False):
            series, whole = found[_name(what, into=into)], found[_WHOLE[into]]
            yield Row(
                what=f"receive over 1 Gb/s, {series.name}",
                shape=str(shape),
                value=series.speed,
                unit="GB/s",
                reference=whole.name,
                reference_value=whole.speed,
                at_least=_TIMES if 0 < share < 1 else None,
            )


def _name(what: str, *, into: bool) -> str:
    return f"{what} changed, {'in place' if into else 'fresh'}"
