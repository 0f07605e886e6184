"""State dict → tree, entries and the memory that they come from. No I/O, no copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aiockpt.errors import AiockptError, StagingError, StateDictError
from aiockpt.format.entries import Storages, plan_segment
from aiockpt.format.limits import Limits
from aiockpt.format.manifest import TensorSpec
from aiockpt.format.paths import Node
from aiockpt.format.references import renumber
from aiockpt.format.registry import register_leaf
from aiockpt.memory.copies import Backings
from aiockpt.runtime.system import collector_paused
from aiockpt.state.drafts import Drafts, draft
from aiockpt.state.numbering import Numbering

__all__ = [
    "Description",
    "Layout",
    "Survey",
    "Unready",
    "describe",
    "lay_out",
    "register_leaf",
    "survey",
]


@dataclass(frozen=True, slots=True)
class Description:
    """A state dict as data: what the manifest says, and where the bytes are.

    ``storages`` and ``backings`` run in the order of the data segment.
    """

    tree: Node
    storages: Storages
    offsets: Sequence[int]
    segment_bytes: int
    backings: Backings
    views: Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class Unready:
    """Stands for a state dict that was not computed, so that receivers hear of it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Survey:
    """A state dict as data, its tensors numbered as they come in the tree.

    ``names`` are what the tensors' entries are called, where they have one; ``wholes``
    are its distributed tensors, by the `id` of each of their local tensors.
    """

    tree: Node
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    drafts: Drafts
    wholes: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a survey's tensors come in a checkpoint.

    ``firsts`` are the numbers that entries go by in the survey, in the order of the
    data segment, as ``storages`` and ``offsets``; ``numbers`` are the tensors' numbers
    in the manifest, in the order of the survey.
    """

    firsts: Sequence[int]
    storages: Storages
    offsets: Sequence[int]
    segment_bytes: int
    views: Sequence[TensorSpec]
    numbers: Sequence[int]


def survey(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool,
    writing: bool,
    reading: bool = False,
) -> Survey:
    """Look at a state dict without copying a byte of it.

    ``writing`` says that its memory is going to be written: what has no memory to
    write to is refused then. ``reading`` says that it is only looked for what may be
    of use: tensors without memory are left out then, and not refused.

    Raises:
        UnsupportedLeafError: a leaf has no encoding; its path is in ``path``.
        LimitExceededError: too deep or too many nodes; containers with cycles too.
        StateDictError: a tensor or a registered type failed when it was looked at.
    """
    numbering = Numbering(limits, allow_pickle=allow_pickle, reading=reading)
    with _looking():
        tree = numbering.encode(state_dict)
        tensors, names = numbering.tensors, [*numbering.names]
        wholes = numbering.wholes
        del numbering  # its tables are large, and there is more to come
        drafts = draft(tensors, names, writing=writing)
    return Survey(tree, tensors, names, drafts, wholes)


@contextmanager
def _looking() -> Iterator[None]:
    try:
        with collector_paused():
            yield
    except AiockptError:
        raise
    except Exception as error:
        raise StateDictError(f"cannot describe the state dict: {error}") from error


def describe(
    state_dict: object,
    *,
    limits: Limits,
    allow_pickle: bool = False,
    writing: bool = False,
) -> Description:
    """Describe a state dict as it travels; see `survey`.

    Raises:
        StagingError: it is `Unready`.
    """
    if isinstance(state_dict, Unready):
        why = f"the caller's stream failed: {state_dict.error}"
        raise StagingError(why) from state_dict.error
    found = survey(
        state_dict, limits=limits, allow_pickle=allow_pickle, writing=writing
    )
    with _looking():
        layout = lay_out(found)
        renumber(found.tree, layout.numbers)
    return Description(
        tree=found.tree,
        storages=layout.storages,
        offsets=layout.offsets,
        segment_bytes=layout.segment_bytes,
        backings=found.drafts.backings.taken(layout.firsts),
        views=layout.views,
    )


def lay_out(found: Survey) -> Layout:
    """Give every tensor its place; whoever uses the tree renumbers it."""
    drafts, firsts = found.drafts, found.drafts.entries()
    storages = drafts.storages(firsts, found.names)
    order, offsets, segment_bytes = plan_segment(storages)
    if order != range(len(firsts)):
        firsts = [*map(firsts.__getitem__, order)]
    views, numbers = _number_tensors(drafts, firsts)
    taken = storages.taken(order)
    return Layout(firsts, taken, offsets, segment_bytes, views, numbers)


def _number_tensors(
    drafts: Drafts, firsts: Sequence[int]
) -> tuple[Sequence[TensorSpec], Sequence[int]]:
    """Number the plain tensors after their entries, and the others behind them."""
    if isinstance(firsts, range):  # of all tensors: each is an entry, in its order
        return (), firsts
    views: list[TensorSpec] = []
    numbers = [0] * len(drafts.codes)
    for entry, first in enumerate(firsts):
        if drafts.codes[first] is not None:
            numbers[first] = entry
            continue
        group, _ = drafts.owners[first]
        for member in group.members:
            spec = group.spec(member, entry)
            if spec is None:
                numbers[member.number] = entry
            else:
                numbers[member.number] = len(firsts) + len(views)
                views.append(spec)
    return views, numbers
