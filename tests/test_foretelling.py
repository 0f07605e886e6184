"""A header that says what a template expects is known, and any other one is decoded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from aiockpt.errors import AiockptError, IntegrityError, RemoteProtocolError
from aiockpt.template import Match, Template
from aiockpt.wire import manifest as reading
from aiockpt.wire.layout import ID_SLICE, LENGTH_BYTES, snapshot_id_of
from aiockpt.wire.manifest import Manifest, decode_header
from pipeline import LIMITS
from states import State, states
from templates import staged


def templated(state: object) -> Template:
    """Return a template."""
    return Template(state, limits=LIMITS, allow_pickle=False)


def model(fill: float = 0.0) -> dict[str, Any]:
    """Return a state dict with tensors of several sizes, a tie, a view and values."""
    weight = torch.full((4, 3), fill)
    return {
        "half": torch.full((3,), fill, dtype=torch.float16),
        "weight": weight,
        "tied": weight,
        "view": weight[1:],
        "bias": torch.nn.Parameter(torch.full((5,), fill)),
        "steps": {"count": torch.tensor(int(fill)), "rate": 0.5, "name": "é"},
    }


def facts(found: Match, template: Template) -> tuple[object, ...]:
    """Return where everything goes."""
    return (
        [(each.address, each.nbytes, len(each.parts)) for each in found.backings],
        {number: id(tensor) for number, tensor in found.tensors.items()},
        [id(tensor) for tensor in found.tensors.beside({}) if tensor.numel()],
        {*map(id, found.changed())},
        found.parts,
        found.blobs,
        [*found.wholes],
    )


def matched(header: bytes, template: object, *, foretell: bool) -> object:
    """Read a header and match it; return where everything goes, or what is wrong."""
    try:
        own = templated(template)
        foretold = own.foretell() if foretell else None
        found = decode_header(header, limits=LIMITS, foretold=foretold)
        assert isinstance(found, Manifest)
        return facts(own.match(found), own), replace(found, header=b"")
    except AiockptError as error:
        return type(error), str(error)


def agree(state: object, template: object) -> None:
    """Check that nothing depends on whether a header was foretold."""
    header = bytes(staged(state)[0].header)
    plain = matched(header, template, foretell=False)
    assert matched(header, template, foretell=True) == plain


class TestForetold:
    """What a template expects."""

    def test_an_equal_header_is_not_decoded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its entries and its tree are the template's own."""
        header = bytes(staged(model(1.0) | {"steps": {}})[0].header)
        own = templated(model() | {"steps": {}})
        foretold = own.foretell()
        assert foretold is not None
        monkeypatch.setattr(reading, "decode_entries", None)
        found = decode_header(header, limits=LIMITS, foretold=foretold)
        assert isinstance(found, Manifest)
        assert (found.entries, found.tree) == (foretold.entries, foretold.tree)
        assert found.entries is foretold.entries
        assert own.match(found).tensors

    def test_other_values_leave_the_entries_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As with the number of a step, which a template has of an earlier one."""
        header = bytes(staged({**model(1.0), "step": 7})[0].header)
        own = templated({**model(), "step": 3})
        monkeypatch.setattr(reading, "decode_entries", None)
        found = decode_header(header, limits=LIMITS, foretold=own.foretell())
        assert isinstance(found, Manifest)
        assert "step" in str(found.tree)
        assert own.match(found).tensors

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"w": torch.empty(0)},
            {"blob": b"x" * 5000, "w": torch.ones(2)},
            {"sparse": torch.eye(2).to_sparse(), "w": torch.ones(2)},
            {"bad": float("nan"), "big": 1 << 70, "w": torch.ones(2)},
            {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
            {"__metadata__": torch.ones(1)},
            {"bits": torch.zeros(2, dtype=torch.bits8), "w": torch.ones(2)},
        ],
    )
    def test_odd_states_are_matched_as_ever(self, state: dict[str, Any]) -> None:
        """Also those of which nothing can be foretold."""
        agree(state, {k: v for k, v in state.items() if k != "sparse"})
        agree(state, state)

    @pytest.mark.parametrize(
        "change",
        [
            lambda new: new.update(weight=new["weight"].clone()),  # no longer tied
            lambda new: new.update(half=new["half"].float()),
            lambda new: new.update(half=torch.zeros(4, dtype=torch.float16)),
            lambda new: new.update(half=torch.zeros(6, dtype=torch.float16)[::2]),
            lambda new: new.update(view=new["weight"][:3]),
            lambda new: new["bias"].requires_grad_(requires_grad=False),
            lambda new: new.update(bias=new["bias"].detach()),
            lambda new: new["bias"].data.resize_(6),
            lambda new: new.update(new=torch.ones(1)),
            lambda new: new.pop("half"),
            lambda new: new.update(half=new.pop("half")),  # the last key now
            lambda new: new["steps"].update(rate=1),
            lambda new: new.update(steps=[new["steps"]]),
        ],
    )
    def test_what_differs_is_found_out(
        self, change: Callable[[dict[str, Any]], object]
    ) -> None:
        """It fits as well, or fails in the same words."""
        new = model()
        change(new)
        agree(model(), new)
        agree(new, model())

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    @given(state=states(), other=states())
    def test_nothing_depends_on_it(self, state: State, other: State) -> None:
        """Whatever is sent, to whatever template."""
        agree(dict(state), dict(state))
        agree(dict(state), dict(other))

    def test_nothing_outlives_the_match(self) -> None:
        """What was foretold keeps no template alive."""
        state = model()
        own = templated(state)
        foretold = own.foretell()
        header = bytes(staged(model())[0].header)
        found = decode_header(header, limits=LIMITS, foretold=foretold)
        gone = weakref.ref(state["half"])
        del state, own
        gc.collect()
        assert gone() is None
        assert isinstance(found, Manifest)

    def test_a_template_is_foretold_once(self) -> None:
        """The tree has the manifest's numbers then."""
        own = templated(model())
        assert own.foretell() is not None
        assert own.foretell() is None


def resealed(header: bytes) -> bytes:
    """Return a header with the digest and the length that belong to it."""
    text = bytearray(header[LENGTH_BYTES:])
    text[ID_SLICE] = snapshot_id_of(bytes(text)).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + bytes(text)


class TestHostile:
    """A header that is known is judged like any other one."""

    def refused(self, header: bytes) -> AiockptError:
        """Return why it is refused, foretold or not."""
        found = []
        for foretold in (None, templated(model()).foretell()):
            with pytest.raises(AiockptError) as caught:
                decode_header(header, limits=LIMITS, foretold=foretold)
            found.append(caught.value)
        assert [*map(str, found)] == [str(found[0])] * 2
        return found[1]

    def test_a_damaged_header_is_refused(self) -> None:
        """The digest of all of it comes first."""
        header = bytearray(staged(model())[0].header)
        header[-70] ^= 1
        assert isinstance(self.refused(bytes(header)), IntegrityError)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b'\\"step\\":1,', b'\\"step\\":-1,'),
            (b'\\"entries\\":', b'\\"entries\\":1'),
            (b'\\"chunk_bytes\\":65536', b'\\"chunk_bytes\\":65537'),
            (b'\\"digests\\":\\"', b'\\"digests\\":\\"00'),
            (b" " * 9, b" " * 8 + b"x"),
            (b'"data_offsets":[0,', b'"data_offsets":[1,'),
            (b"[0,", b"[0, "),
        ],
    )
    def test_a_contradiction_is_refused(self, old: bytes, new: bytes) -> None:
        """In the manifest, behind the entries, or in them."""
        header = bytes(staged(model())[0].header)
        assert old in header
        error = self.refused(resealed(header.replace(old, new, 1)))
        assert isinstance(error, RemoteProtocolError)

    def test_views_beyond_their_storage_are_refused(self) -> None:
        """They are checked against the entries that are known."""
        manifest = staged(model())[0]
        text = msgspec.json.decode(manifest.header[LENGTH_BYTES:])
        document = msgspec.json.decode(text["__metadata__"]["aiockpt"])
        old = msgspec.json.encode(document["views"][0])[:-1].replace(b'"', b'\\"')
        new = old[: old.rindex(b",", 0, old.rindex(b","))] + b",99,0"
        header = bytes(manifest.header)
        assert old in header
        error = self.refused(resealed(header.replace(old, new, 1)))
        assert "beyond its storage" in str(error) or "canonical" in str(error)
