"""``python3 -m benchmarks.gpu``: correctness and speed on an accelerator, in minutes.

It needs plain Python with this tree on its path, what the image of a machine with a GPU
has, and the wheels that ``nox -s gpu-wheels`` has collected: see CONTRIBUTING.md.
``tests/cuda`` comes first, then the rows of ``rows.csv`` that begin with ``gpu``, the
most important ones first. Each row is printed and written when it is known, so a run
that is killed loses nothing. A case that hangs is ended, and what no longer fits into
the time is left out.

Without an accelerator everything runs on a fake one, and no figure is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from aiockpt.cli.doctor import describe_machine
from aiockpt.runtime.system import copying_threads
from benchmarks.cases import CHUNKS, RENO, ROWS, SOCKETS, Row, saved, setting
from benchmarks.measures import BenchmarkError, Candidate, Sample, Samples, take_turns
from benchmarks.report import GPU_REPORT, PAGE, cells, rows_of, write_page
from benchmarks.workers import HERE, Worker

Phases = Iterator[list[Candidate]]

_MIB = 1 << 20
_WHOLE = 4096 * _MIB  # of a state dict, where the device and the host have room
_TINY = 1 / 512  # of it, where nothing is measured
_SMALL, _TINIEST = 10_000, 4096  # tensors, and the bytes of each
_ROUNDS = 6  # the first one is discarded
_TESTS = tuple(
    f"tests/cuda/test_{name}.py"
    for name in (
        *("pg_cuda", "callers_work", "checkpoints_cuda", "fingerprint_cuda", "cuda"),
        "pg_nccl",
    )
)
"""First those that a device has shown to be wrong."""
_TESTED, _TEST = 100.0, 20.0  # seconds that the tests may take, and each of them
_LONGEST, _SHORTEST = 75.0, 15.0  # seconds for a case
_GRACE = 20.0  # seconds after which a case that should have ended is ended
_OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
_OUTCOME = rf"^\S*::.+? ({'|'.join(_OUTCOMES)})"  # of a test, in a line of pytest
_TICK = 0.2  # seconds until what the tests have printed is read again
_TRAINED = 1.5  # seconds of a sample
_RIVALS = {
    "async_save": ("async_save, pinned", "async_save, thread"),
    "_experimental": ("_experimental, pinned", "_experimental, staging in the caller"),
}
"""torch's savers, with an accelerator and without."""

_NOTHING = "there is no accelerator, so nothing was measured"


class Kit:
    """A process with the device, and one that sends to it; use it in a ``with`` block.

    Args:
        scale: Of the usual sizes.
    """

    def __init__(self, *, scale: float) -> None:
        self.real = torch.cuda.is_available()
        self.machine: dict[str, Any] = {}
        self.nbytes = int(_WHOLE * scale)
        self._built: dict[str, int] = {}
        self._stack = ExitStack()
        self._workers: list[Worker] = []

    def __enter__(self) -> Kit:
        place = tempfile.TemporaryDirectory(prefix="benchmarks-", dir=Path.cwd())
        self._place = self._stack.enter_context(place)
        fake = "benchmarks.fake_device:FakeDevice"
        self.device = self._worker("benchmarks.device:Device" if self.real else fake)
        self.machine = self.device.call("describe")
        self.nbytes = min(self.nbytes, self.machine.pop("most"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _worker(self, kind: str) -> Worker:
        worker = self._stack.enter_context(Worker(kind))
        self._workers.append(worker)
        return worker

    def kill(self) -> None:
        """End the processes, from any thread; whoever waits for them gets an error."""
        for each in self._workers:
            each.kill()

    def build(self, each: int, most: int) -> None:
        """Have tensors of ``each`` bytes on the device, of ``most`` bytes together."""
        each = min(each, self.nbytes)
        self._built = {"count": max(min(most, self.nbytes) // each, 1), "each": each}
        self.device.call("prepare", **self._built, place=self._place)

    def source(self) -> Worker:
        """Return a process that has the same bytes in host memory."""
        if len(self._workers) < 2:
            self._worker("benchmarks.ends:End")
        self._workers[1].call("prepare", **self._built)
        return self._workers[1]

    def does(self, name: str, do: str, rival: str = "", **arguments: Any) -> Candidate:
        """Return what the device does when it is told so."""
        nbytes = self._built["count"] * self._built["each"]

        def run() -> Sample:
            return saved(nbytes, self.device.call(do, **arguments))

        return Candidate(name, run, rival)


# ------------------------------------------------------------------------ the cases


def _stage(kit: Kit) -> Phases:
    for name, each in (("64 MiB", 64 * _MIB), ("1 MiB", _MIB), ("4 KiB", _TINIEST)):
        kit.build(each, _SMALL * each)
        copy = kit.does(f"pinned copy, {name}", "copy", to="host")
        joined = kit.does(f"torch.cat and a pinned copy, {name}", "gather")
        by_hand = [joined] * (each == _TINIEST)
        yield [copy, *by_hand, kit.does(name, "stage")]


def _save(kit: Kit) -> Phases:
    kit.build(64 * _MIB, _WHOLE)
    copy = kit.does("pinned copy", "copy", to="host")
    yield [copy, kit.does("aiockpt", "save", by="aiockpt")]


def _load(kit: Kit) -> Phases:
    kit.build(64 * _MIB, _WHOLE)
    copy = kit.does("pinned copy to the device", "copy", to="device")
    read = kit.does(
        "a file's reads, then a pinned copy", "read", threads=copying_threads()
    )
    yield [copy, read, kit.does("aiockpt", "load")]


def _receive(kit: Kit) -> Phases:
    kit.build(16 * _MIB, kit.nbytes // 4)
    source, receive = kit.source(), partial(kit.does, do="receive")
    offer, rival = partial(source.call, "offer"), "torchft and cuda()"
    ours, raw = offer(by="aiockpt"), offer(by="raw", congestion=RENO)
    settings = CHUNKS if find_spec("torchft") else ()
    yield [
        receive("aiockpt", by="aiockpt", source=ours),
        receive("raw sockets, then a copy", by="raw", source=raw, connections=SOCKETS),
        *(
            receive(
                setting(rival, number),
                rival=rival,
                by="torchft",
                source=offer(by="torchft", num_chunks=number, congestion=RENO),
            )
            for number in settings
        ),
    ]


def _apply(kit: Kit) -> Phases:
    kit.build(64 * _MIB, _WHOLE)
    source = kit.source().call("offer", by="aiockpt")
    for name, share in (("1 %", 0.01), ("all", 1.0)):
        copy = kit.does(f"copy, {name}", "copy", to="device", share=share)
        yield [copy, kit.does(name, "apply", source=source, changed=share)]


def _train(kit: Kit) -> Phases:
    kit.build(64 * _MIB, _WHOLE)
    seconds = _TRAINED if kit.real else 0.02
    ways = ("alone", "stage", "load")
    yield [kit.does(way, "train", beside=way, seconds=seconds) for way in ways]


def _digest(kit: Kit) -> Phases:
    kit.build(64 * _MIB, kit.nbytes // 4)
    copy = kit.does("copy on the device", "copy", to="itself")
    yield [copy, kit.does("digests", "fold"), kit.does("fingerprint", "fingerprint")]


def _rivals(kit: Kit) -> Phases:
    kit.build(16 * _MIB, kit.nbytes // 4)
    rivals = {name: by[not kit.real] for name, by in _RIVALS.items()}
    yield [
        kit.does("aiockpt", "save", by="aiockpt"),
        *(kit.does(name, "save", name, by=by) for name, by in rivals.items()),
    ]


CASES: Mapping[str, Callable[[Kit], Phases]] = {
    "gpu stage": _stage,
    "gpu save": _save,
    "gpu load": _load,
    "gpu receive": _receive,
    "gpu apply": _apply,
    "gpu train": _train,
    "gpu digest": _digest,
    "gpu rivals": _rivals,
}
"""In the order of their importance."""


# -------------------------------------------------------------------------- the run


class Run:
    """A run, and its report, which is on disk at every moment.

    Args:
        path: Of the report.
        until: When it should have ended, on the monotonic clock.
    """

    def __init__(self, path: Path, until: float, *, rounds: int, scale: float) -> None:
        self._path, self._until = path, until
        self._rounds, self._scale = rounds, scale
        self._left_out = ""
        self._kit: Kit | None = None
        self.report: dict[str, Any] = {
            "machine": describe_machine(),
            "measured": torch.cuda.is_available(),
            "tests": {},
            "rows": [],
            "failed": {},
            "ended": False,
        }

    def keep(self) -> None:
        """Write the report; who kills this finds the last one or this one."""
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self._path)

    def test(self) -> None:
        """Run the tests of devices; end them after a while."""
        limit = min(_TESTED, 0.4 * (self._until - time.monotonic()))
        if limit < 1:
            self.report["tests"] = {
                "failed": 0,
                "error": 0,
                "ended": "no time was left",
            }
            return
        command = (
            *(sys.executable, "-m", "pytest", "-v", "--tb=short", "--no-summary"),
            # Neither the repository's settings nor its fixtures: both need more.
            *("-c", os.devnull, "--noconftest", "--import-mode=importlib"),
            *("-p", "no:cacheprovider", "-p", "no:anyio", "-p", "benchmarks.failures"),
            *(f"--timeout={_TEST:g}", f"--rootdir={HERE}", *_TESTS),
        )
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        until = time.monotonic() + limit
        with tempfile.NamedTemporaryFile("w+") as out:
            process = subprocess.Popen(
                command,
                cwd=HERE,
                env={**os.environ, "PYTHONPATH": path.strip(os.pathsep)},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            told = 0
            try:
                while process.poll() is None and time.monotonic() < until:
                    time.sleep(_TICK)
                    text = Path(out.name).read_text(errors="replace")
                    told = self._tell_tests(text, told, "cut short")
            finally:
                if killed := process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            ended = f"exit {process.returncode}"
            if killed:
                ended = f"killed after {limit:.0f} s"
            text = Path(out.name).read_text(errors="replace")
            self._tell_tests(f"{text.rstrip()}\n", told, ended)
        tests = self.report["tests"]
        counted = ", ".join(f"{tests[each.lower()]} {each}" for each in _OUTCOMES)
        _say(f"tests/cuda: {counted}; {ended}")

    def _tell_tests(self, text: str, told: int, ended: str) -> int:
        """Print and keep what the tests have printed; return how much of it is told."""
        found = re.findall(_OUTCOME, text, re.MULTILINE)
        counts = {each.lower(): found.count(each) for each in _OUTCOMES}
        self.report["tests"] = {**counts, "ended": ended, "output": text[-60_000:]}
        whole = text.rfind("\n") + 1
        for line in text[told:whole].splitlines():
            outcome = re.match(_OUTCOME, line)
            if outcome is None or outcome[1] in {"FAILED", "ERROR"}:
                _say(f"  {line}")
        if whole > told:
            self.keep()
        return whole

    def measure(self) -> None:
        """Measure the cases one after the other, as long as there is time."""
        try:
            for name in CASES:
                now = time.monotonic()
                limit = min(now + _LONGEST, self._until - _GRACE)
                why = "no time was left"
                if limit - now > _SHORTEST:
                    why = self._case(name, limit)
                self._gaps(name, why)
        finally:
            self._close()

    def _case(self, name: str, limit: float) -> str:
        """Measure a case; return why rows are missing, if any are."""
        samples: dict[str, Samples] = {}
        self._left_out = "" if find_spec("torchft") else "torchft was not carried"
        try:
            with self._started(limit) as kit:
                for candidates in CASES[name](kit):
                    turns = take_turns(candidates, self._rounds, self._note, limit)
                    samples |= turns.samples
                    self._add(rows_of(name, samples))
        except BenchmarkError as error:
            self.report["failed"][name] = str(error)
            self._close()  # its device may be of no more use
            return f"failed: {error}"
        return self._left_out or "no time was left"

    @contextmanager
    def _started(self, limit: float) -> Iterator[Kit]:
        """Give the processes, and end them if the case does not end."""
        kit = self._kit = self._kit or Kit(scale=self._scale)
        seconds = limit + _GRACE - time.monotonic()
        timer = threading.Timer(seconds, kit.kill)
        timer.start()
        try:
            if not kit.machine:
                kit.__enter__()
                self.report["machine"] = {**kit.machine, **self.report["machine"]}
            yield kit
        finally:
            timer.cancel()

    def _close(self) -> None:
        kit, self._kit = self._kit, None
        if kit is not None:
            kit.__exit__()

    def _note(self, text: str) -> None:
        if text.startswith("left out"):
            self._left_out = text
            _say(f"  {text}")

    def _add(self, rows: Iterable[dict[str, Any]]) -> None:
        for each in rows:
            row = each
            if not self.report["measured"] and "why" not in each:
                row = {**each, **_gap("no accelerator")}
            if row not in self.report["rows"]:
                self.report["rows"].append(row)
                self.keep()
                _say(" | ".join(cell for cell in cells(row) if cell))

    def _gaps(self, case: str, why: str) -> None:
        """Add the rows of a case that are missing."""

        def is_known(row: Row) -> bool:
            return any(
                (case, row.what, row.metric) == (it["case"], it["what"], it["metric"])
                and it["against"].startswith(row.against)
                for it in self.report["rows"]
            )

        self._add(
            {"case": case, **asdict(row), **_gap(why)}
            for row in ROWS[case]
            if not is_known(row)
        )


def _gap(why: str) -> dict[str, Any]:
    figures = ("value", "beside", "ratio", "low", "high")
    return {**dict.fromkeys(figures), "verdict": "", "why": why}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for; return the exit code: 1 if anything failed."""
    options = _parse(argv)
    if options.from_ is not None:
        report = json.loads(options.from_.read_text())
        if not report.get("measured"):
            sys.stderr.write(f"{options.from_}: {_NOTHING}\n")
            return 1
        report["tests"].pop("output", None)  # it names paths of that machine
        (options.page / GPU_REPORT).write_text(json.dumps(report, indent=1) + "\n")
        others = json.loads((options.page / "benchmarks.json").read_text())
        write_page(others, options.page)
        return 0
    until = time.monotonic() + 60 * options.minutes
    real = torch.cuda.is_available()
    scale = options.scale or (1.0 if real else _TINY)
    run = Run(options.json, until, rounds=options.rounds, scale=scale)
    run.keep()
    if not real:
        _say(f"{_NOTHING}: the kit runs to its end on a fake one")
    run.test()
    run.measure()
    run.report["ended"] = True
    run.keep()
    _say(f"{options.json} has all of it" if real else _NOTHING)
    tests = run.report["tests"]
    broken = tests["failed"] or tests["error"] or tests["ended"] != "exit 0"
    return int(bool(run.report["failed"] or broken))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu",
        description="Test and measure this source tree on an accelerator.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="in which it ends; 8")
    add(
        "--rounds",
        type=int,
        default=_ROUNDS,
        help=f"the first is not counted; {_ROUNDS}",
    )
    add("--scale", type=float, help="of all sizes; 1, or little without an accelerator")
    add("--json", type=Path, default=Path("gpu.json"), help="the report; gpu.json")
    add("--from", dest="from_", type=Path, metavar="FILE",
        help="write the page of what --json has written instead")  # fmt: skip
    add("--page", type=Path, default=PAGE, metavar="DIR", help=f"of the page; {PAGE}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
