"""Templates beside trees that a hostile sender has made up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt.errors import RemoteProtocolError, TemplateMismatchError
from tests.support.states import backings_of, matching, staged


def test_a_backing_ends_with_its_storage() -> None:
    """Two storages that meet in memory by chance are not one."""
    base = torch.arange(8.0)
    manifest, _ = staged({"a": base[:4], "b": base[4:]})
    memory = np.zeros(8, dtype=np.float32)
    apart = {"a": torch.from_numpy(memory[:4]), "b": torch.from_numpy(memory[4:])}
    for each in backings_of(matching(manifest, apart)):
        assert each.nbytes <= each.tensor.untyped_storage().nbytes()


ATTRIBUTED = OrderedDict(b=1)
ATTRIBUTED.t = torch.zeros(2)  # type: ignore[attr-defined]

FORGED: tuple[Any, ...] = (
    *(["list"], ["ext"], ["ext", 1, 2], ["ext", [], 0], ["ext", "?", 0]),
    *(["ext", "?", 99], ["defaultdict", 1], ["dict", [{}], [5]]),
    *(["dict", ["b", "b"], [5, 6]], ["dict", ["b"], [5, 6]], []),
    *(["odict", ["b"], [5], ["tensor", 0]], ["tensors", [{}], [0]]),
    ["ext", "numpy.scalar", ["tuple", 1]],
)


@pytest.mark.parametrize("number", range(len(FORGED)))
@pytest.mark.parametrize(
    "own", [1, {"b": 1}, [1], object(), ATTRIBUTED, np.float64(1)], ids="idloan"
)
def test_a_malformed_tree_is_an_error_of_ours(number: int, own: Any) -> None:
    """The error is one of the package, never one of Python."""
    manifest, _ = staged({"w": torch.ones(2), "x": 1})
    tree: Any = ["dict", ["w", "x"], [["tensor", 0], FORGED[number]]]
    try:
        matching(replace(manifest, tree=tree), {"w": torch.zeros(2), "x": own})
    except (RemoteProtocolError, TemplateMismatchError):
        return


def test_keys_that_collide_are_refused() -> None:
    """Keys of equal hashes would take minutes."""
    manifest, _ = staged({"t": torch.ones(2)})
    keys = ["t", *(["int", f"{n * (2**61 - 1):x}"] for n in range(1, 3000))]
    tree: Any = ["dict", keys, [["tensor", 0], *[0] * (len(keys) - 1)]]
    with pytest.raises(RemoteProtocolError, match="collide"):
        matching(replace(manifest, tree=tree), {"t": torch.zeros(2)})
