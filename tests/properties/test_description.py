"""describe: a state dict as tree, entries and the memory that they come from."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from aiockpt import register_leaf
from aiockpt.errors import StateDictError, UnsupportedLeafError
from aiockpt.format.entries import Entry
from aiockpt.format.manifest import COMPACTED
from aiockpt.format.references import tensor_leaves
from aiockpt.state.flatten import Description, describe
from tests.support.states import LIMITS, State, states

if TYPE_CHECKING:
    from collections.abc import Callable

# At once: what it imports stays out of the collections that look for leaks.
with FakeTensorMode():
    FAKE = torch.ones(2)


class Nested(NamedTuple):
    """Travels as structure."""

    value: object


def described(state: object, **options: Any) -> Description:
    """Describe with the default limits."""
    return describe(state, limits=LIMITS, **options)


def names(description: Description) -> list[str]:
    """Return the names of the entries."""
    return description.entries.names


class TestEntries:
    """Tensors become entries."""

    def test_a_plain_tensor_is_an_entry_and_nothing_more(self) -> None:
        """The bytes of the entry are the tensor's own memory."""
        weight = torch.ones(2, 3)
        found = described({"model": {"w": weight}})
        (backing,) = found.backings
        assert names(found) == ["model.w"]
        assert [*found.entries] == [Entry("F32", (2, 3), (0, 24))]
        assert (backing.address, backing.nbytes) == (weight.data_ptr(), 24)
        assert not found.views
        assert found.entries.nbytes == 24

    def test_names_are_unique(self) -> None:
        """Keys that read alike, and the name that safetensors keeps for itself."""
        one = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, "__metadata__": 0}
        found = names(described({**one, "__metadata__": torch.ones(1)}))
        assert sorted(found) == ["__metadata__#2", "a.b", "a.b#2"]

    def test_views_that_overlap_are_one_entry(self) -> None:
        """It spans all of them."""
        base = torch.zeros(100)
        found = described([base[10:40], base[30:60]])
        assert found.entries.nbytes == 50 * 4
        assert [view.offset for view in found.views] == [0, 20]

    def test_views_that_start_far_apart_may_overlap(self) -> None:
        """Addresses are sorted region by region, and a tensor may span several."""
        base = torch.empty(4 << 20, dtype=torch.float64)
        found = described([base[1 << 20 :], torch.ones(1), base[: 3 << 20], base[-1:]])
        assert sorted(found.entries.sizes()) == [4, 32 << 20]

    def test_a_sparse_view_becomes_dense(self) -> None:
        """It uses less than half of the memory that it spans."""
        found = described(torch.zeros(100)[::3])
        assert found.entries.nbytes == 34 * 4
        assert [view.flags for view in found.views] == [COMPACTED]
        assert described(torch.zeros(100)[::2]).entries.nbytes == 99 * 4

    def test_an_element_that_is_repeated_travels_once(self) -> None:
        """The number of repetitions does not count."""
        huge = torch.zeros(1).expand(2**31, 2**30)
        assert huge.nbytes == 2**63
        assert described(huge).entries.nbytes == 4

    def test_columns_drag_nothing_along(self) -> None:
        """The bytes between columns do not travel; equal columns stay one."""
        base = torch.zeros(4096, 1024)
        found = described({"a": base[:, 0], "b": base[:, 1], "c": base[:, 0]})
        assert [*found.entries.sizes()] == [16384, 16384]
        assert [view.storage for view in found.views] == [0, 0, 1]
        assert all(view.flags == COMPACTED for view in found.views)

    def test_a_sparse_view_leaves_the_others_tied(self) -> None:
        """It alone would make them travel with what is not in the state dict."""
        base = torch.zeros(1000)
        found = described([base[:10], base[5:15], base[::10]])
        assert [*found.entries.sizes()] == [60, 400]

    def test_members_that_no_address_aligns_are_entries_of_their_own(self) -> None:
        """Those that the widest aligns stay with it."""
        memory = bytearray(64)
        wide = torch.frombuffer(memory, dtype=torch.int64, offset=3, count=4)
        tied = torch.frombuffer(memory, dtype=torch.int32, offset=7, count=4)
        odd = torch.frombuffer(memory, dtype=torch.int32, offset=4, count=4)
        found = described([wide, tied, odd])
        assert [*found.entries.sizes()] == [32, 16]
        assert [view.offset for view in found.views] == [1]

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
    @given(states())
    def test_every_tensor_is_aligned(self, state: State) -> None:
        """A tensor is aligned in the segment as in memory, since a machine may trap."""
        found = described(dict(state))
        numbers = dict(tensor_leaves(found.tree))
        for index, tensor in enumerate(state["tensors"]):
            number, itemsize = numbers["tensors", index], tensor.itemsize
            if number < len(found.entries):
                start = found.entries.starts[number]
            else:
                view = found.views[number - len(found.entries)]
                start = found.entries.starts[view.storage] + view.offset * itemsize
            assert start % itemsize == 0
        assert [0, *found.entries.stops[:-1]] == [*found.entries.starts]


def _freed() -> torch.Tensor:
    tensor = torch.ones(10)
    view = tensor[5:]
    tensor.untyped_storage().resize_(0)
    return view


def _cut() -> torch.Tensor:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(20)
    return tensor


def _packed() -> torch.Tensor:
    scales, zeros = torch.ones(4), torch.zeros(4)
    return torch.quantize_per_channel(
        torch.ones(4, 6), scales, zeros, 0, torch.quint4x2
    )


class _Subclass(torch.Tensor):
    pass


UNSUPPORTED: dict[str, Callable[[], object]] = {
    "object": object,
    "function": lambda: len,
    "module": lambda: torch.nn.Linear(1, 1),
    "generator": torch.Generator,
    "subclass": lambda: torch.ones(1).as_subclass(_Subclass),
    "str subclass": lambda: type("Str", (str,), {})("x"),
    "meta": lambda: torch.ones(1, device="meta"),
    "freed": _freed,
    "cut": _cut,
    "zero tensor": lambda: torch._efficientzerotensor((3,)),
    "fake": lambda: FAKE,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "packed": _packed,
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "lazy": torch.nn.UninitializedParameter,
    "masked array": lambda: np.ma.masked_array([1, 2], [False, True]),
    "object array": lambda: np.array([object()]),
    "records": lambda: np.zeros(2, dtype="i4,f4"),
}


class TestRefusals:
    """The error names what cannot travel before anything is copied."""

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", UNSUPPORTED)
    def test_an_unsupported_leaf_is_named(self, kind: str) -> None:
        """Wherever it is."""
        with pytest.raises(UnsupportedLeafError) as caught:
            described({"a": [torch.ones(1), {"b": UNSUPPORTED[kind]()}]})
        assert caught.value.path == "a[1].b"
        assert str(caught.value).startswith("a[1].b is a ")

    def test_all_that_cannot_travel_is_named_at_once(self) -> None:
        """The error names up to ten leaves, wherever they are."""
        state: dict[str, Any] = {
            "hooks": [print, object()],
            "odd": defaultdict(print, {}),
            "point": Nested(object()),
            "meta": torch.ones(2, device="meta"),
            "fine": torch.ones(1),
        }
        with pytest.raises(UnsupportedLeafError) as caught:
            described(state)
        text = str(caught.value)
        assert text.startswith("hooks[0] is a builtin_function_or_method: convert it")
        assert "; these cannot travel either: hooks[1] (a object), odd (a " in text
        assert "), point.value (a object), meta (a meta tensor)" in text
        assert len(caught.value.others) == 4

    def test_more_than_ten_are_counted(self) -> None:
        """The message stays short."""
        with pytest.raises(UnsupportedLeafError) as caught:
            described([object() for _ in range(25)])
        assert len(caught.value.others) == 9
        assert str(caught.value).endswith("[9] (a object) and 15 more")
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)

    def test_a_failure_while_looking_is_the_state_dict_s(self) -> None:
        """The error is a StateDictError, not the bare error of somebody else's code."""

        class Broken:
            def __init__(self, _: object = None) -> None:
                pass

        def fail(_: Broken) -> object:
            raise RuntimeError("no luck")

        register_leaf(
            Broken, tag="tests.Broken", encode=fail, decode=lambda _: Broken()
        )
        with pytest.raises(StateDictError, match="no luck"):
            described({"x": Broken()})

    def test_pickles_need_permission(self) -> None:
        """An error names a leaf that cannot be pickled even then."""
        with pytest.raises(UnsupportedLeafError):
            described({"x": frozenset})
        assert described({"x": frozenset}, allow_pickle=True).tree
        with pytest.raises(UnsupportedLeafError, match=r"^f is a function"):
            described({"f": lambda: None}, allow_pickle=True)

    def test_elements_that_would_be_written_twice_are_refused(self) -> None:
        """Two entries, which need not agree, have them; the later path is named."""
        base = torch.zeros(4096, 64)
        described([base[:, 0], base[:, 1]], writing=True)
        described([base[:, :2], base[:, 1:3]])
        with pytest.raises(UnsupportedLeafError, match="shares elements") as caught:
            described([base[:, :2], base[:, 1:3]], writing=True)
        assert caught.value.path == "[1]"

    def test_bytes_that_would_be_written_twice_are_refused(self) -> None:
        """No entry can hold both of two such buffers."""
        memory = bytearray(64)
        wide = torch.frombuffer(memory, dtype=torch.int64, count=4)
        odd = torch.frombuffer(memory, dtype=torch.int32, offset=5, count=1)
        with pytest.raises(UnsupportedLeafError, match="shares elements"):
            described([wide, odd], writing=True)
