"""A saver is killed at each of its requests; nothing torn and nothing open is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

import aiockpt
from aiockpt.errors import CheckpointNotFoundError
from aiockpt.storage import objects
from tests.objects.conftest import Place, Proxied
from tests.support.matrix import EXHAUSTIVE
from tests.support.object_saver import COMMAND, filled, save_filled, value_of
from tests.support.objectstore import Cut, Request

pytestmark = pytest.mark.timeout(1800)

WHEN: tuple[Literal["begins", "half", "answered"], ...] = ("begins", "half", "answered")
FEW = 4
"""Points of each kind of save in the ordinary suite."""


class Point(NamedTuple):
    """Where a saver is killed."""

    request: int
    when: Literal["begins", "half", "answered"]


class Saver:
    """A process that saves step 2 through a proxy, and may be killed there."""

    def __init__(self, place: Place, proxied: Proxied, kind: str, notes: Path) -> None:
        self.place, self.kind, self._notes = place, kind, notes
        self.proxy, _ = proxied(self._rule)
        self.said = ""
        self._point: Point | None = None
        self._pid = notes
        self._first = 0

    def prepare(self, name: str) -> None:
        """Save what is there before: the same step, or an older one."""
        if self.kind in ("replaced", "retiring"):
            before = "step-2" if self.kind == "replaced" else "step-1"
            save_filled(self.place(f"{name}/{before}"), filled(1))

    def run(self, name: str, point: Point | None = None) -> list[Request]:
        """Save, and be killed at a point; return the requests."""
        self._point, self._first = point, len(self.proxy.requests)
        root, environment = self.place.child(self.proxy.port)
        path, pid = f"{root}/{self.place.prefix}/{name}/step-2", f"{self._notes}/{name}"
        how = ["save", path, "2", "1" if self.kind == "retiring" else "0"]
        if self.kind == "in a process":
            how = ["save_in_process", path, "2", pid]
        with subprocess.Popen(
            [*COMMAND, *how], env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            if self.kind != "in a process":
                Path(pid).write_text(str(process.pid))
            self._pid = Path(pid)
            self.said, _ = process.communicate(timeout=120)
        killed = point is not None and self.kind != "in a process"
        assert process.returncode == (-signal.SIGKILL if killed else 0), point
        return self.proxy.requests[self._first :]

    def _rule(self, request: Request) -> Cut | None:
        point = self._point
        if point is None or request.number - self._first != point.request:
            return None
        return Cut(point.when, self._kill)

    def _kill(self) -> None:
        os.kill(int(self._pid.read_text()), signal.SIGKILL)


def outcome(place: Place, name: str) -> int | None:
    """Return which state step 2 has, having looked at every byte of it."""
    try:
        return value_of(aiockpt.load(place(f"{name}/step-2")))
    except CheckpointNotFoundError:
        return None


def points(requests: list[Request]) -> Iterator[Point]:
    """Return where a save can be killed that makes these requests."""
    for number, each in enumerate(requests):
        for when in WHEN:
            if when != "half" or each.up:
                yield Point(number, when)


@pytest.mark.parametrize("kind", ["new", "replaced", "retiring", "in a process"])
def test_a_saver_is_killed(
    place: Place,
    proxied: Proxied,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """Nothing is torn, and the next sweep leaves no object and no upload."""
    saver = Saver(place, proxied, kind, tmp_path)
    saver.prepare("whole")
    every = chosen = [*points(saver.run("whole"))]
    assert outcome(place, "whole") == 2
    if not EXHAUSTIVE:
        chosen = [every[at * (len(every) - 1) // (FEW - 1)] for at in range(FEW)]
    seen = set()
    for number, point in enumerate(chosen):
        saver.prepare(f"at-{number}")
        saver.run(f"at-{number}", point)
        found = outcome(place, f"at-{number}")
        assert found in ((1, 2) if kind == "replaced" else (None, 2)), point
        seen.add(found)
        if kind == "in a process":
            assert found == 2 or not saver.said.startswith("saved"), saver.said
            assert found is None or not saver.said.startswith("not saved"), saver.said
        for each in aiockpt.list_checkpoints(place(f"at-{number}")):
            assert value_of(aiockpt.load(each)) == each.step
        if kind == "retiring" and found is None:
            assert value_of(aiockpt.load(place(f"at-{number}/step-1"))) == 1
    assert len(seen) == 2
    left = len(place.uploads())
    of = f"{len(chosen)} of {len(every)} points"
    print(f"{kind}: killed at {of}; {left} uploads are open")

    # The store tells the age of what was left in whole seconds.
    time.sleep(2.1)
    monkeypatch.setattr(objects, "_ABANDONED_AFTER_S", 0.0)
    for number, point in enumerate(chosen):
        name = f"at-{number}"
        before = outcome(place, name)
        save_filled(place(f"{name}/step-3"), filled(3))
        assert outcome(place, name) == before
        expected = set()
        for each in aiockpt.list_checkpoints(place(name)):
            expected |= {f"{each.name}/commit.json"}
            expected |= {f"{each.name}/{file.key}" for file in each.files.values()}
        assert set(place.objects(name)) == expected, point
    assert place.uploads() == []
