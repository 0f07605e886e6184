"""Fingerprints: what they cover, how they add up, and what a comparison says."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt import Fingerprint, Limits
from aiockpt.errors import (
    FingerprintMismatchError,
    IntegrityError,
    LimitExceededError,
    RemoteProtocolError,
    StorageError,
    UnsupportedLeafError,
)
from aiockpt.format.fingerprint import NOTHING, ReplicaPart, TensorSums
from aiockpt.format.limits import FILE_LIMITS
from tests.support.memory import forget_the_peak, resident

A, B = "a" * 32, "b" * 32


def record(
    *parts: tuple[int, int, str], shape: tuple[int, ...] = (4, 4), plain: bool = False
) -> Fingerprint:
    """Return a fingerprint of one tensor ``w`` with these parts."""
    rows = [ReplicaPart(*part) for part in parts]
    return Fingerprint({"w": TensorSums.of("w", "float32", shape, rows, plain=plain)})


def state(seed: int = 0) -> dict[str, Any]:
    """Return a state dict of several kinds of values."""
    torch.manual_seed(seed)
    weight = torch.rand(300, 40)
    return {
        "model": {"w": weight, "b": torch.rand(40, dtype=torch.bfloat16)},
        "tied": [weight, {"again": weight}],
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}},
        "step": 7,
        "name": "run",
        "other": object(),
    }


ANOTHER = Fingerprint({"x": TensorSums("x", "int8", (2,), True, (A,), ())})


class Leaf:
    """A value of a type that torch does not know."""

    def __init__(self, data: Any) -> None:
        self.data = data


class TestWhatIsCovered:
    """Each tensor has a record by its path."""

    def test_tensors_are(self) -> None:
        """Each path of a tied tensor has one, and plain values have none."""
        found = aiockpt.fingerprint(state())
        paths = ["model.b", "model.w", "optim.state[0].step", "tied[0]"]
        assert sorted(found.tensors) == [*paths, "tied[1].again"]
        assert found.tensors["tied[0]"].wholes == found.tensors["model.w"].wholes
        assert found.tensors["model.b"].kind == "bfloat16 [40]"
        assert found.require(aiockpt.fingerprint(state())) == []

    def test_what_cannot_be_is_refused(self) -> None:
        """No tensor is left out silently, and no module."""
        for value in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
            with pytest.raises(UnsupportedLeafError, match=r"a\.b is a .* tensor"):
                aiockpt.fingerprint({"a": {"b": value}})
        with pytest.raises(UnsupportedLeafError, match=r"pass module\.state_dict\(\)"):
            aiockpt.fingerprint(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize("value", [None, 42, b"run", bytearray(2), object()])
    def test_what_could_have_no_tensor_is_refused(self, value: Any) -> None:
        """A number that is passed by mistake would equal any other one."""
        with pytest.raises(TypeError, match=f"not a {type(value).__name__}"):
            aiockpt.fingerprint(value)
        assert not aiockpt.fingerprint([value]).tensors

    def test_what_nobody_could_read_is_refused(self) -> None:
        """`from_json` bounds a path and the number of dimensions."""
        most = aiockpt.fingerprint({"a" * (16 << 10): torch.ones([1] * 64)})
        assert Fingerprint.from_json(most.to_json()) == most
        with pytest.raises(
            UnsupportedLeafError, match="a path of 16385 char"
        ) as caught:
            aiockpt.fingerprint({"a" * ((16 << 10) + 1): torch.ones(1)})
        assert len(str(caught.value)) < 500
        with pytest.raises(UnsupportedLeafError, match="w is a tensor with 65 dim"):
            aiockpt.fingerprint({"w": torch.ones([1] * 65)})

    def test_a_tensor_in_a_registered_leaf_is(self) -> None:
        """A leaf of a type that the user has registered is made of its parts."""
        aiockpt.register_leaf(
            Leaf, tag="test.Leaf", encode=lambda leaf: {"data": leaf.data}, decode=Leaf
        )
        found = aiockpt.fingerprint([Leaf(torch.ones(3)), torch.Size([2])])
        assert [*found.tensors] == ["[0].data"]

    def test_paths_that_read_the_same_stay_apart(self) -> None:
        """A key with a dot is another path than two keys, in any order of the dict."""
        one, two, three = (torch.ones(size) for size in (1, 2, 3))
        values: dict[str, Any] = {"a.b": one, "a.b#2": two, "a": {"b": three}}
        found = aiockpt.fingerprint(values)
        shapes = {path: each.shape for path, each in found.tensors.items()}
        assert shapes == {"a.b": (3,), "a.b#2": (1,), "a.b#2#2": (2,)}
        for items in permutations(values.items()):
            assert aiockpt.fingerprint(dict(items)) == found

    @pytest.mark.parametrize("path", ["http://host:1/checkpoint/", Path("nowhere")])
    def test_a_path_must_be_a_checkpoint(self, path: Any) -> None:
        """A URL is for a transport, and a missing directory an error."""
        with pytest.raises((ValueError, StorageError)):
            aiockpt.fingerprint(path)

    def test_no_tensor_is_copied_as_a_whole(self) -> None:
        """One that is not contiguous is copied by parts, while they are summed."""
        aiockpt.fingerprint({"w": torch.ones(1 << 21)})  # the tables are kept
        images = torch.rand(1, 512, 4, 4).contiguous(memory_format=torch.channels_last)
        state = {
            "images": images.expand(1 << 14, -1, -1, -1),
            "experts": torch.rand(1, 8, 1 << 12, 1).expand(1 << 10, -1, -1, 4).mT,
        }
        assert sum(each.nbytes for each in state.values()) == 1 << 30
        before = forget_the_peak()
        aiockpt.fingerprint(state)
        assert resident("VmHWM") - before < 192 << 20

    def test_a_directory_is(self, tmp_path: Path) -> None:
        """What was saved has the fingerprint of the state that was saved."""
        saved = {key: value for key, value in state().items() if key != "other"}
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save(saved, tmp_path / "run")
        ours = aiockpt.fingerprint(saved)
        for path in (tmp_path / "run", *(tmp_path / "run").glob("*.safetensors")):
            assert ours.require(aiockpt.fingerprint(path)) == []
        torch.save(saved["model"], tmp_path / "model.pt")
        of_torch = aiockpt.fingerprint(tmp_path / "model.pt")
        assert of_torch == aiockpt.fingerprint(saved["model"])
        with pytest.raises(ValueError, match="leave out group="):
            aiockpt.fingerprint(tmp_path / "run", group=object())  # type: ignore[arg-type]

    def test_bytes_on_disk_are_verified(self, tmp_path: Path) -> None:
        """A damaged file has no fingerprint."""
        with aiockpt.make_sync_checkpointer() as checkpointer:
            checkpointer.save({"w": torch.ones(1000)}, tmp_path / "run")
        (file,) = (tmp_path / "run").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-8] ^= 1
        file.write_bytes(data)
        with pytest.raises(IntegrityError, match="chunk 0"):
            aiockpt.fingerprint(tmp_path / "run")


class TestSums:
    """Fingerprints of ranks add up; replicas count once."""

    def test_parts_of_a_replica_are_added(self) -> None:
        """A tensor is whole when all of its elements are there."""
        half = record((0, 8, "0" * 15 + "1" + "f" * 16))
        other = record((0, 8, "0" * 15 + "2" + "0" * 15 + "1"))
        whole = record((0, 16, "0" * 15 + "3" + "0" * 16))
        assert half + other == other + half == whole
        assert sum([half, other], Fingerprint()) == whole

    def test_replicas_are_compared(self) -> None:
        """Parts of different replicas are not added; equal wholes are one."""
        parts = [record((nth, 8, A)) for nth in (0, 0, 1, 1)]
        both = sum(parts, Fingerprint())
        assert len(both.tensors["w"].wholes) == 1
        with pytest.raises(FingerprintMismatchError, match="covers 50 % of w: add up"):
            (parts[0] + parts[2]).require(both)
        wrong = both + record((2, 16, B))
        with pytest.raises(FingerprintMismatchError, match="replicas of w differ"):
            both.require(wrong)
        with pytest.raises(FingerprintMismatchError, match=r"differ .* in ours"):
            wrong.require(both)

    def test_plain_tensors_are_never_added(self) -> None:
        """Equal ones are one; those that differ are listed and left out."""
        plain = record((0, 16, A), plain=True)
        assert plain + plain == plain
        for other in (
            record((0, 16, B), plain=True),
            record((0, 5, A), shape=(5,), plain=True),
        ):
            found = plain + other
            assert found.by_rank == ("w",)
            assert not found.tensors
            assert found + plain == found
            for ours, theirs in [(found, plain), (plain, found)]:
                with_another = [each + ANOTHER for each in (ours, theirs)]
                assert with_another[0].require(with_another[1]) == []

    def test_a_plain_tensor_equals_a_distributed_one(self) -> None:
        """The elements count, not how they are held."""
        plain, spread = record((0, 16, A), plain=True), record((0, 16, A))
        assert plain.require(spread) == spread.require(plain) == []
        assert (plain + spread).require(spread) == []
        with pytest.raises(FingerprintMismatchError, match="replicas of w differ"):
            spread.require(plain + record((0, 16, B)))

    def test_many_are_added_in_any_order(self) -> None:
        """The sum of all does not depend on which one comes first."""
        parts = [record((nth, 4, A), (7, 4, B)) for nth in (0, 0, 1, 1)]
        total = sum(parts, Fingerprint())
        assert Fingerprint.total(parts) == total
        assert Fingerprint.total([]) == Fingerprint()
        plain = [record((0, 16, sums), plain=True) for sums in (A, B)]
        both = Fingerprint.total([*plain, parts[0]])
        assert both.tensors["w"].wholes == (A, B)
        for some in permutations([*plain, parts[0]]):
            assert Fingerprint.total(some) == both
        by_rank = Fingerprint({}, ("w",))
        other = record((0, 8, A), shape=(5, 5))
        for some in permutations([by_rank, parts[0], other]):
            assert Fingerprint.total(some) == by_rank

    def test_parts_of_different_tensors_are_refused(self) -> None:
        """Ranks that disagree about a shape have no sum."""
        with pytest.raises(FingerprintMismatchError, match=r"\[4, 4\] on one rank"):
            record((0, 8, A)) + record((0, 8, A), shape=(4, 2))

    def test_a_rank_that_is_added_twice_shows(self) -> None:
        """More than all elements are no tensor."""
        part = record((0, 12, A))
        with pytest.raises(FingerprintMismatchError, match="150 % of w: a rank was"):
            (part + part).require(record((0, 16, A)))

    @pytest.mark.parametrize(
        ("count", "said"),
        [
            (99_999, r"99\.9 % of w: add"),
            (100_001, r"100\.1 % of w: a rank"),
        ],
    )
    def test_what_is_not_whole_never_reads_so(self, count: int, said: str) -> None:
        """A percentage is not rounded to 100."""
        whole = record((0, 100_000, A), shape=(100_000,))
        with pytest.raises(FingerprintMismatchError, match=f"ours covers {said}"):
            record((0, count, A), shape=(100_000,)).require(whole)

    def test_a_tensor_without_elements_is_whole(self) -> None:
        """It needs no rank."""
        assert record(shape=(0, 3)).require(record((0, 0, NOTHING), shape=(0, 3))) == []

    def test_only_fingerprints_are_added(self) -> None:
        """Anything else is a TypeError."""
        with pytest.raises(TypeError):
            record() + 1  # type: ignore[operator]
        with pytest.raises(TypeError, match="not a dict"):
            record().require({})  # type: ignore[arg-type]


class TestMessages:
    """A comparison names what is wrong, and returns what was not compared."""

    def test_it_names_the_tensors(self) -> None:
        """Values, dtypes, shapes and missing paths are named, ten of them."""
        ours = {f"w{n}": torch.ones(2) for n in range(12)}
        theirs = {name: torch.zeros(2) for name in ours}
        with pytest.raises(FingerprintMismatchError) as caught:
            aiockpt.fingerprint(ours).require(aiockpt.fingerprint(theirs))
        assert f"{caught.value}".startswith("w0 differs; w1 differs; ")
        assert f"{caught.value}".endswith("; w9 differs; and 2 more")
        assert [*caught.value.faults] == [*ours]
        assert isinstance(caught.value, IntegrityError)

    @pytest.mark.parametrize(
        ("theirs", "said"),
        [
            ({"a": torch.ones(3)}, r"a is float32 \[2\] in ours and float32 \[3\] in"),
            ({"a": torch.ones(2).double()}, r"float32 \[2\] in ours and float64 \[2\]"),
            ({"b": torch.ones(2)}, "a is missing in theirs"),
        ],
    )
    def test_it_names_other_facts(self, theirs: Any, said: str) -> None:
        """Whatever is not the same has a reason."""
        ours = aiockpt.fingerprint({"a": torch.ones(2)})
        with pytest.raises(FingerprintMismatchError, match=said):
            ours.require(aiockpt.fingerprint(theirs))

    def test_it_returns_what_only_the_others_have(self) -> None:
        """A selection compares less, and nothing at all is an error."""
        theirs = aiockpt.fingerprint({"b": torch.ones(2), "a": torch.ones(1)})
        assert aiockpt.fingerprint({"a": torch.ones(1)}).require(theirs) == ["b"]
        with pytest.raises(FingerprintMismatchError, match="no tensor to compare"):
            aiockpt.fingerprint({}).require(theirs)

    def test_a_comparison_of_nothing_is_an_error(self) -> None:
        """Plain tensors of which every one differs between ranks prove nothing."""
        good = aiockpt.fingerprint({"w": torch.ones(2), "b": torch.ones(1)})
        torn = good + aiockpt.fingerprint({"w": torch.zeros(2), "b": torch.zeros(1)})
        said = "b cannot be compared: it differs between the ranks of"
        for ours, theirs, side in [
            (torn, good, "ours; w cannot"),
            (good, torn, "theirs; w cannot"),
            (torn, torn, "ours; w cannot"),
            (torn, torn + ANOTHER, "ours; w cannot"),
        ]:
            with pytest.raises(FingerprintMismatchError, match=f"{said} {side}") as e:
                ours.require(theirs)
            assert [*e.value.faults] == ["b", "w"]
        with pytest.raises(FingerprintMismatchError, match=r"^w is missing in theirs$"):
            (torn + record((0, 16, A))).require(Fingerprint({}, ("b",)))
        assert aiockpt.fingerprint({}).require(aiockpt.fingerprint({"a": 1})) == []


class TestJSON:
    """A fingerprint travels as JSON, which a hostile peer may have written."""

    def test_it_survives(self) -> None:
        """What was written is read back."""
        found = aiockpt.fingerprint(state()) + record((3, 5, A), (9, 1, B))
        found += Fingerprint({}, ("rng",))
        assert Fingerprint.from_json(found.to_json()) == found
        assert Fingerprint.from_json(found.to_json().decode()) == found

    GOOD = '["w","float32",[4,4],false,[],[[0,8,"%s"],[1,8,"%s"]]]' % (A, B)  # noqa: UP031
    BAD = (
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"aiockpt":1,"tensors":[],"by_rank":[],"more":1}',
        '{"aiockpt":2,"tensors":[],"by_rank":[]}',
        '{"aiockpt":1,"tensors":[],"by_rank":["b","a"]}',
        '{"aiockpt":1,"tensors":[],"by_rank":["a","a"]}',
        '{"aiockpt":1,"tensors":[],"by_rank":["\\ud800"]}',
    )
    CHANGES = (
        ("float32", "float31"),
        ("[4,4]", "[4,-4]"),
        ("[4,4]", "[4,4.0]"),
        ("[4,4]", f"[{2**56},2]"),
        ("[4,4]", f"[{2**57}]"),
        ("[4,4]", str([1] * 65)),
        ("[4,4]", "[2,4]"),
        ("false", "true"),
        ("false", "0"),
        ("[],", f'["{B}","{A}"],'),
        ("[],", f'["{A}","{A}"],'),
        (A, A.upper()),
        (A, A[1:]),
        ("[0,8,", "[1,8,"),
        ("[0,8,", "[-1,8,"),
        ("[0,8,", f"[0,{2**64},"),
        ("]]]", "],7]]"),
        ('"w"', "7"),
        ('"w"', f'"{"w" * (16 << 10)}w"'),
    )

    @pytest.mark.parametrize("text", BAD, ids=lambda text: text[:60])
    def test_malformed_documents_are_refused(self, text: str) -> None:
        """Nothing else comes of them."""
        with pytest.raises(RemoteProtocolError):
            Fingerprint.from_json(text)

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1][:40])
    def test_malformed_records_are_refused(self, change: tuple[str, str]) -> None:
        """Each rule of the form is checked."""
        frame = '{"aiockpt":1,"tensors":[%s],"by_rank":[]}'
        assert Fingerprint.from_json(frame % self.GOOD).tensors["w"].parts
        assert change[0] in self.GOOD
        with pytest.raises(RemoteProtocolError):
            Fingerprint.from_json(frame % self.GOOD.replace(*change, 1))
        twice = f"{self.GOOD},{self.GOOD}"
        with pytest.raises(RemoteProtocolError):
            Fingerprint.from_json(frame % twice)
        both = (frame % self.GOOD).replace('"by_rank":[]', '"by_rank":["w"]')
        with pytest.raises(RemoteProtocolError, match="compared and left out"):
            Fingerprint.from_json(both)

    @pytest.mark.parametrize(
        "rest",
        ["[],[]", f'["{A}"],[]', f'["{NOTHING}"],[[0,1,"{A}"]]'],
    )
    @pytest.mark.parametrize("plain", ["false", "true"])
    def test_an_empty_tensor_is_whole(self, plain: str, rest: str) -> None:
        """A comparison would have nothing to divide by."""
        text = '{"aiockpt":1,"tensors":[["w","int8",[0,3],%s,%s]],"by_rank":[]}'
        with pytest.raises(RemoteProtocolError, match=r"whole|is one"):
            Fingerprint.from_json(text % (plain, rest))

    @given(st.data())
    def test_random_changes_raise_nothing_else(self, data: st.DataObject) -> None:
        """Any bytes give a fingerprint or one of the two errors."""
        text = bytearray(record((0, 8, A), (1, 8, B)).to_json())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(text) - 1))
            text[at] = data.draw(st.integers(0, 255))
        with suppress(RemoteProtocolError, LimitExceededError):
            Fingerprint.from_json(bytes(text)).to_json()

    def test_limits_hold(self) -> None:
        """Neither a long text nor many records are decoded."""
        text = aiockpt.fingerprint({str(n): torch.ones(1) for n in range(20)}).to_json()
        for limits in (Limits(max_header_bytes=100), Limits(max_tensors=19)):
            with pytest.raises(LimitExceededError):
                Fingerprint.from_json(text, limits=limits)
        assert len(Fingerprint.from_json(text, limits=FILE_LIMITS).tensors) == 20
