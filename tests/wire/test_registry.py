"""`register_leaf` teaches the tree a type, on both ends alike."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from aiockpt import Limits
from aiockpt.errors import AiockptError, RemoteProtocolError
from aiockpt.format.limits import WorkCancelledError
from aiockpt.format.registry import REGISTRY, Registry, register_leaf
from aiockpt.format.tree import decode_tree, encode_tree

if TYPE_CHECKING:
    from aiockpt.format.paths import Node


class Phase(enum.Enum):
    """Travels by name."""

    WARM = 0.5
    HOT = (1, 2)


class Mode(enum.IntFlag):
    """Travels by value: combinations have no name of their own."""

    A = 1
    B = 2


class Point(NamedTuple):
    """Travels by its fields."""

    x: int
    y: object = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Travels by its init fields."""

    rate: float
    names: list[str] = dataclasses.field(default_factory=list)
    size: int = dataclasses.field(init=False, default=7)


class Odd:
    """A type without a default encoding."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Odd({self.value})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


for leaf_type in (Phase, Mode, Point, Config):
    register_leaf(leaf_type)
register_leaf(Odd, tag="odd", encode=lambda odd: odd.value, decode=Odd)


def encode(value: object, registry: Registry = REGISTRY) -> Node:
    """Encode a value without tensors."""
    return encode_tree(
        value, registry=registry, leaf=lambda leaf, path: None, limits=Limits()
    )


def decode(node: Node, registry: Registry = REGISTRY) -> Any:
    """Decode a tree without tensors."""
    return decode_tree(node, registry=registry, tensors=(), limits=Limits())


@pytest.mark.parametrize(
    "value",
    [
        *(Phase.WARM, Phase.HOT, Mode.A | Mode.B, Mode(0), Point(1, [Phase.WARM])),
        *(Config(0.5, ["a"]), Odd(Odd(None)), {Point(1, 2): {Mode.B}}),
        Counter([3, 3, 5]),
    ],
    ids=repr,
)
def test_a_registered_type_comes_back(value: object) -> None:
    """Registered types may nest, and may be keys."""
    assert encode(Phase.WARM) == ["ext", f"{__name__}.Phase", "WARM"]
    back = decode(encode(value))
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    "node",
    [
        ["ext", f"{__name__}.Phase", "COLD"],
        ["ext", f"{__name__}.Phase", "__class__"],
        ["ext", f"{__name__}.Phase", ["list", []]],
        ["ext", f"{__name__}.Point", ["dict", ["z"], [1]]],
        ["ext", f"{__name__}.Point", ["dict", [], []]],
        ["ext", f"{__name__}.Config", ["dict", ["rate", "size"], [1.0, 2]]],
        ["ext", f"{__name__}.Config", 5],
    ],
    ids=repr,
)
def test_a_default_decoder_refuses_what_does_not_fit(node: Node) -> None:
    """Unknown members and missing or extra fields are the peer's fault."""
    with pytest.raises(RemoteProtocolError):
        decode(node)


def test_a_conflict_is_refused_and_changes_nothing() -> None:
    """A tag has one type, and a type one tag."""
    registry = Registry()
    registry.register("point", Point, tuple, lambda xy: Point(*xy))
    with pytest.raises(ValueError, match="Point is registered as 'point'"):
        registry.register("point", Config, vars, Config)
    with pytest.raises(ValueError, match="Point is registered as 'point'"):
        registry.register("dot", Point, tuple, lambda xy: Point(*xy))
    assert registry.by_tag("dot") is registry.by_type(Config) is None
    assert decode(encode(Point(1, 2), registry), registry) == Point(1, 2)


def test_registering_again_replaces() -> None:
    """A module may be reloaded, and a cell of a notebook run twice."""
    registry = Registry()
    registry.register("odd", Odd, lambda odd: 1, Odd)
    reloaded = type("Odd", (Odd,), {"__module__": __name__, "__qualname__": "Odd"})
    registry.register("odd", reloaded, lambda odd: 2, reloaded)
    assert encode(reloaded(0), registry) == ["ext", "odd", 2]
    assert registry.by_type(Odd) is None
    assert registry.by_tag("odd") is registry.by_type(reloaded)


class Silent:
    """A value that must not be asked for its text."""

    def __repr__(self) -> str:
        raise AssertionError("asked")


@pytest.mark.parametrize("is_structure", [True, False])
def test_only_a_named_tuple_has_the_tag_of_one(is_structure: bool) -> None:
    """The prefix says that a template's own type may take its place."""
    registry = Registry()
    registry.register(
        "point",
        Point,
        lambda point: point._asdict(),
        lambda fields: Point(**fields),
        prefix="namedtuple:" if is_structure else "",
    )
    node: Node = ["ext", "namedtuple:point", ["dict", ["x"], [1]]]
    with suppress(RemoteProtocolError) if not is_structure else nullcontext():
        found = decode_tree(node, registry=registry, tensors=[], limits=Limits())
        assert is_structure, "a type of another kind"
        assert found == Point(1)


def test_what_cannot_be_registered() -> None:
    """A type needs both functions, or a kind whose encoding is plain."""
    with pytest.raises(ValueError, match="needs encode and decode"):
        register_leaf(object)
    with pytest.raises(ValueError, match="both"):
        register_leaf(Odd, encode=str)
    for builtin in (int, dict, type(None), tuple):
        with pytest.raises(ValueError, match="carried already"):
            register_leaf(builtin, encode=str, decode=builtin)


@pytest.mark.parametrize(
    "tag",
    [*(f"{__name__}.{kind}" for kind in ("Phase", "Mode", "Config")), "tests.Silent"],
)
@pytest.mark.parametrize("payload", [["tensor", 0], ["tuple", [["int", "f" * 6000]]]])
def test_what_a_decoder_refuses_is_not_asked_for_its_text(
    tag: str, payload: Node
) -> None:
    """It may be a tensor, or a number of more digits than Python prints."""
    known = REGISTRY
    if tag == "tests.Silent":  # a decoder of one's own may raise the peer's value
        known = Registry()
        known.register(tag, Silent, lambda _: None, {}.__getitem__)
    node: Node = ["ext", tag, payload]
    with pytest.raises(RemoteProtocolError, match="refused the root"):
        decode_tree(node, registry=known, tensors=[Silent()], limits=Limits())


@pytest.mark.parametrize("kind", [KeyError, AiockptError, WorkCancelledError])
def test_a_failing_decoder_is_the_peers_fault(kind: type[Exception]) -> None:
    """The error has the tag, the place and the cause; one of ours passes through."""
    registry = Registry()

    def fail(value: object) -> Odd:
        raise kind("mine")

    registry.register("odd", Odd, str, fail)
    ours = kind is not KeyError
    with pytest.raises(
        kind if ours else RemoteProtocolError,
        match=r"^mine$" if ours else r"'odd' refused a: KeyError",
    ) as caught:
        decode(["dict", ["a"], [["ext", "odd", 1]]], registry)
    assert ours or isinstance(caught.value.__cause__, KeyError)
