"""Templates that differ from a checkpoint, and what each way to fill them does.

`tests/behaviour/test_template_rows.py` explains the rows and proves them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import aiockpt

State = dict[str, Any]

WAYS = ("receive", "load", "lax load", "select", "load select", "lax select")

MISMATCH, MISSING = "TemplateMismatchError", "MissingKeysError"
REFUSED = "UnsupportedLeafError"


class Scaler:
    """A value of a registered type that is made of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaler) and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


aiockpt.register_leaf(
    Scaler, tag="rows.scaler", encode=lambda s: s.tensor, decode=Scaler
)


@dataclass(frozen=True)
class Row:
    """What is saved at ``b``, what the template has there, and the cells."""

    saved: Callable[[], Any]
    template: Callable[[], Any]
    cells: tuple[str, ...]

    def state(self) -> State:
        """Return the state dict that is saved."""
        return whole(self.saved())

    def own(self) -> State:
        """Return the template."""
        return whole(self.template(), 0.0)


@dataclass(frozen=True)
class Both:
    """Stands for a tensor ``a`` that belongs to the case, too."""

    a: Any
    b: Any


NOTHING = object()


def whole(b: Any, fill: float = 1.0) -> State:
    """Return a state dict with a tensor ``a`` beside ``b``."""
    if isinstance(b, Both):
        return {"a": b.a, "b": b.b}
    return {"a": torch.full((3,), fill), **({} if b is NOTHING else {"b": b})}


def ones(*shape: int) -> torch.Tensor:
    """Return what a trainer has; all elements differ."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def zeros(*shape: int) -> torch.Tensor:
    """Return what a template has."""
    return torch.zeros(shape)


def tied(tensor: torch.Tensor) -> Both:
    """Return one tensor at both places."""
    return Both(tensor, tensor)


def overlapping(base: torch.Tensor) -> Both:
    """Return two tensors that share elements."""
    return Both(base[:2], base[1:])


def beside_a_leaf(tensor: torch.Tensor) -> Both:
    """Return a tensor, and a leaf that is made of it."""
    return Both(tensor, Scaler(tensor))


def complexes() -> torch.Tensor:
    """Return complex numbers."""
    return torch.complex(ones(2), ones(2))


def on_mesh(tensor: torch.Tensor, name: str = "dp", *, split: bool = True) -> Any:
    """Return a DTensor on a mesh of this rank."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(name,))
    return distribute_tensor(tensor, mesh, [Shard(0) if split else Replicate()])


def everywhere(outcome: str) -> tuple[str, ...]:
    """Return the same outcome for all ways."""
    return (outcome,) * len(WAYS)


# A load puts the parts of all ranks together; a receive is from one rank.
RESHARDED = (MISMATCH, "filled", "filled", MISMATCH, "filled", "filled")

# A receive is of everything: tensors must fit one to one, values are adopted.
# A load is of the template's keys, a selection of its paths, of which each must have a
# place. These differences are meant.
ROWS: dict[str, Row] = {
    # ------------------------------------------------------------ keys of one side
    "a tensor is missing": Row(
        lambda: NOTHING,
        lambda: zeros(2),
        (MISMATCH, MISSING, "kept, warned", MISSING, MISSING, "kept, warned"),
    ),
    "a value is missing": Row(
        lambda: NOTHING,
        lambda: 7,
        ("kept", MISSING, "kept, warned", MISSING, MISSING, "kept, warned"),
    ),
    "a tensor is extra": Row(
        lambda: ones(2),
        lambda: NOTHING,
        (MISMATCH, "left out", "left out", MISMATCH, MISMATCH, "left out, warned"),
    ),
    "a value is extra": Row(
        lambda: 7,
        lambda: NOTHING,
        ("added", "left out", "left out", MISMATCH, MISMATCH, "left out, warned"),
    ),
    # ------------------------------------------------------------------------ empty
    "empty here, with tensors there": Row(
        lambda: {"x": ones(2)},
        dict,
        (MISMATCH, MISMATCH, "kept, warned", MISMATCH, MISMATCH, "kept, warned"),
    ),
    "empty here, with values there": Row(
        lambda: {"x": 7},
        dict,
        ("filled", MISMATCH, "kept, warned", MISMATCH, MISMATCH, "kept, warned"),
    ),
    "empty there": Row(
        dict,
        lambda: {"x": 7},
        ("kept", MISSING, "kept, warned", MISSING, MISSING, "kept, warned"),
    ),
    # ------------------------------------------------------------------------ None
    "None here, a tensor there": Row(lambda: ones(2), lambda: None, everywhere("new")),
    "None here, tensors there": Row(
        lambda: {"x": ones(2)}, lambda: None, everywhere("new")
    ),
    "None here, a DTensor there": Row(
        lambda: on_mesh(ones(2)), lambda: None, everywhere("new")
    ),
    # ---------------------------------------------------------------- shared memory
    "tied here": Row(
        lambda: Both(ones(2), ones(2)), lambda: tied(zeros(2)), everywhere(MISMATCH)
    ),
    "tied there": Row(
        lambda: tied(ones(2)),
        lambda: Both(zeros(2), zeros(2)),
        everywhere("filled"),
    ),
    "tied on both sides": Row(
        lambda: tied(ones(2)), lambda: tied(zeros(2)), everywhere("filled")
    ),
    "overlapping here": Row(
        lambda: Both(ones(2), ones(2)),
        lambda: overlapping(zeros(3)),
        everywhere(MISMATCH),
    ),
    "overlapping there": Row(
        lambda: overlapping(ones(3)),
        lambda: Both(zeros(2), zeros(2)),
        everywhere("filled"),
    ),
    "overlapping on both sides": Row(
        lambda: overlapping(ones(3)),
        lambda: overlapping(zeros(3)),
        everywhere("filled"),
    ),
    # ---------------------------------------------------------- strides and flags
    "strided here": Row(
        lambda: ones(2, 3),
        lambda: zeros(3, 2).t(),
        everywhere("filled"),
    ),
    "strided there": Row(
        lambda: ones(3, 2).t(),
        lambda: zeros(2, 3),
        everywhere("filled"),
    ),
    "with gaps here": Row(
        lambda: ones(2), lambda: zeros(20)[::10], everywhere("filled")
    ),
    "expanded here": Row(
        lambda: ones(2), lambda: zeros(1).expand(2), everywhere(MISMATCH)
    ),
    "expanded there": Row(
        lambda: ones(1).expand(2),
        lambda: zeros(2),
        everywhere("filled"),
    ),
    "expanded on both sides": Row(
        lambda: ones(1).expand(2), lambda: zeros(1).expand(2), everywhere("filled")
    ),
    "conjugated here": Row(
        complexes,
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        everywhere("filled"),
    ),
    "conjugated there": Row(
        lambda: complexes().conj(),
        lambda: torch.zeros(2, dtype=torch.complex64),
        everywhere("filled"),
    ),
    "negated here": Row(
        lambda: ones(2),
        lambda: torch._neg_view(zeros(2)),
        everywhere("filled"),
    ),
    # ------------------------------------------------------------- other tensors
    # A receive of everything promises to use the template's memory and no other.
    "meta": Row(
        lambda: ones(2),
        lambda: torch.empty(2, device="meta"),
        (REFUSED, *everywhere("new")[1:]),
    ),
    "another dtype": Row(
        lambda: ones(2), lambda: zeros(2).double(), everywhere(MISMATCH)
    ),
    "another shape": Row(lambda: ones(2), lambda: zeros(2, 1), everywhere(MISMATCH)),
    "a parameter here": Row(
        lambda: ones(2),
        lambda: torch.nn.Parameter(zeros(2)),
        everywhere("filled"),
    ),
    # ------------------------------------------------------------ registered leaves
    "a leaf with tensors": Row(
        lambda: Scaler(ones(2)),
        lambda: Scaler(zeros(2)),
        everywhere("new"),
    ),
    "a leaf here, a tensor there": Row(
        lambda: ones(2),
        lambda: Scaler(zeros(2)),
        everywhere(MISMATCH),
    ),
    "a tensor here, a leaf there": Row(
        lambda: Scaler(ones(2)), lambda: zeros(2), everywhere(MISMATCH)
    ),
    "None here, a leaf there": Row(
        lambda: Scaler(ones(2)), lambda: None, everywhere("new")
    ),
    "None here, a leaf of another tensor's memory there": Row(
        lambda: beside_a_leaf(ones(2)),
        lambda: Both(zeros(2), None),
        everywhere("new"),
    ),
    # -------------------------------------------------------------------- meshes
    "another mesh": Row(
        lambda: on_mesh(ones(2)),
        lambda: on_mesh(zeros(2), "tp"),
        RESHARDED,
    ),
    "other placements": Row(
        lambda: on_mesh(ones(2)),
        lambda: on_mesh(zeros(2), split=False),
        RESHARDED,
    ),
    "distributed here": Row(lambda: ones(2), lambda: on_mesh(zeros(2)), RESHARDED),
    "distributed there": Row(lambda: on_mesh(ones(2)), lambda: zeros(2), RESHARDED),
    # ------------------------------------------------------------ lists and kinds
    # A list has no keys: a load takes the items that the template lacks.
    "a shorter list here, of tensors": Row(
        lambda: [ones(2), ones(2)],
        lambda: [zeros(2)],
        (MISMATCH, *everywhere("filled")[1:]),
    ),
    "a shorter list here, of values": Row(
        lambda: [1, 2], lambda: [0], everywhere("filled")
    ),
    "a longer list here, of tensors": Row(
        lambda: [ones(2)], lambda: [zeros(2), zeros(2)], everywhere(MISMATCH)
    ),
    "a longer list here, of values": Row(
        lambda: [1], lambda: [0, 0], everywhere(MISMATCH)
    ),
    "a list here, a tuple there": Row(
        lambda: (ones(2),), lambda: [zeros(2)], everywhere(MISMATCH)
    ),
    "an OrderedDict here, a dict there": Row(
        lambda: {"x": ones(2)},
        lambda: OrderedDict(x=zeros(2)),
        everywhere("filled"),
    ),
    "a value here, a tensor there": Row(
        lambda: ones(2), lambda: 7, everywhere(MISMATCH)
    ),
    "a tensor here, a value there": Row(
        lambda: 7, lambda: zeros(2), everywhere(MISMATCH)
    ),
    "a text here, a number there": Row(lambda: 7, lambda: "x", everywhere(MISMATCH)),
    "a number of another type": Row(lambda: 0.001, lambda: 1, everywhere("new")),
}
