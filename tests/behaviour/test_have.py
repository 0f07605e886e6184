"""``recv_checkpoint(have=)``: what is there already is not fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiockpt import Progress, load, make_sync_checkpointer
from aiockpt.errors import LocalProtocolError, UnsupportedLeafError
from aiockpt.testing import assert_same
from tests.support.proofs import proves
from tests.support.states import State, rich, states
from tests.support.transports import (
    CHUNK,
    WIDE,
    Events,
    chunked,
    counted,
    pair,
    receive,
)

pytestmark = pytest.mark.usefixtures("no_blocking")

hows = pytest.mark.parametrize(
    "how", ["anew", "into", "direct", "home", "home, direct"]
)
"""Fresh, into a template from another state dict, and a template that has some."""


def options_of(
    how: str, have: Any, make: Callable[[], dict[Any, Any]] = chunked
) -> dict[str, Any]:
    """Return the arguments of a receive that has ``have``, which ``make`` makes."""
    direct = "direct" in how
    if how.startswith("home"):
        return {"into": have, "have": True, "direct": direct}
    if how == "anew":
        return {"have": have}
    return {"into": cleared(make()), "have": have, "direct": direct}


def cleared(state: Any) -> Any:
    """Return it with zeros in its tensors."""
    with torch.no_grad():
        for tensor in tensors_of(state):
            tensor.zero_()
    return state


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a state dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)


@proves(
    "cell HTTPTransport.recv_checkpoint, have=: success",
    "cell HTTPTransport.recv_checkpoint, have=True, into=: success",
)
@pytest.mark.asyncio
@hows
@pytest.mark.parametrize("changed", [0, 3])
async def test_what_has_not_changed_is_not_fetched(
    how: str, changed: int, events: Events
) -> None:
    """The sender counts the bytes; progress and event tell as many."""
    seen: list[Progress] = []
    have = chunked()
    for n in range(changed):
        have[f"w{n}"][n] += 0.5
    async with pair(state=chunked()) as (sender, receiver):
        options = {**options_of(how, have), "progress": seen.append}
        got, nbytes = await counted(sender, receiver, **options)
    assert_same(got, chunked())
    assert nbytes == changed * CHUNK
    event = [each for each in events if each.stop == "recv"][-1]
    last, whole = seen[-1], 8 * CHUNK
    assert (last.bytes_done, last.bytes_total) == (whole, whole)
    assert (last.chunks_done, last.chunks_total) == (8, 8)
    assert last.bytes_reused == whole - nbytes
    assert (event.nbytes, event.reused) == (nbytes, whole - nbytes)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["anew", "into", "home, direct"])
async def test_a_change_of_anything_is_fetched(how: str) -> None:
    """A changed view, strided tensor or value is fetched, and nothing else."""
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda state: None,
        lambda state: state["view"].fill_(1),
        lambda state: state["strided"][7:9].fill_(1),
        lambda state: state["sparse"].fill_(1),
        lambda state: state.update(blob=b"x" * 99_999 + b"y"),
        lambda state: state["array"].fill(5),
        lambda state: state["conj"].fill_(1),
        lambda state: state["optimizer"]["groups"][0].update(lr=0.2),
    ]
    async with pair() as (sender, receiver):
        for step, change in enumerate(changes):
            state = rich()
            change(state)
            await sender.send_checkpoint([], step, state)
            plain = {**options_of(how, rich(), rich), "have": None}
            expected = await receive(sender, receiver, step, **plain)
            options = options_of(how, rich(), rich)
            got, nbytes = await counted(sender, receiver, **options)
            assert_same(got, expected)
            assert got["model"]["embed"] is got["model"]["head"]
            assert (0 < nbytes < 8 * CHUNK) if 0 < step < 7 else not nbytes


@pytest.mark.asyncio
async def test_a_structure_that_changed_is_used_where_it_did_not() -> None:
    """Other keys, shapes and dtypes are fetched; another order is no matter."""
    have = chunked()
    have["w1"] = have["w1"].to(torch.float64)
    have["w2"] = have["w2"].view(4, -1)
    have["w3"] = 3
    have["more"] = torch.ones(5)
    have["w0"] = torch.ones(WIDE, device="meta")
    del have["w5"]
    have = dict(reversed(have.items()))
    async with pair(state=chunked()) as (sender, receiver):
        got, nbytes = await counted(sender, receiver, have=have)
        assert_same(got, chunked())
        assert nbytes == 5 * CHUNK


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["anew", "home"])
async def test_memory_that_was_used_before_hides_nothing(how: str) -> None:
    """What no tensor has, between and behind them, is zeros again."""
    async with pair(keep_arena=True) as (sender, receiver):
        await sender.send_checkpoint([], 1, {"x": torch.full((400_000,), -1.0)})
        await receive(sender, receiver)
        await sender.send_checkpoint([], 2, rich())
        options = options_of(how, rich(), rich)
        got, nbytes = await counted(sender, receiver, **options)
        assert nbytes == 0
        assert_same(got["sparse"], rich()["sparse"])
        assert_same(got["odd"], rich()["odd"])


@pytest.mark.asyncio
async def test_ties_that_are_none_here_may_differ() -> None:
    """Memory that is shared on one side only is compared like any other."""
    weight = torch.arange(WIDE, dtype=torch.float32)
    tied = {"a": weight, "b": weight, "c": weight[: WIDE // 2]}
    loose = {key: value.clone() for key, value in tied.items()}
    async with pair() as (sender, receiver):
        for step, (state, have) in enumerate([(tied, loose), (loose, tied)]):
            await sender.send_checkpoint([], step, state)
            got, _ = await counted(sender, receiver, have=have)
            assert_same(got, state)


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    "view", [lambda: torch.zeros(256, 512).t(), lambda: torch.zeros(512, 512)[:, ::2]]
)
async def test_a_template_with_other_strides_has_its_bytes(
    direct: bool, view: Callable[[], torch.Tensor]
) -> None:
    """They are compared in the order in which they were sent."""
    state = {"w": torch.arange(512.0 * 256).view(512, 256), "b": torch.ones(8)}
    into = {"w": view(), "b": torch.zeros(8)}
    async with pair(chunk_bytes=CHUNK) as (sender, receiver):
        for step in range(3):
            state["b"] += 1
            await sender.send_checkpoint([], step, state)
            options = {"into": into, "have": True, "direct": direct}
            _, nbytes = await counted(sender, receiver, **options)
            assert all(torch.equal(into[key], state[key]) for key in state)
            assert nbytes <= CHUNK or not step


@proves("cell HTTPTransport.recv_checkpoint, have=: success")
@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["anew", "into", "direct"])
async def test_what_changes_meanwhile_is_fetched(how: str) -> None:
    """What was copied is verified, and not what was compared before."""
    have = chunked()
    options = options_of(how, have)

    def disturb(progress: Progress) -> None:
        if progress.stop == "fetch_chunk":
            have["w4"].fill_(7)

    async with pair(state=chunked()) as (sender, receiver):
        options["progress"] = disturb
        before = sender.statistics().bytes_sent
        got = await receive(sender, receiver, **options)
        assert sender.statistics().bytes_sent - before > CHUNK
    assert_same(got, chunked())


@pytest.mark.asyncio
@hows
async def test_a_selection_fetches_what_is_neither_there(how: str) -> None:
    """A selected receive fetches only the selected chunks that differ."""
    have = chunked()
    have["w3"].zero_()
    have["w7"].zero_()
    options = options_of(how, have) | {"select": ["w2", "w3", "n"]}
    async with pair(state=chunked()) as (sender, receiver):
        got, nbytes = await counted(sender, receiver, **options)
    assert nbytes == CHUNK
    for key in ("w2", "w3", "n"):
        assert_same(got[key], chunked()[key])
    if how.startswith("home"):
        assert not have["w7"].any()


def saved(place: Path) -> Any:
    """Return a checkpoint of the disk, mapped, with a chunk that differs."""
    with make_sync_checkpointer() as checkpointer:
        checkpointer.save(chunked() | {"w3": torch.zeros(WIDE)}, place)
    return load(place, mmap=True)


@pytest.mark.asyncio
async def test_a_file_is_a_state_dict_that_is_mapped(tmp_path: Path) -> None:
    """An older checkpoint on the disk spares the network."""
    have = await asyncio.to_thread(saved, tmp_path / "step-0")
    async with pair(state=chunked()) as (sender, receiver):
        got, nbytes = await counted(sender, receiver, have=have)
    assert nbytes == CHUNK
    assert_same(got, chunked())


@pytest.mark.asyncio
async def test_the_template_needs_to_be_there() -> None:
    """``have=True`` needs a template."""
    async with pair() as (sender, receiver):
        with pytest.raises(LocalProtocolError, match="pass into="):
            await receive(sender, receiver, have=True)
        with pytest.raises(UnsupportedLeafError):
            await receive(sender, receiver, have={"x": object()})
        assert not sender.statistics().requests


fewer = settings(max_examples=settings().max_examples * 2 // 5)
"""Each example sends and receives."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd dtypes
@fewer
@given(sent=states(), have=states(), same=st.booleans())
def test_any_two_states(sent: State, have: State, same: bool) -> None:
    """The result is what was sent, whatever the receiver had."""

    async def run() -> None:
        async with pair(state=dict(sent)) as (sender, receiver):
            held = dict(sent) if same else dict(have)
            got = await receive(sender, receiver, have=held)
            assert_same(got, dict(sent))

    asyncio.run(run())
