"""The cases: who measures what, and the rows that are made of it.

A case is a generator that starts processes and yields lists of candidates, which take
turns, and a table of rows. A row compares a figure of one candidate with that of
another one, or with a limit. Everything is measured beside what could be reached: raw
sockets with as many connections and the same congestion control, copies in memory,
plain files, and the rivals in the best of their settings.
"""

from __future__ import annotations

import csv
import itertools
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, geometric_mean, mean, median
from typing import Any

import aiockpt
from benchmarks.lines import Line, bridged, distant, shaped
from benchmarks.measures import (
    BenchmarkError,
    Candidate,
    Cost,
    Sample,
    Samples,
    Turns,
    counted,
    efforts,
    take_turns,
)
from benchmarks.workers import HERE, Worker, all_cores_but_one

OTHER_TREE = "other tree: "
"""What the names of another source tree's candidates begin with."""

Phases = Generator[list[Candidate], None, None]

_MIB = 1 << 20
SOCKETS = aiockpt.Receive().connections
"""Connections of a receive, and of raw receivers."""
RENO = "reno"  # what the library asks for on the way to the same host
CHUNKS = (0, 4, 8)  # settings of torchft's num_chunks
_NICE = aiockpt.Server().nice  # of a server process
_IDLE = 0.5  # seconds
_UNTIL_COLD = 6.0  # seconds; a host is told of free pages every 2 s
_REST = 0.3  # seconds in which the disk and the host come to rest
_START = 3.0  # seconds in which a checkpoint process starts, as before a first save
_SLOW = 100_000  # tensors take torchft half a minute
_ALONE, _SERVED, _BOTH, _TURNS = 0.3, 0.5, 0.5, 3  # of training and serving
_PUBLISHED, _EVERY = 3, 0.8  # steps that followers get, and seconds between them
_STAR = (1, 2, 4, 8)  # receivers at once
_SPARES = 2  # processes that start at once
_FEW, _MANY = 4, 8  # processes that keep all cores busy
_FLEET, _PARTS = (10, 100, 1000), 5  # receivers of a small state, and their processes
_JOB = 4  # ranks that save
_TENSOR, _TALL = 16 << 20, 4096  # bytes of a tensor of 1024 columns, and its rows
_SMALL = 10_000  # tensors of 1 KiB
_RESHARDERS = ("DCP", "torch-checkpointing")
_EXPORTED, _FILES = 8, 4  # ranks that save, and files of the model
_RATE = 250.0  # Mbit/s of a sender of shards: two cores carry five of them
_PART, _SMALL_PART = 8, 128  # of the state: over these lines, and for followers
_CHUNK = 2 << 20  # bytes of a chunk over these lines: an eighth, as of the state
_REFRESH, _FOLLOWED = 0.2, 12.0  # seconds between two steps, and of following
_FOLLOWERS = 3
_HALF, _DEADLINE = 0.5, 2.0  # receives until a sender is killed, and in all
_FAR, _GIGABIT = 0.01, 1e9  # seconds each way to an object store, and bit/s
_SELECTED = 0.05  # of what is saved
_LOOPBACK = Line("127.0.0.1")
_ALONE_TOO = (("one", 1), ("new", 1))
_ONTO = {
    "FSDP": (("FSDP", 2), ("FSDP", 3), ("TP", 2), *_ALONE_TOO),
    "TPxFSDP": (("FSDP", 4), ("TP", 2), *_ALONE_TOO),
    "HSDP": (("FSDP", 2), ("FSDP", 3), *_ALONE_TOO),
}
"""The layout of the four ranks that save -> the layouts and ranks that load."""
_SENT_TO = {
    "FSDP": (("FSDP", 2), ("TP", 4), ("one", 1)),
    "TPxFSDP": (("FSDP", 4), ("FSDP", 2), ("one", 1)),
    "HSDP": (("TP", 4), ("FSDP", 2), ("one", 1)),
}
"""The layout of the four ranks that send -> the layouts and ranks that receive."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: What was measured.
        ours: The candidate.
        against: Another candidate, or a rival, whose best setting counts.
        metric: The figure of the samples.
        unit: Its unit.
        at_least: What the ratio, or the figure itself if it is compared with nothing,
            should reach.
        at_most: What it should not exceed.
    """

    what: str
    ours: str
    against: str = ""
    metric: str = "speed"
    unit: str = "GB/s"
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured by ``phases``, of a state dict of ``mib`` MiB.

    ``joined`` makes figures of several candidates into those of one.
    """

    about: str
    mib: int
    phases: Callable[[Setup], Phases]
    rows: Sequence[Row]
    joined: Callable[[Mapping[str, Samples]], dict[str, Samples]] = lambda _: {}


class Setup:
    """Processes of one source tree; ends them with its ``with`` block."""

    def __init__(self, tree: Path, nbytes: int, *, rivals: bool) -> None:
        self.tree, self.nbytes = tree, nbytes
        self.rivals = rivals
        self.chunks = CHUNKS if rivals and find_spec("torchft") else ()
        self.stack = ExitStack()

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @property
    def shape(self) -> dict[str, int]:
        """Tensors of 1 MiB, or one if there is less."""
        each = min(self.nbytes, _MIB) // 8 * 8
        return {"count": self.nbytes // each, "each": each}

    def worker(self, **options: Any) -> Worker:
        """Return a process that knows the shape."""
        worker = self.stack.enter_context(Worker(tree=self.tree, **options))
        worker.call("prepare", **self.shape)
        return worker


class Pair:
    """A sender and its receivers, and what most cases measure between them."""

    def __init__(self, setup: Setup, line: Line = _LOOPBACK, count: int = 1) -> None:
        self.setup, self._line = setup, line
        with line.near():
            self.sender = setup.worker()
        with line.far():
            self.receivers = [setup.worker(inside=line.inside) for _ in range(count)]
        self._shape, self.nbytes = setup.shape, setup.nbytes
        self._congestion = RENO if line is _LOOPBACK else None
        self._sources: dict[str, Any] = {}
        self._spares: list[Worker] = []

    def new_receiver(self) -> Worker:
        """Return a process that has received nothing, and knows the shape.

        Allocators keep memory that a process has used: its next receive would find it
        mapped. Some processes start together, while nothing is timed.
        """
        if not self._spares:
            for _ in range(_SPARES):
                with self._line.far():
                    spare = Worker(tree=self.setup.tree, inside=self._line.inside)
                self._spares.append(self.setup.stack.enter_context(spare))
            for each in self._spares:
                each.call("release")
        self._spares[-1].call("prepare", **self._shape, touched=False)
        return self._spares.pop()

    def join(self, by: str, receiver: Worker) -> None:
        """Give the sender and a receiver a new process group for a transport."""
        with tempfile.TemporaryDirectory() as directory:
            self.sender.begin("join", directory=directory, by=by, rank=0)
            receiver.call("join", directory=directory, by=by, rank=1)
            self.sender.finish()

    def offer(self, by: str, **options: Any) -> Any:
        """Return where the sender offers the state dict in this way."""
        key = repr((by, options))
        if key not in self._sources:
            options["host"] = self._line.address
            self._sources[key] = self.sender.call("offer", by=by, **options)
        return self._sources[key]

    def reshape(self, *, count: int, each: int) -> None:
        """Move a state dict of another shape from now on."""
        self._sources, self.nbytes = {}, count * each
        self._shape = {"count": count, "each": each}
        for end in (self.sender, *self.receivers):
            end.call("prepare", **self._shape)

    def received(
        self,
        by: str,
        source: Any,
        memory: Any = "touched",
        count: int = 1,
        **options: Any,
    ) -> Sample:
        """Have ``count`` receivers receive at once; return what it cost both ends.

        A receive into fresh memory has a new process.
        """
        grouped, receivers = by == "group", self.receivers[:count]
        with ExitStack() as stack:
            if memory not in ("touched", "as it is"):
                receivers = [stack.enter_context(self.new_receiver())]
                if grouped:
                    self.join(source, receivers[0])
            for each in receivers:
                each.call("ready", condition=memory)
            if grouped:
                self.sender.begin("send_to_group", by=source)
            else:
                self.sender.call("watch")
            for each in receivers:
                each.begin("receive", by=by, source=source, **options)
            costs: list[Cost] = [each.finish()[0] for each in receivers]
            theirs = self.sender.finish() if grouped else self.sender.call("watched")
        found = _sample(self.nbytes * options.get("at_once", 1), costs, theirs)
        return found | {"cpu ms, each": found["cpu"] * self.nbytes / 1e6}

    def ours(self, name: str, **options: Any) -> Candidate:
        """Return a receive by this library."""
        lent = {"same_host": True} if "same_host" in options else {}
        source = self.offer("aiockpt", **lent)
        run = partial(self.received, "aiockpt", source, **options)
        return Candidate(name, run, ours=True)

    def raw(self, name: str, *, system: bool = False, **options: Any) -> Candidate:
        """Return raw sockets, with our congestion control or with the system's."""
        source = self.offer("raw", congestion=None if system else self._congestion)
        run = partial(
            self.received, "raw", source, **({"connections": SOCKETS} | options)
        )
        return Candidate(name, run)

    def torchft(
        self, name: str = "torchft", *, system: bool = False, **options: Any
    ) -> list[Candidate]:
        """Return the settings of torchft, if it takes part."""
        offer = partial(
            self.offer, "torchft", congestion=None if system else self._congestion
        )

        def run(chunks: int) -> Callable[[], Sample]:
            return partial(
                self.received, "torchft", offer(num_chunks=chunks), **options
            )

        return [Candidate(setting(name, n), run(n), name) for n in self.setup.chunks]

    def sent(self, name: str, do: str, **options: Any) -> Candidate:
        """Return what the sender does alone."""

        def run() -> Sample:
            return _sample(self.nbytes, [self.sender.call(do, **options)])

        return Candidate(name, run, ours=do == "stage")


def setting(name: str, chunks: int) -> str:
    """Return the name of a setting of torchft."""
    return f"{name}, num_chunks={chunks}"


def _sample(nbytes: int, costs: Sequence[Cost], sender: Cost | None = None) -> Sample:
    """Return the figures of receives that ran at once."""
    began = min(cost["began"] for cost in costs)
    seconds = max(cost["began"] + cost["seconds"] for cost in costs) - began
    gigabytes = nbytes * len(costs) / 1e9
    found = {
        "seconds": seconds,
        "ms": 1e3 * seconds,
        "speed": gigabytes / seconds,
        "cpu": (sum(cost["cpu"] for cost in costs)) / gigabytes,
        "lag, receiving": 1e3 * max(cost["lag"] for cost in costs),
        **efforts(gigabytes, costs, "receiving"),
    }
    if sender is not None:
        found["cpu"] += sender["cpu"] / gigabytes
        found["lag, sending"] = 1e3 * sender["lag"]
        found |= efforts(gigabytes, [sender], "sending")
    return found


# ------------------------------------------------------ receives over loopback


def _http(setup: Setup) -> Phases:
    pair = Pair(setup)

    def idle() -> Sample:
        pair.sender.call("watch")
        mine: Cost = pair.receivers[0].call("idle", seconds=_IDLE)
        return _sample(setup.nbytes, [mine], pair.sender.call("watched"))

    raw = partial(pair.raw, kind="like ours", memory="warm")
    yield [
        Candidate("idle", idle),
        pair.ours("first", memory="warm"),
        raw("raw, first"),
        raw("raw, first, system's", system=True),
        raw("raw and digests, first", digest=True),
        *pair.torchft("torchft, first", memory="warm"),
        *pair.torchft("torchft, first, system's", system=True, memory="warm"),
    ]
    yield [
        pair.ours("in place", in_place=True),
        pair.raw("raw, in place"),
        pair.raw("raw and digests, in place", digest=True),
    ]
    yield [
        pair.sent("copy beside them", "copy", kind="touched"),
        pair.ours("shared", same_host=True),
        pair.ours("copied", same_host=True, in_place=True),
    ]
    yield [
        pair.sent("copy, fresh", "copy", kind="like ours"),
        pair.sent("copy, touched", "copy", kind="touched"),
        pair.sent("stage, new", "stage", used=False),
        pair.sent("stage, used", "stage", used=True),
    ]


def _tensors(setup: Setup) -> Phases:
    """Yield few large tensors, and many small ones."""
    pair = Pair(setup)
    for name, count, each in (
        ("large", 4, setup.nbytes // 4 // 8 * 8),
        ("10,000", 10_000, 4096),
        ("100,000", 100_000, 4096),
    ):
        pair.reshape(count=min(count, max(setup.nbytes // each, 1)), each=each)
        yield [
            pair.ours(f"{name}, fresh", memory="warm"),
            pair.ours(f"{name}, in place", in_place=True),
            pair.raw(f"{name}, raw, in place"),
            *(pair.torchft(f"{name}, torchft", memory="warm") if count < _SLOW else ()),
        ]


def _star(setup: Setup) -> Phases:
    pair = Pair(setup, count=max(_STAR))
    yield [
        each
        for count in _STAR
        for each in (
            pair.ours(f"{count} at once", count=count, in_place=True),
            pair.raw(f"raw, {count} at once", count=count),
            pair.raw(f"raw and digests, {count} at once", count=count, digest=True),
            *pair.torchft(f"torchft, {count} at once", count=count),
        )
    ]


def _fleet(setup: Setup) -> Phases:
    """Yield receives of a small state by many transports at once."""
    pair = Pair(setup, count=_PARTS)
    many: dict[str, Any] = {"count": _PARTS, "memory": "as it is"}
    raw: dict[str, Any] = {"connections": 1, "kind": "like ours", **many}
    for count in _FLEET:
        name, each = f"{count:,} receivers", count // _PARTS
        yield [
            pair.ours(name, at_once=each, **many),
            pair.raw(f"raw, {name}", at_once=each, **raw),
        ]


# ---------------------------------------------------------------- receives over lines


def _shaped(rate: str, setup: Setup) -> Phases:
    pair = Pair(setup, setup.stack.enter_context(shaped(rate)))
    raw = partial(pair.raw, kind="like ours", memory="warm")
    yield [
        pair.ours("fresh", memory="warm"),
        pair.ours("in place", in_place=True),
        pair.raw("raw, in place"),
        pair.raw("raw and digests, in place", digest=True),
        raw("raw, fresh"),
        raw("raw and digests, fresh", digest=True),
        *pair.torchft(memory="warm"),
    ]


def _lossy(setup: Setup) -> Phases:
    pair = Pair(setup, setup.stack.enter_context(distant(0.01, loss=0.01)))
    yield [
        pair.ours("in place", in_place=True),
        pair.raw("raw, in place"),
        *pair.torchft(),
    ]


def _cold(setup: Setup) -> Phases:
    """Yield receives into memory that the host has taken back."""
    pair = Pair(setup, setup.stack.enter_context(shaped("10gbit")))
    yield [
        pair.ours("fresh", memory=_UNTIL_COLD),
        pair.raw("raw, in place"),
        pair.raw("raw, huge pages", kind="huge", memory=_UNTIL_COLD),
        pair.raw("raw, small pages", kind="small", memory=_UNTIL_COLD),
        *pair.torchft(memory=_UNTIL_COLD)[:1],  # each waits for the host
    ]


def _delta(setup: Setup) -> Phases:
    """Yield receives of what has changed only."""
    pair = Pair(setup, setup.stack.enter_context(shaped("1gbit")))
    yield [
        pair.ours("all", in_place=True, memory="as it is"),
        *(
            pair.ours(name, in_place=True, memory="as it is", changed=share)
            for name, share in (("none", 0.0), ("some", 0.02), ("every", 1.0))
        ),
        pair.ours("some, fresh", memory="as it is", changed=0.02),
    ]


def _elements(rate: str, setup: Setup) -> Phases:
    """Yield refreshes of two receivers that hold the step before."""
    line = setup.stack.enter_context(shaped(rate))
    with line.near():
        sender = setup.worker()
    with line.far():
        both = [setup.worker(inside=line.inside) for _ in range(2)]
    source = sender.call("offer", by="aiockpt", host=line.address, base=True)
    sender.call("improve", changed=1.0)
    for each in both:
        each.call("refresh", source=source, have=False)

    def run(
        changed: float,
        *,
        have: bool = True,
        second: bool = False,
        how: str = "step",
    ) -> Sample:
        sent = sender.call("improve", changed=changed, how=how)
        receivers = both[::-1] if second else both
        if second:  # the sender has encoded everything for the first one
            receivers[1].call("refresh", source=source, have=True)
        sender.call("watch")
        cost, moved, pause = receivers[0].call("refresh", source=source, have=have)
        theirs = sender.call("watched")
        if not second:
            receivers[1].call("refresh", source=source, have=True)
        found = _sample(setup.nbytes, [cost], theirs)
        return found | {
            "share": 100 * moved / setup.nbytes,
            "cpu, receiver": cost["cpu"] / (setup.nbytes / 1e9),
            "pause": pause,
            "serving": sent["seconds"] + cost["seconds"] + pause / 1e3,
        }

    yield [
        Candidate("all", partial(run, 0.01, have=False), ours=True),
        Candidate("1 %", partial(run, 0.01), ours=True),
        Candidate("1 %, second", partial(run, 0.01, second=True), ours=True),
        Candidate("0.1 %", partial(run, 0.001), ours=True),
        Candidate("3 %", partial(run, 0.03), ours=True),
        Candidate("every", partial(run, 1.0), ours=True),
        Candidate("redrawn", partial(run, 0.01, how="redraw"), ours=True),
        Candidate("adapter", partial(run, 0.01, how="adapter"), ours=True),
    ]


def _base(setup: Setup) -> Phases:
    """Yield sends with and without a base, and the pause of a prepared step."""
    plain, keeping, receiver = (setup.worker() for _ in range(3))
    offer = {"by": "aiockpt", "host": "127.0.0.1"}
    plain.call("offer", **offer)
    source = keeping.call("offer", **offer, base=True)

    def send(sender: Worker) -> Sample:
        return _sample(setup.nbytes, [sender.call("improve", changed=0.01)])

    def pause(*, beside: bool) -> Sample:
        keeping.call("improve", changed=0.01)
        applied, _, copied = receiver.call("pause", source=source)
        return _sample(setup.nbytes, [copied if beside else applied])

    yield [
        Candidate("send", partial(send, plain), ours=True),
        Candidate("send, base", partial(send, keeping), ours=True),
        Candidate("apply", partial(pause, beside=False), ours=True),
        Candidate("copy", partial(pause, beside=True), ours=True),
    ]


# ---------------------------------------------------------------- beside other work


def _busy(setup: Setup) -> Phases:
    """Yield receives from a server process while other processes keep all cores busy.

    They share a session with both ends, so that a niceness counts.
    """
    pair, kind = Pair(setup), "benchmarks.training:Trainer"
    hogs = [setup.stack.enter_context(Worker(kind)) for _ in range(_MANY)]

    def run(count: int, **nice: int) -> Sample:
        source = pair.offer("aiockpt", process=True, **nice)
        busy = hogs[:count]

        def speed(began: float, ended: float) -> float:
            them = [each.call("trained", began=began, ended=ended) for each in busy]
            return sum((each["speed"] for each in them), 0.0)

        try:
            for each in busy:
                each.call("train")
            alone = time.monotonic()
            time.sleep(_ALONE)
            began = time.monotonic()
            found = pair.received("aiockpt", source, "as it is", in_place=True)
            ended = time.monotonic()
        finally:
            for each in busy:
                each.call("rest")
        others = 100 * speed(began, ended) / speed(alone, began)
        return found | {"others": others, "s/GiB": 2**30 / found["speed"] / 1e9}

    yield [
        Candidate("beside 4", partial(run, _FEW), "4", ours=True),
        Candidate("beside 8", partial(run, _MANY), "8", ours=True),
        Candidate("nice 0", partial(run, _FEW, nice=0), "nice", ours=True),
        Candidate("nice 10", partial(run, _FEW, nice=10), "nice", ours=True),
        Candidate("nice 19", partial(run, _FEW, nice=19), "nice", ours=True),
    ]


def _trainer(setup: Setup) -> Phases:
    """Yield everybody who serves beside a training loop, one after the other.

    Each has a session, as other jobs have. The receiver, which would be on another
    host, leaves one core alone.
    """
    apart: dict[str, Any] = {"own_session": True}
    trainer = setup.worker(**apart)
    elsewhere, nicest = setup.worker(**apart), setup.worker(**apart, nice=_NICE)
    receiver = setup.worker(**apart, cores=all_cores_but_one())

    def alone() -> float:
        trainer.call("train")
        began = time.monotonic()
        time.sleep(_ALONE)
        ended = time.monotonic()
        trainer.call("rest")
        speed: float = trainer.call("trained", began=began, ended=ended)["speed"]
        return speed

    def run(
        sender: Worker, by: str, offer: dict[str, Any], take: dict[str, Any]
    ) -> Sample:
        source = sender.call("offer", by=by, **offer)
        receive = partial(receiver.call, "receive", by=by, source=source, **take)
        try:
            receiver.call("ready", condition="touched")
            receive()  # connections and threads are no part of it
            idle: list[Cost] = receive(seconds=_SERVED)
            turns = []
            before = alone()
            for _ in range(_TURNS):
                trainer.call("train")
                costs: list[Cost] = receive(seconds=_BOTH)
                trainer.call("rest")
                window = {
                    "began": costs[0]["began"],
                    "ended": costs[-1]["began"] + costs[-1]["seconds"],
                }
                beside = trainer.call("trained", **window)
                after = alone()
                turns.append(((before + after) / 2, beside, costs))
                before = after
        finally:
            sender.call("retract")
        return trained(setup.nbytes, idle, turns)

    ours, sockets = {"in_place": True}, {"connections": SOCKETS}
    by, process = "aiockpt", {"process": True}
    reno, rival = {"congestion": RENO}, "torchft"
    yield [
        Candidate(
            "server process", partial(run, trainer, by, process, ours), ours=True
        ),
        Candidate("server in the loop", partial(run, trainer, by, {}, ours), ours=True),
        Candidate("unrelated, nice", partial(run, nicest, by, {}, ours)),
        Candidate("raw, nice", partial(run, nicest, "raw", reno, sockets)),
        Candidate("raw, not nice", partial(run, elsewhere, "raw", reno, sockets)),
        *(
            Candidate(
                setting(rival, number),
                partial(run, trainer, rival, {"num_chunks": number, **reno}, {}),
                rival,
            )
            for number in setup.chunks
        ),
    ]


def trained(
    nbytes: int,
    idle: Sequence[Cost],
    turns: Sequence[tuple[float, Mapping[str, float], Sequence[Cost]]],
) -> Sample:
    """Return the receives beside a training loop, and what they cost each other.

    Each turn is the loop's usual speed, its progress, and the receives meanwhile.
    """
    costs = [cost for _, _, them in turns for cost in them]
    shares = [1 - beside["speed"] / usual for usual, beside, _ in turns]
    served = [
        them[-1]["began"] + them[-1]["seconds"] - them[0]["began"]
        for _, _, them in turns
    ]
    lost = sum(share * seconds for share, seconds in zip(shares, served, strict=True))
    seconds = mean(cost["seconds"] for cost in costs)
    return {
        "seconds": seconds,
        "speed": nbytes / seconds / 1e9,
        "kept": 100 * mean(cost["seconds"] for cost in idle) / seconds,
        "lost": 100 * mean(shares),
        "waited": 100 * mean(beside["waited"] for _, beside, _ in turns),
        "stall": 1e3 * max(beside["stall"] for _, beside, _ in turns),
        "price": 1e3 * lost / (len(costs) * nbytes / 1e9),
    }


def _followers(setup: Setup) -> Phases:
    """Yield followers of a trainer whose server process publishes again and again."""
    trainer = setup.worker(own_session=True)
    followers = [setup.worker(own_session=True) for _ in range(4)]
    source = trainer.call("offer", by="aiockpt", process=True)

    def run(count: int, changed: float) -> Sample:
        step = trainer.call("step")
        trainer.call("train")
        began = time.monotonic()
        for each in followers[:count]:
            each.begin("follow", source=source, until=step + _PUBLISHED)
        steps = trainer.call("publish", times=_PUBLISHED, every=_EVERY, changed=changed)
        arrivals = [each.finish() for each in followers[:count]]
        ended = time.monotonic()
        trainer.call("rest")
        beside = trainer.call("trained", began=began, ended=ended)
        sent = {each["step"]: each["began"] for each in steps}
        came = [each for them in arrivals for each in them if each["step"] in sent]
        seconds = [each["usable"] - sent[each["step"]] for each in came]
        return {
            "seconds": median(seconds),
            "ms": 1e3 * median(seconds),
            "slowest": 1e3 * max(seconds),
            "send": 1e3 * median(each["published"] - each["began"] for each in steps),
            "stall": 1e3 * beside["stall"],
            "skipped": float(count * _PUBLISHED - len(came)),
            "MB": mean(each["nbytes"] for each in came) / 1e6,
        }

    yield [
        Candidate(name, partial(run, count, changed), ours=True)
        for name, count, changed in (
            ("1 follower", 1, 1.0),
            ("4 followers", 4, 1.0),
            ("4 followers, little changed", 4, 0.02),
        )
    ]


# ---------------------------------------------------------------- saving and groups


def _saver(setup: Setup) -> tuple[Worker, Callable[..., Candidate]]:
    """Return what makes candidates of a process that saves in a new directory."""
    place = tempfile.TemporaryDirectory(prefix="benchmarks-", dir=Path.cwd())
    saver = Worker("benchmarks.savers:Saver", setup.tree)
    setup.stack.enter_context(place)
    setup.stack.enter_context(saver)
    saver.call("prepare", **setup.shape, place=place.name, rest=_REST)

    def run(do: str, **arguments: Any) -> Sample:
        return saved(setup.nbytes, saver.call(do, **arguments))

    def make(name: str, do: str, rival: str = "", **arguments: Any) -> Candidate:
        ours = name.startswith("aiockpt")
        return Candidate(name, partial(run, do, **arguments), rival, ours=ours)

    return saver, make


def saved(nbytes: int, found: Sample) -> Sample:
    """Return the figures of a process that moved so many bytes alone."""
    seconds, gigabytes = found["seconds"], nbytes / 1e9
    staged = found.get("staged", seconds)
    spent = efforts(gigabytes, [found], "receiving")
    spent |= {"cpu": found["cpu"] / gigabytes} if "cpu" in found else {}
    return {
        "ms": 1e3 * seconds,
        "speed": gigabytes / seconds,
        "staged ms": 1e3 * staged,
        "staged speed": gigabytes / staged,
        **{of: found[of] for of in found if f"{of}, receiving" not in spent},
        **spent,
    }


def _saving(setup: Setup) -> Phases:
    saver, make = _saver(setup)
    yield [
        make("copy, touched", "copy", kind="touched"),
        make("raw, fsync", "write", how="raw, fsync"),
        make("aiockpt", "save", by="aiockpt"),
        make("copy, small pages", "copy", kind="small"),
        make("aiockpt, first", "save", by="aiockpt", first=_START),
    ]
    rivals = ("torch.save", "safetensors") if setup.rivals else ()
    yield [
        make("raw", "write", how="raw"),
        make("aiockpt, here", "write", how="aiockpt"),
        *(make(how, "write", how, how=how) for how in rivals),
    ]
    saver.call("keep")
    loaders = ("torch.load", "safetensors") if setup.rivals else ()
    yield [
        make("copy, fresh", "copy", kind="like ours"),
        make("aiockpt, load", "load", how="aiockpt"),
        make("aiockpt, mapped", "load", how="mapped"),
        make("aiockpt, one", "load", how="one"),
        *(make(f"{how}, load", "load", how, how=how) for how in loaders),
    ]


def _background(setup: Setup) -> Phases:
    """Yield saves beside training, ours and torch's."""
    from benchmarks.savers import TORCH_SAVERS

    _, make = _saver(setup)
    ours = ("aiockpt", "aiockpt, nice=0")
    rivals = TORCH_SAVERS if setup.rivals else {}
    yield [
        *(make(name, "save", by=name, beside=_ALONE) for name in ours),
        *(make(name, "save", name, by=name, beside=_ALONE) for name in rivals),
    ]


def _group(setup: Setup) -> Phases:
    """Yield transfers over a process group of gloo."""
    pair = Pair(setup)
    rivals = ["torch"] * setup.rivals + ["torchft"] * bool(setup.chunks)
    everyone = ["aiockpt", *rivals]

    def candidate(by: str, **how: Any) -> Candidate:
        name = f"{by}, {'in place' if how['in_place'] else 'fresh'}"
        run = partial(pair.received, "group", by, **how)
        return Candidate(name, run, "" if by == "aiockpt" else by, by == "aiockpt")

    yield [candidate(by, in_place=False, memory="warm") for by in everyone]
    for by in everyone:
        pair.join(by, pair.receivers[0])
    yield [
        *(candidate(by, in_place=True) for by in everyone),
        pair.raw("raw, in place"),
    ]


def _meshes(setup: Setup) -> Phases:
    """Yield loads on other meshes than those that saved; of rivals, too."""
    with _job(setup, _EXPORTED) as (exporting, place):
        ranks = exporting[:_JOB]
        tall = {"count": max(setup.nbytes // _TENSOR // 3 * 3, 3), "rows": _TALL}
        if setup.nbytes < 3 * _TENSOR:  # a trial
            tall["rows"] = 16
        for source, targets in _ONTO.items():
            failures = _saved_by_all(setup, ranks, source, place, tall)
            for target, world in targets:
                name = f"{source} to {target} {world}"
                shape = {"layout": target, **tall}
                yield from _loads(setup, ranks[:world], name, place, shape, failures)
            ranks[0].call("remove", place=place)
        yield from _exports(setup, exporting, place, tall)
        many = {"count": _SMALL if setup.nbytes >= 3 * _TENSOR else 30, "rows": 16}
        dcp = _RESHARDERS[:1]  # the other one needs minutes for so many
        failures = _saved_by_all(setup, ranks, "FSDP", place, many, dcp)
        name, shape = "small to FSDP 2", {"layout": "FSDP", **many}
        yield from _loads(setup, ranks[:2], name, place, shape, failures, dcp)


def _saved_by_all(
    setup: Setup,
    ranks: Sequence[Worker],
    layout: str,
    place: str,
    shape: dict[str, int],
    rivals: Sequence[str] = _RESHARDERS,
) -> dict[str, str]:
    """Save the state of a job by everybody; return why a rival could not."""
    _run_all(ranks, layout=layout, **shape)
    _together(ranks, "save", by="aiockpt", place=place)
    failures = {}
    for rival in rivals if setup.rivals else ():
        try:
            _together(ranks, "save", by=rival, place=place)
        except BenchmarkError as error:
            failures[rival] = str(error)
    _together(ranks, "leave")
    return failures


def _loads(
    setup: Setup,
    ranks: Sequence[Worker],
    name: str,
    place: str,
    shape: Mapping[str, Any],
    failures: Mapping[str, str],
    rivals: Sequence[str] = _RESHARDERS,
) -> Phases:
    """Yield the loads of one job on another mesh."""
    _run_all(ranks, **shape)

    def run(by: str) -> Sample:
        if by in failures:
            raise BenchmarkError(failures[by])
        found = _together(ranks, "load", by=by, place=place)
        total = {of: sum(each[of] for each in found) for of in found[0]}
        for of in ("seconds", "peak MiB"):
            total[of] = max(each[of] for each in found)
        if needed := total.pop("needed", 0):
            total["read"] /= needed
        return saved(_nbytes(shape), total)

    able = [each for each in rivals if _takes(each, shape["layout"])]
    yield [
        Candidate(name, partial(run, "aiockpt"), ours=True),
        Candidate(f"{name}, unverified", partial(run, "unverified"), ours=True),
        *(
            Candidate(f"{name}, {rival}", partial(run, rival), rival)
            for rival in (able if setup.rivals else ())
        ),
    ]
    _together(ranks, "leave")


def mean_of_cells(samples: Mapping[str, Samples]) -> dict[str, Samples]:
    """Return the geometric means of the speeds of all cells in which all rivals load.

    In each cell, the rival counts that is faster there.
    """
    ours = ("", ", unverified")
    cells: dict[str, list[Samples]] = {"mean": [], "mean, better rival": []}
    cells["mean, unverified"] = []
    for name in samples:
        rivals = [samples.get(f"{name}, {rival}", []) for rival in _RESHARDERS]
        if all(map(counted, rivals)):
            for kind in ours:
                cells[f"mean{kind}"].append(samples[name + kind])
            cells["mean, better rival"].append(max(rivals, key=_typical_speed))
    return {
        name: [
            {
                "seconds": fmean(each["seconds"] for each in turn if each),
                "speed": geometric_mean(each["speed"] for each in turn if each),
            }
            if all(turn)
            else None
            for turn in zip(*them, strict=True)
        ]
        for name, them in cells.items()
        if them
    }


def _typical_speed(samples: Samples) -> float:
    return median(each["speed"] for each in counted(samples))


def _takes(rival: str, layout: str) -> bool:
    """Return whether a rival loads onto a layout; one needs a template."""
    return rival == "DCP" or layout != "new"


def _nbytes(shape: Mapping[str, int]) -> int:
    return shape["count"] * shape["rows"] * min(shape["rows"], 1024) * 4


def _exports(
    setup: Setup, ranks: Sequence[Worker], place: str, shape: Mapping[str, int]
) -> Phases:
    """Yield files for Hugging Face, made of the files of all ranks."""
    shape = {**shape, "count": max(shape["count"] * 2 // 9 * 3, 3)}
    _run_all(ranks, layout="FSDP", **shape)
    for by in ("aiockpt", *["safetensors"] * setup.rivals):
        _together(ranks, "save", by=by, place=place)
    _together(ranks, "leave")
    _run_all(ranks[:1], layout="new", **shape)
    each = -(-_nbytes(shape) // _FILES)

    def run(by: str) -> Sample:
        found = ranks[0].call("export", by=by, place=place, shard_bytes=each)
        return saved(_nbytes(shape), {"s": found["seconds"], **found})

    yield [
        Candidate("convert", partial(run, "aiockpt"), ours=True),
        *[Candidate("DCP", partial(run, "DCP"), "DCP")] * setup.rivals,
    ]
    _together(ranks, "leave")
    ranks[0].call("remove", place=place)


@contextmanager
def _job(setup: Setup, count: int) -> Iterator[tuple[list[Worker], str]]:
    """Give the processes of ranks, and a directory that is removed in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-", dir=Path.cwd()) as place,
        ExitStack() as stack,
    ):
        yield (
            [
                stack.enter_context(Worker("benchmarks.meshes:Rank", setup.tree))
                for _ in range(count)
            ],
            place,
        )


def _run_all(ranks: Sequence[Worker], address: str = "", /, **shape: Any) -> None:
    """Start a job of some processes, which has a state; one alone is none.

    Its first rank has an address in a namespace, if it is in one.
    """
    if len(ranks) > 1:
        how: dict[str, Any] = {"world": len(ranks)}
        if address:
            how |= {"address": address, "interface": "eth0"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank, each in enumerate(ranks):
            each.begin("join", port=port, rank=rank, **how)
        for each in ranks:
            each.finish()
    _together(ranks, "prepare", **shape)


def _together(ranks: Sequence[Worker], do: str, **arguments: Any) -> list[Any]:
    """Run a command in several processes at once; return their results.

    Raises:
        BenchmarkError: one could not; all have ended it.
    """
    for each in ranks:
        each.begin(do, **arguments)
    found, failures = [], []
    for each in ranks:
        try:
            found.append(each.finish())
        except BenchmarkError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return found


# ---------------------------------------------------------------- senders of shards


def _shards(setup: Setup) -> Phases:
    """Yield receives from several senders, each of which has shards only."""
    with _job(setup, 2 * _JOB) as (ranks, place):
        senders, receivers = ranks[:_JOB], ranks[_JOB:]
        for source, targets in _SENT_TO.items():
            # Eight processes hold up to nine times the state.
            tall = _tall(setup.nbytes // (1 if source == "FSDP" else 2))
            _run_all(senders, layout=source, **tall)
            for target, world in targets:
                _run_all(receivers[:world], layout=target, **tall)
                name = f"{source} to {target} {world}"
                yield _received(setup, name, tall, senders, receivers[:world], place)
                _together(receivers[:world], "leave")
            _together(senders, "leave")
            ranks[0].call("remove", place=place)
        yield _followed(setup, senders, receivers[:1], receivers[1:])
    yield from _shards_over_lines(setup)


def _tall(nbytes: int) -> dict[str, Any]:
    """Return the shape of so many bytes in tall tensors; of few ones for a trial."""
    if nbytes < 3 * _TENSOR:
        return {"count": 3, "rows": 16}
    return {"count": nbytes // _TENSOR // 3 * 3, "rows": _TALL}


def _received(
    setup: Setup,
    name: str,
    shape: Mapping[str, int],
    senders: Sequence[Worker],
    receivers: Sequence[Worker],
    place: str,
) -> list[Candidate]:
    """Return a send and a receive of all ranks, and what DCP does instead."""

    def ours() -> Sample:
        before = _together(senders, "sent")
        began = time.monotonic()
        offers = _together(senders, "offer", host=_LOOPBACK.address)
        source = [metadata for metadata, _ in offers]
        _together(receivers, "receive", source=source)
        seconds = time.monotonic() - began
        now = _together(senders, "sent")
        sent = [after - then for after, then in zip(now, before, strict=True)]
        return {
            "seconds": seconds,
            "s": seconds,
            "sent": sum(sent) / _nbytes(shape),
            "largest": 100 * max(sent) / sum(sent),
            "smallest": 100 * min(sent) / sum(sent),
        }

    def rivals() -> Sample:
        began = time.monotonic()
        _together(senders, "save", by="DCP", place=place)
        _together(receivers, "load", by="DCP", place=place)
        seconds = time.monotonic() - began
        return {"seconds": seconds, "s": seconds}

    return [
        Candidate(name, ours, ours=True),
        *[Candidate(f"{name}, DCP", rivals, "DCP")] * setup.rivals,
    ]


def _shards_over_lines(setup: Setup) -> Phases:
    """Yield receives whose senders have equal lines, some of which are killed."""
    rates = [_RATE] * (_JOB + 1) + [_JOB * _RATE] + [_RATE] * _JOB
    shape = _tall(setup.nbytes // _PART)
    equal_parts = 3 * _JOB  # so that each receiver of a part gets as many tensors
    shape["count"] = max(shape["count"] // equal_parts, 1) * equal_parts
    with bridged(rates) as lines, ExitStack() as stack:

        def start(line: Line) -> Worker:
            worker = Worker("benchmarks.meshes:Rank", setup.tree, inside=line.inside)
            return stack.enter_context(worker)

        everybody = [start(line) for line in lines]
        senders, alone = everybody[:_JOB], everybody[_JOB : _JOB + 1]
        wide, narrow = everybody[_JOB + 1 : _JOB + 2], everybody[_JOB + 2 :]
        at_first = lines[0].address if lines[0].inside else ""
        _run_all(senders, at_first, layout="FSDP", **shape)
        for each in (*alone, *wide, *narrow):
            each.call("prepare", layout="one", **shape)

        def offered(ranks: Sequence[Worker], first: int, **how: bool) -> list[str]:
            for each, line in zip(ranks, lines[first:], strict=False):
                each.begin("offer", host=line.address, chunk_bytes=_CHUNK, **how)
            return [each.finish()[0] for each in ranks]

        sources = {"4 senders": offered(senders, 0), "1 sender": offered(alone, _JOB)}

        def run(source: str, receivers: Sequence[Worker]) -> Sample:
            for part, each in enumerate(receivers):
                parts = len(receivers)
                how = {"part": part, "parts": parts, "connections": _JOB}
                each.begin("receive", source=sources[source], **how)
            costs: list[Cost] = [each.finish() for each in receivers]
            began = min(cost["began"] for cost in costs)
            seconds = max(cost["began"] + cost["seconds"] for cost in costs) - began
            return {"seconds": seconds, "s": seconds}

        def gathered() -> Sample:
            began = time.monotonic()
            source = offered(senders, 0, gathered=True)[:1]
            wide[0].call("receive", source=source, connections=_JOB)
            seconds = time.monotonic() - began
            sources["4 senders"] = offered(senders, 0)
            return {"seconds": seconds, "s": seconds}

        yield [
            *(
                Candidate(f"{source}, {name}", partial(run, source, them), ours=True)
                for source in sources
                for name, them in (("1 receiver", wide), ("4 receivers", narrow))
            ),
            Candidate("gathered and sent", gathered),
        ]
        _together(senders, "leave")
        for layout in ("FSDP", "HSDP"):
            yield _killed(layout, shape, lines, start, senders, wide[0])
            _together(senders, "leave")


def _killed(
    layout: str,
    shape: Mapping[str, int],
    lines: Sequence[Line],
    start: Callable[[Line], Worker],
    senders: list[Worker],
    receiver: Worker,
) -> list[Candidate]:
    """Return receives during which one of four senders is killed, and replaced."""
    usual: list[float] = []

    def offered(rank: int) -> str:
        """Have a sender publish, whose ranks need not talk to one another."""
        senders[rank].call("join", port=0, rank=rank, world=_JOB)
        senders[rank].call("prepare", layout=layout, **shape)
        how = {"host": lines[rank].address, "chunk_bytes": _CHUNK}
        source: str = senders[rank].call("offer", **how)[0]
        return source

    sources = [offered(rank) for rank in range(_JOB)]

    def undisturbed() -> Sample:
        how = {"source": sources, "connections": _JOB}
        seconds = receiver.call("receive", **how)["seconds"]
        usual.append(seconds)
        return {"seconds": seconds, "s": seconds}

    def killed() -> Sample:
        half, how = _HALF * usual[-1], dict[str, Any](connections=_JOB)
        if layout == "FSDP":
            how |= {"timeout": _DEADLINE * usual[-1], "failing": lines[1].address}
        receiver.begin("receive", source=sources, **how)
        time.sleep(half)
        senders[1].kill()
        found = receiver.finish()
        senders[1] = start(lines[1])
        sources[1] = offered(1)
        return {**found, "s": found["seconds"]}

    return [
        Candidate(f"{layout}, undisturbed", undisturbed, ours=True),
        Candidate(f"{layout}, one killed", killed, ours=True),
    ]


def _followed(
    setup: Setup,
    senders: Sequence[Worker],
    alone: Sequence[Worker],
    followers: Sequence[Worker],
) -> list[Candidate]:
    """Return followers of four senders, and of one that has everything."""
    shape = _tall(0)
    if (nbytes := setup.nbytes // _SMALL_PART) >= 3 * _MIB:
        shape = {"count": nbytes // _MIB // 3 * 3, "rows": 256}
    _run_all(senders, layout="FSDP", **shape)
    for each in (*alone, *followers):
        each.call("prepare", layout="one", **shape)
    times, numbers = max(round(_FOLLOWED / _REFRESH), 1), itertools.count(1)

    def candidate(name: str, sending: Sequence[Worker]) -> Candidate:
        offers = _together(sending, "offer", host=_LOOPBACK.address, step=0)
        source = [metadata for metadata, _ in offers]

        def run() -> Sample:
            first = next(numbers) * times
            how: dict[str, Any] = {"source": source, "after": first - 1}
            for each in followers:
                each.begin("follow", seconds=_FOLLOWED, **how)
            how = {"first": first, "times": times, "every": _REFRESH}
            sends = _together(sending, "publish", **how)
            found: list[Sample] = [each.finish() for each in followers]
            return {
                "seconds": mean(sends),
                "steps": mean(each["steps"] for each in found),
                "torn": sum(each["torn"] for each in found),
            }

        return Candidate(name, run, ours=True)

    return [
        candidate("followers of 4 senders", senders),
        candidate("followers of 1 sender", alone),
    ]


# -------------------------------------------------------------------- object stores


def _objects(setup: Setup) -> Phases:
    """Yield saves to an object store behind a line, and loads from it."""
    from benchmarks.objects import RIVAL, object_store

    line = setup.stack.enter_context(distant(_FAR, rate=f"{_GIGABIT:.0f}bit"))
    setup.stack.enter_context(object_store(line))
    place = tempfile.TemporaryDirectory(prefix="benchmarks-", dir=Path.cwd())
    setup.stack.enter_context(place)
    with line.far():
        saver = Worker("benchmarks.objects:Objects", setup.tree, inside=line.inside)
    setup.stack.enter_context(saver)
    saver.call("prepare", **setup.shape, place=place.name)
    numbers = itertools.count()

    def save(by: str) -> Sample:
        # A new bucket, because the space of old ones is free at once.
        bucket = f"bucket-{next(numbers)}"
        saver.call("make", bucket=bucket)
        found = _over_line(setup.nbytes, saver.call("save", by=by, bucket=bucket))
        saver.call("remove", bucket=bucket)
        return found

    ours = ("aiockpt", "aiockpt, local")
    yield [
        *(Candidate(by, partial(save, by), ours=True) for by in ours),
        *(Candidate(by, partial(save, by)) for by in ("memory", "disk and upload")),
        *[Candidate(RIVAL, partial(save, RIVAL), RIVAL)] * setup.rivals,
    ]
    saver.call("make", bucket="kept")
    saver.call("save", by="aiockpt", bucket="kept")
    select = partial(saver.call, "select", bucket="kept", share=_SELECTED)
    yield [Candidate("select", select, ours=True)]
    saver.call("release")
    yield from _loads_of_objects(setup, line)


def _loads_of_objects(setup: Setup, line: Line) -> Phases:
    """Yield loads by two ranks of what four ranks have saved to an object store."""
    with ExitStack() as stack:
        with line.far():
            ranks = [
                stack.enter_context(Worker("benchmarks.meshes:Rank", setup.tree))
                for _ in range(_JOB)
            ]
        place, tall = "s3://kept/meshes", _tall(setup.nbytes) | {"noisy": True}
        failures = _saved_by_all(setup, ranks, "FSDP", place, tall, _RESHARDERS[:1])
        how = (place, {"layout": "FSDP", **tall}, failures, _RESHARDERS[:1])
        for loads in _loads(setup, ranks[:2], "2 ranks", *how):
            yield [
                replace(each, run=partial(_loaded_over_line, _nbytes(tall), each.run))
                for each in loads
            ]


def _loaded_over_line(nbytes: int, run: Callable[[], Sample]) -> Sample:
    return _over_line(nbytes, run())


def _over_line(nbytes: int, found: Sample) -> Sample:
    """Return figures of so many bytes, beside what the line needs for them."""
    seconds = found["seconds"]
    needed = 8 * nbytes / _GIGABIT
    return {**saved(nbytes, found), "s": seconds, "line": seconds / needed}


# ---------------------------------------------------------------- the table of cases


def _rows() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    with Path(__file__).with_name("rows.csv").open(newline="") as table:
        for line in csv.DictReader(table):
            case, target = line.pop("case"), line.pop("target")
            sign, _, limit = target.partition(" ")
            limits = [float(limit) if sign == side else None for side in (">=", "<=")]
            row = Row(**line, at_least=limits[0], at_most=limits[1])
            found.setdefault(case, []).append(row)
    return found


ROWS: Mapping[str, Sequence[Row]] = _rows()
"""The rows of each case, and of those of `benchmarks.gpu`."""

CASES: Mapping[str, Case] = {
    name: Case(about, mib, phases, ROWS[name], *joined)
    for name, mib, phases, about, *joined in (
        ("http", 1024, _http, "receives over loopback, staging, memory of one host"),
        ("tensors", 512, _tensors, "few large tensors, and many small ones"),
        ("star", 256, _star, "one to eight receivers of one sender at once"),
        ("fleet", 1, _fleet, "10 to 1,000 receivers of a small state at once"),
        ("10g", 512, partial(_shaped, "10gbit"), "receives over 10 Gb/s; as root"),
        ("25g", 512, partial(_shaped, "25gbit"), "receives over 25 Gb/s; as root"),
        ("lossy", 32, _lossy, "receives over 20 ms and 1 % loss; as root"),
        ("cold", 512, _cold, "over 10 Gb/s into memory that the host took; as root"),
        ("delta", 512, _delta, "of what has changed, over 1 Gb/s; as root"),
        ("elements-1g", 1024, partial(_elements, "1gbit"), "deltas, 1 Gb/s; as root"),
        ("elements-10g", 2048, partial(_elements, "10gbit"), "10 Gb/s; as root"),
        ("base", 1024, _base, "sends that keep a base, and the pause of an engine"),
        ("busy", 1024, _busy, "a server process beside 4 and 8 busy processes"),
        ("trainer", 256, _trainer, "what serving costs a training loop"),
        ("followers", 256, _followers, "followers of a trainer that publishes"),
        ("saving", 512, _saving, "saves and loads below the working directory"),
        (
            *("meshes", 3072, _meshes, "loads on other meshes than those that saved"),
            mean_of_cells,
        ),
        ("shards", 2048, _shards, "receives from four senders of shards; as root"),
        ("objects", 1024, _objects, "an object store over 1 Gb/s, 20 ms; as root"),
        ("background", 128, _background, "saves beside training, ours and torch's"),
        ("pg", 512, _group, "transfers over a process group of gloo"),
    )
}


def measure(
    case: Case,
    *,
    nbytes: int,
    rounds: int,
    rivals: bool,
    against: Path | None,
    note: Callable[[str], object],
) -> Turns:
    """Return the samples of a case by candidate, and which rivals have failed.

    With another source tree, its processes run beside ours, and its candidates take
    turns with ours; their names begin with `OTHER_TREE`.

    Raises:
        BenchmarkError: a process could not do what it was asked, or the machine cannot.
    """
    samples: dict[str, Samples] = {}
    failures: dict[str, str] = {}
    trees = [HERE] if against is None else [HERE, against]
    with ExitStack() as stack:
        setups = [
            stack.enter_context(Setup(tree, nbytes, rivals=rivals)) for tree in trees
        ]
        for ours, *others in zip(*map(case.phases, setups), strict=True):
            named = [
                replace(each, name=OTHER_TREE + each.name)
                for other in others
                for each in other
                if each.ours
            ]
            turns = take_turns([*ours, *named], rounds, note)
            samples |= turns.samples
            failures |= turns.failures
    return Turns(samples | case.joined(samples), failures)
