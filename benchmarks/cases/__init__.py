"""What can be measured: each module has the phases of one case, and its rows.

``phases(shape, plan, tree)`` is a generator. It starts the processes of one source
tree, yields the candidates of one phase after the other, and cleans up in between; the
candidates of a phase take turns. ``rows(shape, found)`` makes the table of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases import cold, delta, embedded, group, http, saving, trainer
from benchmarks.cases.pair import Phases, Plan
from benchmarks.measures import Note, Series, take_turns
from benchmarks.report import OTHER_TREE, Row
from benchmarks.state import Shape
from benchmarks.worker import HERE

__all__ = ["CASES", "Case", "measure"]


@dataclass(frozen=True, slots=True)
class Case:
    """The phases and the rows of one case."""

    phases: Callable[[Shape, Plan, Path], Phases]
    rows: Callable[[Shape, Mapping[str, Series]], Iterator[Row]]


CASES: Mapping[str, Case] = {
    "http": Case(http.phases, http.rows),
    "pg": Case(group.phases, group.rows),
    "checkpointer": Case(saving.phases, saving.rows),
    "embedded": Case(embedded.phases, embedded.rows),
    "trainer": Case(trainer.phases, trainer.rows),
    "cold": Case(cold.phases, cold.rows),
    "delta": Case(delta.phases, delta.rows),
}


def measure(
    case: Case, shape: Shape, plan: Plan, against: Path | None, note: Note
) -> dict[str, Series]:
    """Return the samples of all phases, by candidate.

    With another source tree, its processes run beside ours, and its candidates take
    turns with ours; their names begin with `OTHER_TREE`.

    Raises:
        BenchmarkError: a process could not do what it was asked.
    """
    found: dict[str, Series] = {}
    trees = [HERE] if against is None else [HERE, against]
    with ExitStack() as stack:
        runs = [case.phases(shape, plan, tree) for tree in trees]
        for run in runs:
            stack.enter_context(closing(run))
        for ours, *others in zip(*runs, strict=True):
            beside = [each for other in others for each in other if each.ours]
            named = [replace(each, name=OTHER_TREE + each.name) for each in beside]
            turns = take_turns([*ours, *named], plan.repeat, note)
            for each in (*ours, *named):
                if each.name in turns:
                    nbytes = 0 if each.empty else shape.nbytes
                    found[each.name] = Series(each.name, nbytes, turns[each.name])
    return found
