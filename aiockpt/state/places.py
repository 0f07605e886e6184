"""The tensors of two trees, paired by their paths. Numbers only: no tensor is seen."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

from aiockpt.errors import RemoteProtocolError, TemplateMismatchError
from aiockpt.format.paths import Node, Path, format_path
from aiockpt.format.references import Mention, Reference, mentions
from aiockpt.state.distributed import TAGS

__all__ = ["Places", "check_numbers", "is_filled", "mismatch", "path_of"]


def is_filled(mention: Mention | Reference) -> bool:
    """Say whether it names tensors of the state dict, and not what a value is of.

    The local parts of a distributed tensor are such.
    """
    own = mention.leaf is None or mention.leaf[1] in TAGS
    return mention.kind == "tensor" and own


def path_of(tree: Node, place: int) -> Path:
    """Return the path of a tensor to fill: the ``place``-th, in the order of the tree.

    Only an error asks for it, so that paths need not be kept.
    """
    return next(islice(_paths(filter(is_filled, mentions(tree))), place, None))


def mismatch(path: Path, *, expected: str, actual: str) -> TemplateMismatchError:
    """Return the error that a template does not fit at ``path``."""
    return TemplateMismatchError(format_path(path), expected=expected, actual=actual)


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Refuse a mention of tensors that a manifest of ``count`` tensors lacks.

    Raises:
        RemoteProtocolError: there is one.
    """
    if numbers and not 0 <= min(numbers) <= max(numbers) < count:
        wrong = next(number for number in numbers if not 0 <= number < count)
        raise RemoteProtocolError(f"the tree names tensor {wrong}")


class Places:
    """Pairs their tensors to fill with ours while their tree is read.

    As long as both trees go alike, they are read side by side. Where they part, as with
    keys in another order, paths are looked up from there on: that takes more time and
    much more memory, since there may be 100,000.

    Args:
        own: Our tree.
        counts: Which mentions of ours are paired; whoever calls `add` picks theirs.

    Attributes:
        theirs: The number of each of their tensors, place by place.
        own: The number of ours that is in the same place.
    """

    def __init__(
        self, own: Node, counts: Callable[[Mention], bool] = is_filled
    ) -> None:
        self.theirs = array("q")
        self.own = array("q")
        self._tree, self._counts = own, counts
        self._beside = filter(counts, mentions(own))
        self._by_path: dict[Path, int] = {}
        self._unmet: dict[Path, int] = {}
        self._astray: list[Path] = []
        self._parted = False

    def add(self, mention: Mention) -> None:
        """Pair the tensors of their next node."""
        if not self._parted:
            mine = next(self._beside, None)
            if mine and (mine.path, mine.names) == (mention.path, mention.names):
                self.theirs.extend(mention.numbers)
                self.own.extend(mine.numbers)
                return
            self._part()
        self._look_up(mention)

    def _part(self) -> None:
        self._parted = True
        self._beside = filter(self._counts, mentions(self._tree))
        for mention in self._beside:
            for path, _, number, _ in mention.references():
                self._by_path[path] = number
        self._unmet = dict(islice(self._by_path.items(), len(self.own), None))

    def _look_up(self, mention: Mention) -> None:
        for path, _, number, _ in mention.references():
            mine = self._by_path.get(path)
            if mine is None:
                self._astray.append(path)
                continue
            self.theirs.append(number)
            self.own.append(mine)
            self._unmet.pop(path, None)

    def finish(self) -> None:
        """Raise TemplateMismatchError if either has a tensor where the other has none.

        Theirs come first.
        """
        for path in self._astray:
            raise mismatch(path, expected="a tensor", actual="nothing")
        for path in chain(self._unmet, _paths(self._beside)):
            raise mismatch(path, expected="nothing", actual="a tensor")


def _paths(filled: Iterator[Mention]) -> Iterator[Path]:
    references = chain.from_iterable(mention.references() for mention in filled)
    return map(attrgetter("path"), references)
