"""Makes one checkpoint of what several sources have for this rank.

`unite` returns one tree, whose pieces lie in many data segments. A receive fills one
data segment. `join` describes it: each tensor of the tree is an entry, or lies in one,
and has the bytes of an entry of a source or is put together from boxes of several.

Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from aiockpt.format.chunks import digest
from aiockpt.format.entries import Entries, Entry
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import Manifest, TensorSpec
from aiockpt.format.references import mentions, renumber
from aiockpt.runtime.system import collector_paused
from aiockpt.state.catalogue import Catalogue, Piece
from aiockpt.state.composing import BoxCopy
from aiockpt.state.distributed import LayoutReader
from aiockpt.state.mesh import Box
from aiockpt.state.reshard import United
from aiockpt.state.sharding import DTensorLayout

_ALIGN_BYTES: Final = 64  # at least those of any element


@dataclass(frozen=True, slots=True)
class JoinedCheckpoint:
    """A checkpoint that lies in several sources.

    Attributes:
        manifest: Describes it as one data segment, without digests.
        pieces: The pieces of that segment that are copied, in the order of its bytes.
        copies: For each of them, the boxes of the sources that bring all of its bytes.
    """

    manifest: Manifest
    pieces: Sequence[Piece]
    copies: Sequence[Sequence[BoxCopy]]


def join(
    united: United, sources: Sequence[Manifest], *, step: int, limits: Limits
) -> JoinedCheckpoint:
    """Return the checkpoint of a united tree. The tree gets its numbers in place.

    Args:
        united: The tree, and the pieces that are put together.
        sources: The manifest of each source.
        step: The step of all sources.
        limits: Bound the trees.

    Raises:
        RemoteProtocolError: the tree is malformed.
    """
    with collector_paused():
        segment = _JoinedEntries(united, sources, limits)
        rows = (each.numbers for each in mentions(united.tree))
        numbers = segment.numbers_of([*dict.fromkeys(chain.from_iterable(rows))])
        renumber(united.tree, numbers)  # type: ignore[arg-type]
    ids = "".join(source.snapshot_id for source in sources).encode()
    manifest = Manifest(
        step=step,
        snapshot_id=digest([ids]),
        chunk_bytes=min(source.chunk_bytes for source in sources),
        algorithm="",
        digests=(),
        entries=Entries.of(segment.entries),
        views=(*segment.views,),
        tree=united.tree,
        header=b"",
        header_bytes=sum(source.header_bytes for source in sources),
    )
    return JoinedCheckpoint(manifest, segment.pieces, segment.copies)


def ranks_of_meshes(sources: Sequence[Manifest], *, limits: Limits) -> set[int]:
    """Return the ranks of all meshes on which the sources have tensors.

    Raises:
        RemoteProtocolError: a tree is malformed.
    """
    found: set[int] = set()
    for source in sources:
        layouts = LayoutReader(limits)
        meshes = {
            layout.mesh.grid
            for _, _, layout in layouts.all_in(source.tree)
            if isinstance(layout, DTensorLayout)
        }
        for grid in meshes:
            found.update(grid.flat())
    return found


class _JoinedEntries:
    """The entries of a joined checkpoint.

    Attributes:
        entries: The entries, by name.
        views: The tensors that are no whole entries.
        pieces, copies: See `JoinedCheckpoint`.
    """

    def __init__(
        self, united: United, sources: Sequence[Manifest], limits: Limits
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.views: list[TensorSpec] = []
        self.pieces: list[Piece] = []
        self.copies: list[Sequence[BoxCopy]] = []
        self._united = united
        self._catalogue = Catalogue(sources, limits=limits, tree=united.tree)
        # The new pieces are those of one more source.
        self._sources = [*sources, united.manifest]
        self._homes: dict[tuple[int, int], int] = {}  # of a source's entry: its number
        self._end = 0

    def numbers_of(self, mentioned: Sequence[int]) -> dict[int, int]:
        """Add what the tree mentions; return the final number of each tensor."""
        views: dict[int, TensorSpec] = {}
        found: dict[int, int] = {}
        firsts = self._catalogue.firsts
        for number in mentioned:
            is_new = number >= len(self._catalogue)
            source = len(firsts) - 1 if is_new else self._catalogue.source_of(number)
            manifest, local = self._sources[source], number - firsts[source]
            home = self._home(source, manifest.storage_of(local))
            if local < len(manifest.entries):
                found[number] = home
            else:
                spec = manifest.tensor(local)
                views[number] = TensorSpec(
                    home, spec.dtype, spec.shape, spec.stride, spec.offset, spec.flags
                )
        for at, (number, spec) in enumerate(views.items(), len(self.entries)):
            found[number] = at
            self.views.append(spec)
        return found

    def _home(self, source: int, entry: int) -> int:
        """Return the number of the entry that has the bytes of a source's entry."""
        if (source, entry) in self._homes:
            return self._homes[source, entry]
        number = self._homes[source, entry] = len(self.entries)
        theirs = self._sources[source].entries
        nbytes = theirs.stops[entry] - theirs.starts[entry]
        start = -(-self._end // _ALIGN_BYTES) * _ALIGN_BYTES if nbytes else self._end
        self._end = start + nbytes
        where = theirs.dtypes[entry], theirs.shapes[entry], (start, self._end)
        self.entries[f"{number}"] = Entry(*where)
        if nbytes:
            self._add(source, entry, _raw(0, number, start, self._end))
        return number

    def _add(self, source: int, entry: int, piece: Piece) -> None:
        """Add what is copied to an entry."""
        if source < len(self._catalogue.sources):
            theirs = self._sources[source].entries
            reach = theirs.starts[entry], theirs.stops[entry]
            whole = _raw(source, entry, *reach)
            box = Box((0,), (0,), whole.shape)
            self.copies.append([BoxCopy(whole, entry, box)])
        else:
            made = self._united.pieces[entry]
            piece = made._replace(
                source=0, entry=piece.entry, start=piece.start, stop=piece.stop
            )
            self.copies.append(self._united.copies[entry])
        self.pieces.append(piece)


def _raw(source: int, entry: int, start: int, stop: int) -> Piece:
    """Return a piece that is nothing but bytes."""
    return Piece(source, entry, start, stop, "uint8", (stop - start,), (1,), 0)
