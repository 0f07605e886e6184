"""Hostile headers, trees and header fields, made of good ones by a seeded chance.

``mutations.py --inputs N --seed S`` hands N of them to a receiver's own decoders, under
a guard of what Python executes, and prints what became of them and how long it took.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from aiockpt import Limits, make_token
from aiockpt.errors import AiockptError
from aiockpt.format.header import decode_header
from aiockpt.format.manifest import Manifest
from aiockpt.http import problems
from aiockpt.http import protocol as http
from aiockpt.http.protocol import parse_address
from aiockpt.http.tokens import read_token
from aiockpt.state.rebuild import Frame, assemble, tensors_over
from aiockpt.testing.leaves import LEAVES
from tests.support.auditing import Guard
from tests.support.headers import header_of, parts_of, sealed
from tests.support.states import file_of, stager

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = Limits(max_bytes=1 << 20, max_header_bytes=1 << 20, max_nodes=100_000)

NAMES = ("os.system", "builtins.eval", "posix.system", "subprocess.Popen", "this")
TAGS = (
    *("list", "tuple", "dict", "odict", "defaultdict", "deque", "set", "frozenset"),
    *("tensor", "tensors", "blob", "ext", "bytes", "int", "float", "complex", "pickle"),
    *("torch.dtype", "torch.device", "torch.Size"),
    *("numpy.ndarray", "numpy.scalar", "range", "Counter"),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 64, 65, 1 << 16, 1 << 31, 1 << 32, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, -0.0, 1e308),
    *(msgspec.Raw(b"18446744073709551616"), msgspec.Raw(b"1" + b"0" * 30)),
    *("", "\0", "é", "\u2028", "../../etc/passwd", "F32", "float32", "U8", "|O", "<f8"),
    *([], {}, [[]], [0], ["list", []], ["tensor", 0], ["blob", 0], ["pickle", "gAR9"]),
    ["ext", "pickle", ["blob", 0]],
    ["ext", "pickle", ["bytes", "gASVAAAAAAAAAIwFcG9zaXiUjAZzeXN0ZW2Uk5Qu"]],
    *(["ext", name, "true"] for name in NAMES),
    *(
        ["ext", "numpy.ndarray", ["tuple", [code, ["tuple", [1]], ["bytes", "AA=="]]]]
        for code in ("|O", "<f8", "|V1", "|S1", "O8")
    ),
)
FIELDS = (
    *("bytes=0-9", "bytes=-5", "bytes=7-", "bytes 0-9/100", "bytes */100", "items=0-1"),
    *('"abc"', 'W/"abc", "d"', "*", "wait=5", 'wait="1.5"; x, respond-async', "120"),
    *("http://h:1/checkpoint/#token", "https://[fe80::1%25eth0]:1/a/7/full", "7"),
    "http://h:1/checkpoint/#token|http://h:2/checkpoint/#other|https://[::1]:3/",
    "xxh3-128=" + "ab" * 16,
    make_token("secret", "rank-3", step=7, expires=1e9),
)
PARSERS: tuple[Callable[[str], object], ...] = (
    lambda text: http.parse_range(text, 1000),
    lambda text: http.parse_range(text, 0),
    http.parse_content_range,
    http.parse_prefer_wait,
    http.parse_etag,
    http.parse_digest,
    problems.parse_retry_after,
    http.parse_metadata,
    http.parse_joined,
    parse_address,
    lambda text: http.parse_resource(text, text),
    lambda text: read_token(text, "secret"),
    lambda text: http.if_match(text, "abc"),
    lambda text: http.if_none_match(text, "abc"),
    lambda text: http.if_range(text, "abc"),
    lambda text: problems.from_problem(
        404, {}, text.encode("utf-8", "replace"), url="u"
    ),
)


def small_files() -> list[bytes]:
    """Return whole checkpoints of every kind of leaf, as a sender stages them."""

    async def stage() -> list[bytes]:
        files = []
        async with stager() as stage:
            for make in LEAVES.values():
                snapshot = await stage.stage({"leaf": make(), "n": 1}, step=7)
                files.append(file_of(snapshot))
                snapshot.release()
        return files

    torch.manual_seed(0)
    return [file for file in asyncio.run(stage()) if len(file) < 1 << 16]


def split(file: bytes) -> tuple[bytes, bytes]:
    """Return a file's header and its data segment."""
    start = 8 + int.from_bytes(file[:8], "little")
    return file[:start], file[start:]


class Mutator:
    """Makes one hostile input after the other, the same ones for the same seed."""

    def __init__(self, seed: int, files: list[bytes]) -> None:
        self.random = random.Random(seed)
        self._multiply = True
        self._files = [split(file) for file in files]
        self._parts = [msgspec.json.encode(parts_of(each)) for each, _ in self._files]

    def file(self) -> tuple[bytes, bytes]:
        """Return a header, of which most have the right snapshot id, and a segment."""
        self._multiply = True
        which = self.random.randrange(len(self._files))
        return self._header(which), self._files[which][1]

    def _header(self, which: int) -> bytes:
        if self.random.random() < 0.25:
            return self._bytes(self._files[which][0])
        manifest, entries = msgspec.json.decode(self._parts[which])
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            part = self.random.choice(("manifest", "tree", "tree", "entries"))
            if part == "tree":
                manifest["tree"] = self.changed(manifest.get("tree"))
            elif part == "manifest":
                manifest = self.changed(manifest)
            else:
                entries = self.changed(entries)
            if not isinstance(manifest, dict) or not isinstance(entries, dict):
                break
        return header_of(manifest, entries)

    def field(self) -> str:
        """Return the value of a header field, or a piece of a URL."""
        text = list(self.random.choice(FIELDS))
        for _ in range(self.random.randint(0, 3)):
            at = self.random.randrange(len(text) + 1)
            text[at : at + self.random.randint(0, 2)] = self._letters()
        return "".join(text)

    def changed(self, node: Any) -> Any:
        """Return a JSON value with a change somewhere in it."""
        chance = self.random
        if not isinstance(node, list | dict) or not node or chance.random() < 0.1:
            return self._other(node)
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        roll = chance.random()
        if roll < 0.06:
            del node[key]
        elif roll < 0.12 and isinstance(node, list):
            node.insert(key, copy.deepcopy(chance.choice([*node, self._odd()])))
        else:
            node[key] = self.changed(node[key])
        return node

    def _other(self, node: Any) -> Any:
        chance = self.random
        match chance.randrange(6):
            case 0 if isinstance(node, int):
                return node + chance.choice((-1, 1, 64, -64, 1 << 40))
            case 1 if isinstance(node, str):
                return chance.choice(TAGS)
            case 2:
                return [chance.choice(TAGS), node]
            case 3:
                return [chance.choice(TAGS), self._odd(), self._odd()]
            case 4 if self._multiply and chance.random() < 0.05:
                self._multiply = False  # once for each input, or it is never sent
                return [[node] * 30] * 30
            case _:
                return self._odd()

    def _odd(self) -> Any:
        return copy.deepcopy(self.random.choice(ODD))

    def _bytes(self, header: bytes) -> bytes:
        chance = self.random
        raw = bytearray(header)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(raw))
            match chance.randrange(5):
                case 0:
                    raw[at] ^= 1 << chance.randrange(8)
                case 1:
                    del raw[at : at + chance.randint(1, 40)]
                case 2:
                    raw[at:at] = raw[at : at + chance.randint(1, 40)]
                case 3:
                    raw[at:at] = chance.choice(
                        (b'"', b"[", b"}", b"\\u0000", b"9" * 20)
                    )
                case 4:
                    raw[at:] = chance.choice(self._files)[0][at:]
            raw = raw or bytearray(8)
        return sealed(bytes(raw[8:])) if chance.random() < 0.6 else bytes(raw)

    def _letters(self) -> str:
        chance = self.random
        some = '0123456789-=,*/"\\ \t\0é;W%#@:[]&\u2028\udc80' + "9" * 3
        return chance.choice(some) * chance.choice((1, 1, 1, 2, 30))


def receive(header: bytes, segment: bytes) -> str:
    """Do with a header what a receiver does once it has the bytes; say what came."""
    try:
        manifest = decode_header(header, limits=LIMITS)
        if not isinstance(manifest, Manifest):
            return "another tool's file"
        nbytes = manifest.segment_bytes
        memory = memoryview(bytearray(segment[:nbytes].ljust(nbytes, b"\0")))
        assemble(Frame.of(manifest), tensors_over(manifest, memory), limits=LIMITS)
    except AiockptError as error:
        return type(error).__name__
    return "accepted"


def parse(text: str) -> str:
    """Hand a text to all parsers of header fields; say how many took it."""
    taken = 0
    for parser in PARSERS:
        with suppress(AiockptError):
            taken += parser(text) is not None
    return f"taken by {taken} parsers"


@dataclass
class Report:
    """What became of the inputs."""

    seed: int
    inputs: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    executed: list[str] = field(default_factory=list)
    grown_mib: float = 0.0

    def __str__(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def run(inputs: int, seed: int, *, fields: float = 0.2) -> Report:
    """Hand over that many inputs; what is no typed error escapes, with its input."""
    files = small_files()
    mutator = Mutator(seed, files)
    for file in files:  # imports and caches come before the guard
        assert receive(*split(file)) == "accepted", file
    for text in FIELDS:
        parse(text)
    report = Report(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    with Guard() as guard:
        for report.inputs in range(1, inputs + 1):
            _one(mutator, report, fields)
    report.seconds = round(time.perf_counter() - started, 3)
    report.executed = guard.events
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    report.grown_mib = grown / 1024
    return report


def _one(mutator: Mutator, report: Report, fields: float) -> None:
    plain = mutator.random.random() < fields
    given: tuple[Any, ...] = (mutator.field(),) if plain else mutator.file()
    hand: Callable[..., str] = parse if plain else receive
    started = time.perf_counter()
    try:
        report.outcomes[hand(*given)] += 1
    except Exception as error:
        error.add_note(f"seed {report.seed}, input {report.inputs}: {given!r}")
        raise
    report.slowest = max(report.slowest, time.perf_counter() - started)


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    report = run(options.inputs, options.seed)
    print(report)
    return 1 if report.executed else 0


if __name__ == "__main__":
    sys.exit(main())
