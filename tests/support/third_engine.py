"""Runs the matcher beside the engine that plans whole receives, and compares both.

`beside` wraps that engine. Whatever plan or error it comes to, the matcher gets the
same inputs. Its answer must be the same: the type and the place of an error, and the
memory that bytes go to straight. `MEANT` lists the differences that are decided. The
old engine's own answers stay what they are, so a test that uses them sees nothing of
this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from aiockpt.errors import AiockptError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.memory.copies import Backings
from aiockpt.state.catalogue import Catalogue
from aiockpt.state.flatten import wanted
from aiockpt.state.match import RECEIVE, Matched, match
from aiockpt.state.template import Match, Template

MEANT: dict[str, str] = {
    r"(\w+ \[[\d, ]*\]) stride .* template has \1 ": "elements are copied",
    r"memory shared with another tensor, the template has its own": "so are tied ones",
    r"the template has None": "None takes any value",
    r"a value in the memory of a tensor": "a leaf is made of copies",
    r"a DTensor .*, the template has no distributed tensor": "so it does",
    r"has a value of type (int|float).* has a value of type (int|float)$": (
        "a number is a number"
    ),
}
"""Errors of the old engine, by their texts, that the matcher does not raise."""


STRICTER: dict[str, str] = {
    r"the checkpoint has other keys": "found out in the end today",
    r"has (None|an? [^;]*), the template has an? [^;]*$": "kinds are compared",
}
"""Errors that only the matcher raises, in a receive, by their texts."""


class Answer(NamedTuple):
    """An answer to compare: an error and its place, or a plan."""

    error: str = ""
    place: str = ""
    missing: Sequence[str] = ()
    straight: Sequence[tuple[int, int, int, int]] = ()
    text: str = ""

    @classmethod
    def of_error(cls, error: AiockptError) -> Answer:
        """Return what an error says."""
        place = getattr(error, "keys", None) or getattr(error, "path", "")
        return cls(type(error).__name__, dotted(str(place)), text=str(error))

    def is_like(self, other: Answer) -> bool:
        """Say whether all but the words are the same."""
        mine, theirs = ([*map(list, each[2:-1])] for each in (self, other))
        return self[:2] == other[:2] and mine == theirs


def dotted(path: str) -> str:
    """Return a path in one notation: a key that is a number looks like an index."""
    return re.sub(r"\[(-?\w+)\]", r".\1", path)


class Beside:
    """Compares the matcher with the engine.

    Attributes:
        differences: What differs, and is not meant.
        compared: How many answers were compared.
    """

    def __init__(self, *, places: bool) -> None:
        self.differences: list[str] = []
        self.compared = 0
        self._places = places

    def compare(
        self,
        old: Answer,
        ask: Callable[[], Matched],
        catalogue: Catalogue,
        own: Any,
        *,
        straight: bool = True,
        strict: bool = False,
    ) -> Matched | None:
        """Ask the matcher, and note a difference."""
        self.compared += 1
        found: Matched | None = None
        try:
            found = ask()
            new = Answer(
                missing=sorted(found.missing),
                straight=merged(straight_of(found, catalogue, own)),
            )
        except AiockptError as error:
            new = Answer.of_error(error)
        meant = any(re.search(each, old.text) for each in MEANT)
        meant = meant or (strict and any(re.search(e, new.text) for e in STRICTER))
        if not straight:
            old, new = old._replace(straight=()), new._replace(straight=())
        elif found is not None and not old.error:
            # A part of an entry goes straight now, where all or nothing did.
            views = [*straight_of(found, catalogue, own, views=True)]
            # What a value is made of arrives elsewhere, and is copied.
            made = [catalogue.whole_entry(number) for number in found.values]
            busy = [catalogue.piece(number) for number in made]
            rows = [
                row
                for row in old.straight
                if not any(
                    row[0] == each.source and each.start <= row[1] < each.stop
                    for each in busy
                )
            ]
            finer = merged([*rows, *views])
            old = old._replace(straight=finer)
        if not self._places and old.error and new.error:
            return None
        if not (old.is_like(new) or meant):
            self.differences.append(f"\nold: {old}\nnew: {new}")
            return None
        return found


def straight_of(
    found: Matched, catalogue: Catalogue, own: Any, *, views: bool = False
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bytes that go straight to the template's memory.

    With ``views``, only those of an entry that several tensors share.
    """
    entries = [*map(catalogue.whole_entry, found.straight.pieces)]
    shared = {each for each, count in Counter(entries).items() if count > 1}
    pairs = zip(*found.straight, entries, strict=True)
    for number, tensor, entry in pairs:
        piece, address = catalogue.piece(number), own.held.addresses[tensor]
        is_shared = entry in shared or catalogue.codes[number] is None
        if piece.start < piece.stop and views <= is_shared:
            yield piece.source, piece.start, piece.stop, address


def merged(
    found: Iterable[tuple[int, int, int, int]],
) -> list[tuple[int, int, int, int]]:
    """Return ranges of bytes; those that are one in both memories are joined."""
    joined: list[tuple[int, int, int, int]] = []
    for source, start, stop, address in sorted(found, key=lambda e: (e[0], e[3], e[1])):
        if joined:
            before = joined[-1]
            shift = before[3] - before[1]
            if before[0] == source and shift == address - start and start <= before[2]:
                joined[-1] = *before[:2], max(stop, before[2]), before[3]
                continue
        joined.append((source, start, stop, address))
    return joined


def backed(
    source: int, manifest: Manifest, backings: Backings
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bytes that the old engine sends straight to a template."""
    for entry, each in enumerate(backings):
        if each.nbytes and not each.parts:
            start = manifest.entries.starts[entry]
            yield source, start, start + each.nbytes, each.address


@contextmanager
def beside(*, places: bool = True) -> Iterator[Beside]:
    """Run the matcher beside the engine in a block.

    Without ``places``, two errors are alike, whatever they are: of several differences
    any may be the first.
    """
    seen = Beside(places=places)
    with pytest.MonkeyPatch.context() as patch:
        _beside_receives(seen, patch)
        yield seen
    assert not seen.differences, "\n".join(seen.differences)


def _beside_receives(seen: Beside, patch: pytest.MonkeyPatch) -> None:
    made, asked = Template.__init__, Template.match

    def init(self: Any, state_dict: object, **options: Any) -> None:
        made(self, state_dict, **options)
        self.given = state_dict if options.get("exact", True) else None
        self.is_exact = options.get("exact", True)

    def matched(self: Any, manifest: Manifest) -> Match:
        try:
            found = asked(self, manifest)
            old = Answer(straight=merged(backed(0, manifest, found.backings)))
            return found
        except AiockptError as error:
            old = Answer.of_error(error)
            raise
        finally:
            if self.is_exact:
                own = wanted(self.given, limits=FILE_LIMITS)
                catalogue = Catalogue([manifest], limits=FILE_LIMITS)
                ask = lambda: match(catalogue, own, RECEIVE)  # noqa: E731
                seen.compare(old, ask, catalogue, own, strict=True)

    patch.setattr(Template, "__init__", init)
    patch.setattr(Template, "match", matched)
