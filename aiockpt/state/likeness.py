"""The memory of a state dict that may hold what a checkpoint holds, entry by entry.

Nothing here has to be right: whoever reads that memory compares digests. So what has
the same path, dtype, shape and strides is paired, and all else is left out, silently.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from aiockpt.format.manifest import Manifest
from aiockpt.format.references import Mention, mentions
from aiockpt.memory.copies import Backings
from aiockpt.runtime.system import collector_paused
from aiockpt.state.flatten import Drafts, Survey
from aiockpt.state.pairing import Pairing
from aiockpt.state.places import Places, check_numbers

__all__ = ["alike"]

_NONE: Final = -1


def alike(manifest: Manifest, own: Survey) -> Backings:
    """Return where a state dict may have each entry; nothing where it has none.

    Raises:
        RemoteProtocolError: the manifest's tree names a tensor that there is not.
    """
    with collector_paused():
        pairing = _paired(manifest, own)
    there = array("q", _fitting(manifest, own.drafts, pairing.entries.there))
    return own.drafts.backings.taken(there)


def _paired(manifest: Manifest, own: Survey) -> Pairing:
    places = Places(own.tree, counts=_every)
    for mention in mentions(manifest.tree):
        check_numbers(mention.numbers, manifest.tensor_count)
        places.add(mention)
    pairing = Pairing(manifest, own.tensors, own.drafts)
    if not pairing.add_all(places.theirs, places.own):
        pairing = Pairing(manifest, own.tensors, own.drafts)
        for number, mine in zip(places.theirs, places.own, strict=True):
            pairing.add(number, mine)  # which says what does not fit
    return pairing


def _every(_: Mention) -> bool:
    return True


def _fitting(manifest: Manifest, drafts: Drafts, there: array[int]) -> Iterator[int]:
    """Yield our entry for each of theirs, if its bytes fill that one, or -1.

    A group of ours may have members that theirs lacks, and reach further.
    """
    entries = manifest.entries
    columns = zip(there, entries.starts, entries.stops, strict=True)
    for mine, start, stop in columns:
        fits = mine >= 0
        if fits and drafts.codes[mine] is None:
            storage = drafts.owners[mine][0].storage
            fits = storage.nbytes == stop - start and start % storage.align == 0
        yield mine if fits else _NONE
