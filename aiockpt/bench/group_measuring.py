"""What is measured for each shape over a process group."""

from __future__ import annotations

import tempfile
from functools import partial

from aiockpt.bench.footprint import Footprint
from aiockpt.bench.group import OURS, TORCH, TORCHFT
from aiockpt.bench.measuring import Pair, Plan, idle, sample_of
from aiockpt.bench.memory import TOUCHED
from aiockpt.bench.process import Worker
from aiockpt.bench.rounds import Candidate, Note, take_turns
from aiockpt.bench.shapes import Shape
from aiockpt.bench.statistics import Sample, Series
from aiockpt.bench.timed import Cost

__all__ = ["GroupPair", "measure_group_footprint", "measure_group_shape"]

_FEW = 1 << 20  # bytes, for a transfer that only warms up


class GroupPair(Pair):
    """Two ranks that have met in a group for each transport."""

    def transferred(self, by: str, *, into: bool) -> Sample:
        """Have the sender send and the receiver receive."""
        self.receiver.call("ready", touched=into)
        mine, theirs = _transfer(self.sender, self.receiver, by, into=into)
        return sample_of(theirs, mine)

    def candidates(self, rivals: tuple[str, ...], *, into: bool) -> list[Candidate]:
        """Return the transfers, by this library and by others."""
        where = "in place" if into else "fresh"
        return [
            Candidate(f"{by}, {where}", partial(self.transferred, by, into=into))
            for by in (OURS, *rivals)
        ]


def measure_group_shape(pair: GroupPair, plan: Plan, note: Note) -> dict[str, Series]:
    """Measure everything that has a time."""
    rivals = (TORCHFT, TORCH) if plan.rival else (TORCH,)
    with tempfile.TemporaryDirectory() as directory:
        for by in (OURS, *rivals):
            _join(pair.sender, pair.receiver, directory, by)
    candidates = [idle(pair), *pair.candidates(rivals, into=False)]
    found = take_turns(candidates, plan.repeat, note)
    pair.receiver.call("make_template")
    raw = pair.raw(TOUCHED, plan.connections)
    candidates = [*raw, *pair.candidates(rivals, into=True)]
    found |= take_turns(candidates, plan.repeat, note)
    pair.sender.call("retract")
    pair.receiver.call("release")
    nbytes = pair.shape.nbytes
    return {name: Series(name, nbytes, samples) for name, samples in found.items()}


def measure_group_footprint(
    sender: Worker, shape: Shape, size: int, *, rival: bool
) -> Footprint:
    """Receive once in each way, each time in a new process."""
    state, in_place = _peak(sender, shape, size, OURS, into=True)
    _, fresh = _peak(sender, shape, size, OURS, into=False)
    theirs = None
    if rival:
        theirs = _peak(sender, shape, size, TORCHFT, into=False)[1] - state
    return Footprint(
        state=state,
        fresh=fresh - state,
        in_place=in_place,
        rival=theirs,
        rival_name=f"{TORCHFT}, fresh",
    )


def _peak(
    sender: Worker, shape: Shape, size: int, by: str, *, into: bool
) -> tuple[int, int]:
    """Return the bytes of a template, if any, and those of a receive at its peak."""
    with Worker("group receiver") as receiver:
        with tempfile.TemporaryDirectory() as directory:
            _join(sender, receiver, directory, by)
        for end in (sender, receiver):
            end.call("prepare", key="one", size=_FEW)
        _transfer(sender, receiver, by, into=False)
        for end in (sender, receiver):
            end.call("prepare", key=shape.key, size=size)
        empty = receiver.call("footprint")
        if into:
            receiver.call("make_template")
        before = receiver.call("footprint")
        _transfer(sender, receiver, by, into=into)
        return before - empty, receiver.call("peak") - before


def _join(sender: Worker, receiver: Worker, directory: str, by: str) -> None:
    sender.begin("join", directory=directory, by=by)
    receiver.call("join", directory=directory, by=by)
    sender.finish()


def _transfer(
    sender: Worker, receiver: Worker, by: str, *, into: bool
) -> tuple[Cost, Cost]:
    """Return what it cost the receiver, and the sender."""
    sender.begin("send", by=by)
    mine: Cost = receiver.call("receive_by", by=by, into=into)
    theirs: Cost = sender.finish()
    return mine, theirs
