"""How much memory a receive takes beyond the state dict, in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from aiockpt.bench.process import Worker
from aiockpt.bench.shapes import Shape

__all__ = ["Footprint", "measure_footprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of the receiving process at its peak, beyond what it had before.

    Attributes:
        state: A state dict of this shape that the process builds itself, its Python
            objects included.
        fresh: Beyond ``state``, while receiving into fresh memory.
        in_place: Beyond the template, while receiving into it.
        rival: As ``fresh``, by torchft; None where it was not measured.
        rival_name: Which of its transports that is.
    """

    state: int
    fresh: int
    in_place: int
    rival: int | None
    rival_name: str


def measure_footprint(
    sender: Worker, shape: Shape, size: int, *, rival: bool
) -> Footprint:
    """Receive once in each way, each time in a new process."""
    sender.call("prepare", key=shape.key, size=size)
    metadata = sender.call("offer")
    state, in_place = _in_place(shape, size, metadata)
    fresh = _fresh(shape, size, metadata) - state
    theirs = _rival(sender, shape, size) - state if rival else None
    sender.call("retract")
    return Footprint(
        state=state,
        fresh=fresh,
        in_place=in_place,
        rival=theirs,
        rival_name="torchft, num_chunks=0",
    )


def _in_place(shape: Shape, size: int, metadata: str) -> tuple[int, int]:
    with Worker("receiver") as receiver:
        receiver.call("prepare", key=shape.key, size=size)
        receiver.call("warm_up")
        empty = receiver.call("footprint")
        receiver.call("make_template")
        before = receiver.call("footprint")
        receiver.call("receive", metadata=metadata, into=True)
        return before - empty, receiver.call("peak") - before


def _fresh(shape: Shape, size: int, metadata: str) -> int:
    with Worker("receiver") as receiver:
        receiver.call("prepare", key=shape.key, size=size)
        receiver.call("warm_up")
        before = receiver.call("footprint")
        receiver.call("receive", metadata=metadata, into=False)
        return int(receiver.call("peak") - before)


def _rival(sender: Worker, shape: Shape, size: int) -> int:
    metadata = sender.call("offer_rival", num_chunks=0)
    with Worker("receiver") as receiver:
        receiver.call("prepare", key=shape.key, size=size)
        receiver.call("warm_up_rival")
        before = receiver.call("footprint")
        receiver.call("receive_rival", metadata=metadata, num_chunks=0)
        return int(receiver.call("peak") - before)
