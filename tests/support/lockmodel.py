"""A reader-writer lock beside a model of its rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiockpt.runtime.rwlock import Hold, RWLock, RWLockStatistics

IDLE = RWLockStatistics(0, 0, 0, 0, 0.0)


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(6):
        await asyncio.sleep(0)


async def queue(acquiring: Coroutine[None, None, Hold]) -> asyncio.Task[Hold]:
    """Start an acquire as a task and let it get as far as it can."""
    task = asyncio.create_task(acquiring)
    await settle()
    return task


def acquire(lock: RWLock, kind: str) -> Coroutine[None, None, Hold]:
    """Acquire as a reader ("R") or as a writer ("W")."""
    return lock.acquire_read() if kind == "R" else lock.acquire_write()


def at_once(acquiring: Coroutine[None, None, Hold]) -> Hold:
    """Give the lease of an acquire that must not suspend."""
    with pytest.raises(StopIteration) as end:
        acquiring.send(None)
    lease: Hold = end.value.value
    return lease


def facts(lock: RWLock) -> RWLockStatistics:
    """The statistics without the one that changes with the clock."""
    return lock.statistics()._replace(oldest_reader=0.0)


@dataclass(eq=False)
class Visitor:
    """What the model knows of one acquire: its kind and where it has got to."""

    kind: str
    grace: float | None = None
    where: str = "waiting"  # then: inside, gone, cancelled
    evictions: int = 0
    task: asyncio.Task[Hold] | None = None

    def evict(self) -> None:
        self.evictions += 1


class Model:
    """The rules of the lock, as plainly as they can be said."""

    def __init__(self) -> None:
        self.everyone: list[Visitor] = []
        self.evicted: set[Visitor] = set()

    def at(self, where: str, kind: str = "RW") -> list[Visitor]:
        return [v for v in self.everyone if v.where == where and v.kind in kind]

    def come(self, visitor: Visitor) -> None:
        self.everyone.append(visitor)
        self.admit()

    def leave(self, visitor: Visitor) -> None:
        visitor.where = "gone"
        if visitor.kind == "W":
            for reader in self.at("waiting", "R"):
                reader.where = "inside"
        self.admit()

    def cancel(self, visitor: Visitor) -> None:
        visitor.where = "cancelled"
        self.admit()

    def admit(self) -> None:
        for visitor in self.at("waiting"):
            if self.at("inside", "W" if visitor.kind == "R" else "RW"):
                break
            visitor.where = "inside"

    def evict(self) -> None:
        if any(writer.grace == 0.0 for writer in self.at("waiting", "W")):
            self.evicted.update(self.at("inside", "R"))


class LockMachine(RuleBasedStateMachine):
    """Drives a lock and the model together; all steps of a rule fall in one turn."""

    new_loop: Callable[[], asyncio.AbstractEventLoop]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=self.new_loop)
        self.lock = RWLock()
        self.model = Model()

    @rule(kind=st.sampled_from("RRW"), grace=st.sampled_from([None, None, 0.0, 60.0]))
    def come(self, kind: str, grace: float | None) -> None:
        visitor = Visitor(kind, grace if kind == "W" else None)
        if kind == "R":
            acquiring = self.lock.acquire_read(evict=visitor.evict)
        else:
            acquiring = self.lock.acquire_write(grace=grace)
        visitor.task = self.runner.run(queue(acquiring))
        self.model.come(visitor)

    @precondition(lambda self: self.model.at("inside"))
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        visitor = data.draw(st.sampled_from(self.model.at("inside")))
        self.release(visitor)

    @precondition(lambda self: self.model.at("waiting"))
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.give_up(data.draw(st.sampled_from(self.model.at("waiting"))))

    @precondition(lambda self: self.model.at("inside") and self.model.at("waiting"))
    @rule(data=st.data())
    def leave_and_cancel_in_one_turn(self, data: Any) -> None:
        steps = [(self.release, visitor) for visitor in self.model.at("inside")]
        steps += [(self.give_up, visitor) for visitor in self.model.at("waiting")]
        chosen = st.lists(st.sampled_from(steps), unique=True, min_size=2)
        for step, visitor in data.draw(chosen):
            step(visitor)

    @precondition(lambda self: self.model.at("gone"))
    @rule(data=st.data())
    def leave_again(self, data: Any) -> None:
        self.result(data.draw(st.sampled_from(self.model.at("gone")))).release()

    @invariant()
    def everyone_is_where_the_model_says(self) -> None:
        self.runner.run(settle())
        self.model.evict()
        for visitor in self.model.everyone:
            assert self.whereabouts(visitor) == visitor.where
            assert visitor.evictions == (visitor in self.model.evicted)

    @invariant()
    def the_statistics_count_them(self) -> None:
        assert facts(self.lock) == RWLockStatistics(
            readers=len(self.model.at("inside", "R")),
            writers=len(self.model.at("inside", "W")),
            waiting_readers=len(self.model.at("waiting", "R")),
            waiting_writers=len(self.model.at("waiting", "W")),
            oldest_reader=0.0,
        )

    def teardown(self) -> None:
        with self.runner:
            while inside := self.model.at("inside"):
                self.release(inside[0])
                self.everyone_is_where_the_model_says()
            assert not self.model.at("waiting")
            assert facts(self.lock) == IDLE

    def release(self, visitor: Visitor) -> None:
        self.result(visitor).release()
        self.model.leave(visitor)

    def give_up(self, visitor: Visitor) -> None:
        assert visitor.task is not None
        visitor.task.cancel()
        self.model.cancel(visitor)

    def result(self, visitor: Visitor) -> Hold:
        assert visitor.task is not None
        return visitor.task.result()

    def whereabouts(self, visitor: Visitor) -> str:
        task = visitor.task
        assert task is not None
        if not task.done():
            return "waiting"
        if task.cancelled():
            return "cancelled"
        return "inside" if task.result().is_held else "gone"
