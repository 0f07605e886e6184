"""What a header is expected to say, so that one which says it need not be decoded.

Who receives into a template can write the header of what it has itself, while the
sender writes its own. Where the entries are the same text, they are known already, and
so is a tree; a header is compared in a hundredth of the time that it takes to decode.

Only digests of the text are kept. A peer that makes other text with an equal digest
has its header read as what this side has: as if it had sent that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from xxhash import xxh3_128

from aiockpt.errors import LocalProtocolError
from aiockpt.wire.document import TensorSpec
from aiockpt.wire.entries import Bytes, Entries
from aiockpt.wire.layout import make_entries
from aiockpt.wire.paths import Node
from aiockpt.wire.pieces import encode_entries
from aiockpt.wire.storages import Storages

__all__ = ["Foretold", "foretell"]


@dataclass(frozen=True, slots=True)
class _Imprint:
    """A text that one knows when one sees it."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> _Imprint:
        state, length = xxh3_128(), 0
        for piece in pieces:
            state.update(piece)
            length += len(piece)
        return cls(length, state.digest())


@dataclass(frozen=True, slots=True)
class Foretold:
    """A layout that is expected.

    Attributes:
        entries: They have been validated.
        views: As a manifest has them.
        tree: With the manifest's numbers; whoever changes it lets go of this first.
    """

    entries: Entries
    views: tuple[TensorSpec, ...]
    tree: Node = field(repr=False)
    entries_text: _Imprint
    tree_text: _Imprint

    def has_entries(self, header: Bytes, start: int) -> bool:
        """Whether its entries are what stands in ``header`` from ``start`` on."""
        text = memoryview(header)[start : start + self.entries_text.length]
        found = _Imprint.of([text])
        rest = memoryview(header)[start + self.entries_text.length :]
        return found == self.entries_text and not bytes(rest).strip(b" ")

    def has_tree(self, text: bytes) -> bool:
        """Whether its tree is written so."""
        return _Imprint.of([text]) == self.tree_text


def foretell(
    storages: Storages, views: Sequence[TensorSpec], tree: Node
) -> Foretold | None:
    """Return what a header of this layout says; None: there can be no such header."""
    try:
        entries = make_entries(storages)
        text = _Imprint.of(chain(encode_entries(entries), [b"}"]))
    except (LocalProtocolError, UnicodeEncodeError):
        return None
    tree_text = _Imprint.of([msgspec.json.encode(tree)])
    return Foretold(entries, tuple(views), tree, text, tree_text)
