"""Memory that a state dict gives up while it is in use is not touched any more.

Training code, FSDP and ``Module.to`` give tensors other memory, and replace them. An
address that was taken before then belongs to somebody else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiockpt.checkpointers import make_sync_checkpointer
from aiockpt.errors import (
    AiockptError,
    LocalProtocolError,
    PeerFailedError,
    UnsupportedLeafError,
)
from aiockpt.testing import assert_same
from tests.support.groups import both, moved, transports
from tests.support.saving import load, save
from tests.support.transports import pair, receive, transport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Change = Callable[[dict[str, Any]], object]

pytestmark = pytest.mark.asyncio

COUNT = 50_000


def state_of(fill: float) -> dict[str, Any]:
    """Return a state dict of a few chunks, with tensors in several containers."""
    return {
        "a": torch.full((COUNT,), fill),
        "layer": {"w": torch.full((COUNT,), fill), "b": torch.full((COUNT,), fill)},
        "moments": [torch.full((COUNT,), fill), torch.full((COUNT,), fill)],
        "square": torch.full((200, 200), fill).fill_diagonal_(0.5),
        "step": int(fill),
        "lr": 0.5,
    }


MEMORY: dict[str, Change] = {
    "other": lambda state: setattr(state["layer"]["w"], "data", torch.zeros(3)),
    "alike": lambda state: setattr(state["layer"]["w"], "data", torch.ones(COUNT)),
    "grown": lambda state: state["layer"]["w"].resize_(4 * COUNT),
    "freed": lambda state: state["layer"]["w"].untyped_storage().resize_(0),
    "put": lambda state: state["layer"]["w"].set_(torch.zeros(COUNT)),
}
CHANGES: dict[str, Change] = {
    **MEMORY,
    "shrunk": lambda state: state["layer"]["w"].resize_(3),
    "retyped": lambda state: setattr(
        state["layer"]["w"], "data", state["layer"]["w"].view(torch.int32)
    ),
    "swapped": lambda state: torch.utils.swap_tensors(
        state["layer"]["w"], torch.ones(COUNT)
    ),
    "replaced": lambda state: state["layer"].update(w=torch.ones(COUNT)),
    "wrapped": lambda state: state["layer"].update(
        w=torch.nn.Parameter(state["layer"]["w"])
    ),
    "removed": lambda state: state["layer"].pop("w"),
    "turned": lambda state: state["square"].t_(),
    "moved on": lambda state: state.update(layer=dict(state["layer"])),
    "in a list": lambda state: state["moments"].__setitem__(1, torch.ones(COUNT)),
    "shorter": lambda state: state["moments"].pop(),
}
PATHS = {
    **dict.fromkeys(CHANGES, r"layer\.w "),
    "turned": "square ",
    "moved on": "layer ",
    "in a list": r"moments\[1\] ",
    "shorter": r"moments\[1\] ",
}
CHUNKS = {"chunk_bytes": 64 << 10}


class Once:
    """Changes a state dict at the first bytes; it may be called from any thread."""

    def __init__(self, change: Change, state: dict[str, Any]) -> None:
        self.change, self.state = change, state
        self.victims: list[torch.Tensor] = []

    def __call__(self, progress: Any) -> None:
        done = getattr(progress, "bytes_done", progress)
        if done and not self.victims:
            self.change(self.state)
            # The allocator would give them the memory that was freed.
            self.victims = [torch.full((COUNT,), 5.0) for _ in range(8)]

    def check(self) -> None:
        """Check that it was called, and that nobody wrote to other tensors."""
        assert self.victims
        assert all(bool((victim == 5.0).all()) for victim in self.victims)


async def over_http(into: Any, seen: Once, path: Path, **options: Any) -> None:
    """Receive into it."""
    async with pair(state=state_of(2.0), **CHUNKS) as (sender, receiver):
        await receive(sender, receiver, into=into, progress=seen, **options)


async def what_differs(into: Any, seen: Once, path: Path) -> None:
    """Receive what it lacks."""
    into["a"].fill_(2.0)
    await over_http(into, seen, path, have=into)


async def prepared(into: Any, seen: Once, path: Path, *, later: bool = False) -> None:
    """Receive beside it, change it, and apply."""
    async with pair(state=state_of(2.0), **CHUNKS) as (sender, receiver):
        ready = await receiver.prepare(sender.metadata(), 1, into=into)
        seen(1)
        await ready.apply_async() if later else ready.apply()


async def over_a_group(into: Any, seen: Once, path: Path, **options: Any) -> None:
    """Receive from another rank."""
    async with transports() as (sender, receiver):
        sent, got = await both(
            sender, receiver, state_of(2.0), into=into, progress=seen, **options
        )
    assert isinstance(sent, AiockptError | None)
    if isinstance(got, BaseException):
        raise got


async def from_a_file(into: Any, seen: Once, path: Path, **options: Any) -> None:
    """Load a file."""
    load(save(path / "s", state_of(2.0)), into, on_bytes=seen, **options)


async def from_a_peer(into: Any, seen: Once, path: Path) -> None:
    """Load from a sender."""
    async with transport(**CHUNKS) as sender:
        await sender.send_checkpoint(step=1, state_dict=state_of(2.0))
        await asyncio.to_thread(load, sender.metadata(), into, on_bytes=seen)


WAYS: dict[str, Callable[..., Awaitable[None]]] = {
    "http": over_http,
    "http, direct": partial(over_http, direct=True),
    "http, selected": partial(over_http, select=[""]),
    "http, what differs": what_differs,
    "prepare": prepared,
    "prepare, async": partial(prepared, later=True),
    "group": over_a_group,
    "group, direct": partial(over_a_group, direct=True),
    "load": from_a_file,
    "load, mapped": partial(from_a_file, mmap=True),
    "load, peer": from_a_peer,
}
WHOLE = ("http", "http, what differs", "prepare", "prepare, async", "group")
ANY = pytest.mark.parametrize("way", WAYS)
FEW = ("freed", "replaced")
CASES = [(way, name) for way in WAYS for name in (CHANGES if way == "http" else FEW)]
"""Each change is one for the mechanism; each way must use the mechanism."""


@pytest.mark.parametrize(("way", "name"), CASES)
async def test_a_template_that_changes_is_refused(
    way: str, name: str, tmp_path: Path
) -> None:
    """The error names the path; nothing is written to memory of others."""
    template = state_of(1.0)
    seen = Once(CHANGES[name], template)
    kept = template["a"]
    with pytest.raises(LocalProtocolError, match=PATHS[name]) as caught:
        await WAYS[way](template, seen, tmp_path)
    seen.check()
    if way in WHOLE:
        assert "the template was not modified" in caught.value.__notes__
        assert bool((kept == (2.0 if way == "http, what differs" else 1.0)).all())
        assert template["step"] == 1


@pytest.mark.parametrize(("way", "left"), [("http", 400), *((way, 0) for way in WAYS)])
async def test_a_tensor_larger_than_its_memory_is_refused(
    way: str, left: int, tmp_path: Path
) -> None:
    """A sharded module frees the storage of a parameter that it has gathered."""
    template = state_of(1.0)
    template["layer"]["w"].untyped_storage().resize_(left)
    seen = Once(lambda _: None, template)
    with pytest.raises(UnsupportedLeafError, match=r"layer\.w .* has been freed"):
        await WAYS[way](template, seen, tmp_path)
    assert bool((template["layer"]["b"] == 1.0).all())


@pytest.mark.parametrize("name", ["grown", "alike", "freed"])
async def test_targets_that_are_copied_are_compared(name: str, tmp_path: Path) -> None:
    """Their elements lie differently, so they are copied after everything was read."""
    state = {"a": torch.randn(200, 200), "layer": {"w": torch.full((COUNT,), 2.0)}}
    template: dict[str, Any] = {"a": torch.zeros(200, 200).t()}
    template["layer"] = {"w": torch.zeros(2 * COUNT)[::2]}
    path = save(tmp_path / "s", state)
    seen = Once(MEMORY[name], template)
    with pytest.raises(LocalProtocolError, match=r"layer\.w "):
        load(path, template, on_bytes=seen)
    seen.check()


@pytest.mark.parametrize("way", WHOLE)
async def test_a_tensor_that_is_added_is_noticed(way: str, tmp_path: Path) -> None:
    """The template may get no tensor that the checkpoint lacks."""
    template = state_of(1.0)

    def add(state: dict[str, Any]) -> None:
        state["layer"]["new"] = torch.zeros(2)

    with pytest.raises(LocalProtocolError, match=r"layer\.new was added"):
        await WAYS[way](template, Once(add, template), tmp_path)


@pytest.mark.parametrize("way", ["load", "load, mapped", "load, peer"])
async def test_what_is_added_during_a_load_stays(way: str, tmp_path: Path) -> None:
    """A load fills what the template had; the checkpoint has nothing for the rest."""
    template = state_of(1.0)

    def add(state: dict[str, Any]) -> None:
        state["layer"]["new"] = torch.zeros(2)
        state["moments"].append(torch.zeros(2))

    await WAYS[way](template, Once(add, template), tmp_path)
    assert not template["layer"].pop("new").any()
    assert not template["moments"].pop().any()
    assert_same(template, state_of(2.0))


@pytest.mark.parametrize(
    "add",
    [
        lambda state: state["notes"].update(new=torch.zeros(2)),
        lambda state: state["none"].append({"new": torch.zeros(2)}),
        lambda state: setattr(state["ordered"], "new", torch.zeros(2)),
    ],
)
async def test_a_tensor_is_added_where_there_was_none(
    add: Change, tmp_path: Path
) -> None:
    """A container without tensors, and the attributes of a dict, are watched, too."""
    more: Any = lambda: {  # noqa: E731 - one for each side
        "notes": {"lr": 0.1},
        "none": [],
        "ordered": OrderedDict(x=torch.zeros(2)),
    }
    template = {**state_of(1.0), **more()}
    async with pair(state={**state_of(2.0), **more()}, **CHUNKS) as (sender, receiver):
        ready = await receiver.prepare(sender.metadata(), 1, into=template)
        add(template)
        with pytest.raises(LocalProtocolError, match=r"(new|none\[0\]) was added"):
            ready.apply()


@ANY
async def test_plain_values_may_change(way: str, tmp_path: Path) -> None:
    """They get the checkpoint's values all the same, and new plain ones stay."""
    template = state_of(1.0)
    template["step"] = 2  # as in the checkpoint, so that nothing had to be done

    def go_on(state: dict[str, Any]) -> None:
        state["step"], state["lr"] = 9, 0.9
        state["note"] = {"mine": []}

    seen = Once(go_on, template)
    await WAYS[way](template, seen, tmp_path)
    seen.check()
    assert_same(template, {**state_of(2.0), "note": {"mine": []}})


@ANY
async def test_a_module_that_moves_is_refused(way: str, tmp_path: Path) -> None:
    """Its state dict's tensors share its parameters' memory, and keep the old one."""
    model = torch.nn.Linear(10, 10)
    template = {**state_of(1.0), "model": dict(model.named_parameters())}
    sent = {**state_of(2.0), "model": dict(torch.nn.Linear(10, 10).named_parameters())}

    def move(_: dict[str, Any]) -> None:
        model.double()

    seen = Once(move, template)
    # The senders above send no model, so a key of it would be missing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "state_of", lambda _: sent)
        with pytest.raises(LocalProtocolError, match=r"model\.(weight|bias) "):
            await WAYS[way](template, seen, tmp_path)
    seen.check()


@ANY
async def test_the_local_tensor_of_a_dtensor_is_compared(
    way: str, tmp_path: Path
) -> None:
    """FSDP2 replaces it when it moves a module, and keeps the DTensor."""
    if way.startswith("group"):
        pytest.skip("a fake world has no other rank")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def part(fill: float) -> DTensor:
            return DTensor.from_local(torch.full((COUNT,), fill), mesh, [Shard(0)])

        template, sent = ({**state_of(n), "d": part(n)} for n in (1.0, 2.0))

        def swap(state: dict[str, Any]) -> None:
            state["d"]._local_tensor = torch.zeros(COUNT)

        seen = Once(swap, template)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "state_of", lambda _: sent)
            with pytest.raises(LocalProtocolError, match="d got another local"):
                await WAYS[way](template, seen, tmp_path)
        seen.check()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("options", [{}, {"into": True}, {"direct": True}])
async def test_what_the_receiver_had_may_go_away(
    name: str, options: dict[str, Any]
) -> None:
    """If the reused memory is gone, its bytes come from the sender."""
    base, more = state_of(2.0), dict(options)
    if more:
        more["into"] = state_of(1.0)
    seen = Once(MEMORY[name], base)
    async with pair(**CHUNKS) as (sender, receiver):
        sent = state_of(2.0)
        sent["a"].add_(1)
        await sender.send_checkpoint(step=1, state_dict=sent)
        got = await receive(sender, receiver, have=base, progress=seen, **more)
    seen.check()
    assert_same(got, sent)


@pytest.mark.parametrize("name", MEMORY)
async def test_live_memory_that_is_gone_is_not_served(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``zero_copy``, the receiver gets an error that says why."""
    state = state_of(2.0)
    async with pair(state=state, zero_copy=True) as (sender, receiver):
        MEMORY[name](state)
        with pytest.raises(PeerFailedError, match=r"layer\.w "):
            await receive(sender, receiver)
        assert "cannot be served any more: layer.w" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("name", MEMORY)
async def test_a_live_save_notices_it(name: str, tmp_path: Path) -> None:
    """A synchronous save writes from the state dict's own memory."""
    state = {"first": torch.zeros(3 << 20), **state_of(2.0)}  # one write is not all
    seen = Once(MEMORY[name], state)
    with (
        make_sync_checkpointer() as checkpointer,
        pytest.raises(LocalProtocolError, match=r"layer\.w "),
    ):
        checkpointer.save(state, tmp_path / "s", step=1, progress=seen)
    assert seen.victims
    assert not (tmp_path / "s").exists()


async def test_moved_is_used() -> None:
    """A template that is left alone is filled."""
    template = state_of(1.0)
    async with transports() as (sender, receiver):
        await moved(sender, receiver, state_of(2.0), into=template)
    assert_same(template, state_of(2.0))
