"""What the three ways to fill a template do where it differs from the checkpoint.

One row is one difference. Its cells say what a receive (``recv_checkpoint(into=)``), a
load (``load(into=)``, strict and not) and a selection (``select=`` beside ``into=``, of
a receive and of a load) do. All states and templates have a tensor ``a``, which fits,
and the difference in ``b``.

An outcome is the name of an error, which leaves the template as it was, or a word:

* ``filled``: the template's own tensor or container has the checkpoint's elements;
* ``new``: what the checkpoint has took the place of what the template had;
* ``added``: the template had nothing there;
* ``kept``: the template's stays as it was;
* ``left out``: the template has nothing there, and gets nothing.

A load that is not strict warns of what it keeps or leaves out: ``kept, warned``.
docs/explanation/guarantees.md has these rows for users, as they are today.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import aiockpt
from tests.support.transports import pair, receive

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
class Decided:
    """A cell in which another outcome is decided, and not yet true."""

    outcome: str
    today: str
    why: str


@dataclass(frozen=True)
class Row:
    """What is saved at ``b``, what the template has there, and the cells."""

    saved: Callable[[], Any]
    template: Callable[[], Any]
    cells: tuple[str | Decided, ...]

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


def but_a_receive(outcome: str, today: str, why: str) -> tuple[str | Decided, ...]:
    """Return an outcome that only a receive does not have yet."""
    return (Decided(outcome, today, why), *everywhere(outcome)[1:])


ELEMENTS = "elements are copied, as load_state_dict does"
NONE = "None takes any value, in a receive as in a load"
LEAF = "a registered leaf is a value, which is made anew"
KINDS = "a value of another kind is an error, in a receive as in a load"
NUMBERS = "a number is a number: 1 and 0.001 are both learning rates"

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
    "None here, a tensor there": Row(
        lambda: ones(2), lambda: None, but_a_receive("new", MISMATCH, NONE)
    ),
    "None here, tensors there": Row(
        lambda: {"x": ones(2)}, lambda: None, but_a_receive("new", MISMATCH, NONE)
    ),
    "None here, a DTensor there": Row(
        lambda: on_mesh(ones(2)), lambda: None, but_a_receive("new", MISMATCH, NONE)
    ),
    # ---------------------------------------------------------------- shared memory
    "tied here": Row(
        lambda: Both(ones(2), ones(2)), lambda: tied(zeros(2)), everywhere(MISMATCH)
    ),
    "tied there": Row(
        lambda: tied(ones(2)),
        lambda: Both(zeros(2), zeros(2)),
        but_a_receive("filled", MISMATCH, ELEMENTS),
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
        but_a_receive("filled", MISMATCH, ELEMENTS),
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
        but_a_receive("filled", MISMATCH, ELEMENTS),
    ),
    "strided there": Row(
        lambda: ones(3, 2).t(),
        lambda: zeros(2, 3),
        but_a_receive("filled", MISMATCH, ELEMENTS),
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
        but_a_receive("filled", MISMATCH, ELEMENTS),
    ),
    "expanded on both sides": Row(
        lambda: ones(1).expand(2), lambda: zeros(1).expand(2), everywhere("filled")
    ),
    "conjugated here": Row(
        complexes,
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        but_a_receive("filled", MISMATCH, ELEMENTS),
    ),
    "conjugated there": Row(
        lambda: complexes().conj(),
        lambda: torch.zeros(2, dtype=torch.complex64),
        but_a_receive("filled", MISMATCH, ELEMENTS),
    ),
    "negated here": Row(
        lambda: ones(2),
        lambda: torch._neg_view(zeros(2)),
        but_a_receive("filled", MISMATCH, ELEMENTS),
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
        but_a_receive("new", REFUSED, LEAF),
    ),
    "a leaf here, a tensor there": Row(
        lambda: ones(2),
        lambda: Scaler(zeros(2)),
        but_a_receive(MISMATCH, REFUSED, LEAF),
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
        but_a_receive("new", MISMATCH, LEAF),
    ),
    # -------------------------------------------------------------------- meshes
    "another mesh": Row(
        lambda: on_mesh(ones(2)),
        lambda: on_mesh(zeros(2), "tp"),
        everywhere(MISMATCH),
    ),
    "other placements": Row(
        lambda: on_mesh(ones(2)),
        lambda: on_mesh(zeros(2), split=False),
        everywhere(MISMATCH),
    ),
    "distributed here": Row(
        lambda: ones(2), lambda: on_mesh(zeros(2)), everywhere(MISMATCH)
    ),
    "distributed there": Row(
        lambda: on_mesh(ones(2)), lambda: zeros(2), everywhere(MISMATCH)
    ),
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
        lambda: [1], lambda: [0, 0], but_a_receive(MISMATCH, "filled", KINDS)
    ),
    "a list here, a tuple there": Row(
        lambda: (ones(2),), lambda: [zeros(2)], but_a_receive(MISMATCH, "new", KINDS)
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
    "a text here, a number there": Row(
        lambda: 7, lambda: "x", but_a_receive(MISMATCH, "new", KINDS)
    ),
    "a number of another type": Row(
        lambda: 0.001,
        lambda: 1,
        ("new", *(Decided("new", MISMATCH, NUMBERS) for _ in WAYS[1:])),
    ),
}


class Warnings(logging.Handler):
    """Counts what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, _: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Fill the template of each row in each way, once; return the outcomes."""
    # Only a member of a group has meshes.
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield asyncio.run(outcomes(tmp_path_factory.mktemp("rows")))
    finally:
        distributed.destroy_process_group()


async def outcomes(place: Path) -> dict[str, list[str]]:
    """Return the outcomes of all rows, in the order of the ways."""
    found: dict[str, list[str]] = {}
    async with pair() as (sender, receiver):
        for step, (name, row) in enumerate(ROWS.items()):
            state, path = row.state(), place / f"step-{step}"
            await sender.send_checkpoint([1], step, state)
            with aiockpt.make_sync_checkpointer() as checkpointer:
                checkpointer.save(state, path)

            async def received(own: State, step: int = step, **options: Any) -> Any:
                return await receive(sender, receiver, step, into=own, **options)

            async def loaded(own: State, path: Path = path, **options: Any) -> Any:
                return aiockpt.load(path, own, **options)

            select = ["a", "b"]
            found[name] = [
                await outcome(row, received),
                await outcome(row, loaded),
                await outcome(row, partial(loaded, strict=False)),
                await outcome(row, partial(received, select=select)),
                await outcome(row, partial(loaded, select=select)),
                await outcome(row, partial(loaded, select=select, strict=False)),
            ]
    return found


async def outcome(row: Row, fill: Callable[[State], Awaitable[Any]]) -> str:
    """Fill the template of a row; return the outcome."""
    own = row.own()
    before = own.get("b", NOTHING)
    warnings = Warnings()
    logger = logging.getLogger("aiockpt")
    logger.addHandler(warnings)
    try:
        got = await fill(own)
    except aiockpt.AiockptError as error:
        assert shown(own) == shown(row.own())
        return type(error).__name__
    finally:
        logger.removeHandler(warnings)
    assert got is own
    assert shown(got["a"]) == shown(row.state()["a"])
    return _word(row, got.get("b", NOTHING), before) + ", warned" * bool(warnings.count)


def _word(row: Row, now: Any, before: Any) -> str:
    """Return what happened at ``b``."""
    if now is NOTHING:
        return "left out"
    if shown(now) == shown(row.state().get("b", NOTHING)):
        if before is NOTHING:
            return "added"
        return "filled" if now is before else "new"
    assert now is before
    assert shown(now) == shown(row.own()["b"])
    return "kept"


def shown(value: Any) -> object:
    """Return the elements of tensors, and what is around them, to compare."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        return "meta" if local.is_meta else (str(local.dtype), local.tolist())
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [*map(shown, value)]
    return shown(value.tensor) if isinstance(value, Scaler) else value


@pytest.mark.parametrize("name", ROWS)
def test_what_is_so_today(name: str, found: dict[str, list[str]]) -> None:
    """In every way, whatever is decided."""
    cells = ROWS[name].cells
    today = [cell.today if isinstance(cell, Decided) else cell for cell in cells]
    assert [*zip(WAYS, found[name], strict=True)] == [*zip(WAYS, today, strict=True)]


def _open(cell: Decided) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=cell.why, strict=True)


OPEN = [
    pytest.param(name, number, cell.outcome, marks=_open(cell))
    for name, row in ROWS.items()
    for number, cell in enumerate(row.cells)
    if isinstance(cell, Decided)
]


@pytest.mark.parametrize(("name", "way", "decided"), OPEN)
def test_what_is_decided(
    name: str, way: int, decided: str, found: dict[str, list[str]]
) -> None:
    """These cells change once one matcher serves all three ways."""
    assert found[name][way] == decided
