"""The public face as a strict type checker sees it; checked, never run.

``nox -s types`` reads this file. Each ``assert_type`` is a promise to users; each
``type: ignore`` is a mistake that they must be told about.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple, assert_type

from aiohttp import web

import aiockpt
import aiockpt.http
import aiockpt.prometheus
from aiockpt.checkpointers import SaveHandle


class InMemory(aiockpt.CheckpointTransport[dict[str, int]]):
    """A transport of one's own needs the five verbs and nothing else."""

    def metadata(self) -> str:
        return ""

    async def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: dict[str, int],
        timeout: float | timedelta,
    ) -> None:
        pass

    async def disallow_checkpoint(self) -> None:
        pass

    async def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: float | timedelta
    ) -> dict[str, int]:
        return {}

    async def shutdown(self, wait: bool = True) -> None:
        pass


async def any_transport(transport: aiockpt.CheckpointTransport[dict[str, int]]) -> None:
    """The state dict's type travels with the transport."""
    assert_type(transport.metadata(), str)
    await transport.send_checkpoint([1], 7, {"a": 1}, timedelta(seconds=1))
    state = await transport.recv_checkpoint(0, transport.metadata(), 7, 1.5)
    assert_type(state, dict[str, int])
    await transport.send_checkpoint([1], 7, {"a": ""}, 1)  # type: ignore[dict-item]
    await transport.shutdown(wait=False)


async def over_http() -> None:
    """The HTTP transport is such a transport, and a context manager of itself."""
    async with aiockpt.HTTPTransport[dict[str, int]](
        timedelta(seconds=60)
    ) as transport:
        assert_type(transport, aiockpt.HTTPTransport[dict[str, int]])
        assert_type(transport.statistics().step, int | None)
        await any_transport(transport)
        received = await transport.recv_checkpoint(
            0, transport.metadata(), 7, timeout=1, into={"a": 1}, progress=print
        )
        assert_type(received, dict[str, int])
        several = await transport.recv_checkpoint(0, ["", ""], 7, timeout=1)
        assert_type(several, dict[str, int])
        part = await transport.recv_checkpoint(0, "", 7, select=str.isidentifier)
        assert_type(part, dict[str, int])
        shared = await transport.recv_checkpoint(0, "", 7, share=True)
        assert_type(shared, dict[str, int])
        async for step in transport.steps(transport.metadata(), after=7):
            assert_type(step, int)
            await transport.recv_checkpoint(0, "", step, 1, select=["a"], into={"a": 1})
            await transport.recv_checkpoint(0, "", step, 1, into={"a": 1}, have=True)
        await transport.recv_checkpoint(0, "", 7, have={"a": 2})
        await transport.recv_checkpoint(0, "", 7, have=5)  # type: ignore[arg-type]
        transport.steps("", after="7")  # type: ignore[arg-type]
        await transport.recv_checkpoint(0, "", 7, 1, select=[1])  # type: ignore[list-item]
        transport.recv_checkpoint(0, "", "7", 1)  # type: ignore[arg-type, unused-coroutine]


def without_a_loop(state: dict[str, int]) -> None:
    """A proxy has the types of the original, and returns what that awaits."""
    made: aiockpt.BackgroundTransport[dict[str, int]]
    with aiockpt.make_background_transport(timedelta(seconds=1), swarm=True) as made:
        assert_type(made, aiockpt.BackgroundTransport[dict[str, int]])
        made.send_checkpoint(step=1, state_dict=state, timeout=1)
        assert_type(made.metadata(), str)
        assert_type(made.statistics().step, int | None)
        assert_type(made.recv_checkpoint(metadata="", into=state), dict[str, int])
        prepared = made.prepare("", 1, into=state)
        assert_type(prepared, aiockpt.Prepared[dict[str, int]])
        for step, got in made.follow("", into=state, after=1):
            assert_type((step, got), tuple[int, dict[str, int]])
        steps = made.follow("", into=state, prepare=True)
        assert_type(next(steps), aiockpt.Prepared[dict[str, int]])
        steps.close()
        assert_type(next(made.steps("")), int)
        made.send_checkpoint(step=1, state_dict={}, timout=1)  # type: ignore[arg-type]
        made.send_checkpoint(step="1", state_dict={})  # type: ignore[arg-type]
        made.follow("", prepared=True)  # type: ignore[call-overload]
        made.shutdown(wait=False)
    aiockpt.make_background_transport(port=1)  # type: ignore[arg-type]


def trusted() -> None:
    """Who may read, and who is asked, is said in text and numbers."""
    auth = aiockpt.Auth(manifest_key=b"k" * 16, peers=["10.0.0.0/8"])
    transport = aiockpt.HTTPTransport[dict[str, int]](auth=auth, same_host=True)
    granted = transport.grant("rank-3", step=7, lifetime=timedelta(minutes=1))
    assert_type(granted, str)
    assert_type(aiockpt.join_metadata(["http://h:1/", "http://h:2/"]), str)
    assert_type(aiockpt.make_token("secret", "rank-3", expires=1e9, step=7), str)
    aiockpt.make_token("secret", 3, expires=1e9)  # type: ignore[arg-type]
    auth.peers = None  # type: ignore[misc]


def embedded(app: web.Application) -> None:
    """An application gets its transport back by a typed key."""
    key = web.AppKey("weights", aiockpt.HTTPTransport[dict[str, int]])
    transport = aiockpt.HTTPTransport[dict[str, int]]()
    aiockpt.http.setup(app, transport, prefix="/weights", app_key=key)
    kept = aiockpt.http.get_transport(app, key)
    assert_type(kept, aiockpt.HTTPTransport[dict[str, int]])
    aiockpt.http.setup(app, transport, prefix="/more")
    assert_type(aiockpt.http.get_transport(app), Any)
    aiockpt.http.setup(app, app)  # type: ignore[type-var]


def asked(request: web.Request) -> None:
    """A middleware is told whom a request is for."""
    assert_type(aiockpt.http.serves(request), bool)


def exported(app: web.Application) -> None:
    """Transports and checkpointers have figures, what is neither has none."""
    transport = aiockpt.HTTPTransport[dict[str, int]]()
    exporter = aiockpt.prometheus.setup(app, {"model": transport}, "/metrics")
    assert_type(exporter, aiockpt.prometheus.Exporter)
    exporter.add("saves", aiockpt.make_async_checkpointer())
    exporter.add("nothing", transport.metadata())  # type: ignore[arg-type]


@aiockpt.register_leaf
class Schedule(NamedTuple):
    """A registered type keeps its own type."""

    warmup: int


def registered() -> None:
    """So it does when the codec is given."""
    assert_type(Schedule(1).warmup, int)
    aiockpt.register_leaf(Schedule, encode=lambda s: s.warmup, decode=Schedule)
    aiockpt.register_leaf(Schedule, encode=len, decode=str)  # type: ignore[arg-type]


def facts_of_errors(error: aiockpt.AiockptError) -> None:
    """An exception's facts are typed."""
    if isinstance(error, aiockpt.StepNotFoundError):
        assert_type(error.step, int | None)
        assert_type(error.serving, int | None)
    if isinstance(error, aiockpt.IntegrityError):
        assert_type(error.chunk, int | None)
    if isinstance(error, aiockpt.errors.ForgedManifestError):
        assert_type(error.missing, bool)
    if isinstance(error, aiockpt.errors.TransferTimeoutError):
        assert_type(error.timeout, float)
        handle(error)


def handle(error: TimeoutError) -> None:
    """An error is also the builtin one that a caller would guess."""


def hooks(progress: aiockpt.Progress, event: aiockpt.TransferEvent) -> None:
    """Progress and events are frozen data."""
    assert_type(progress.bytes_done, int)
    assert_type(event.step, int | None)
    progress.bytes_done = 1  # type: ignore[misc]


def misspelled() -> object:
    """The lazy names hide no typo."""
    return aiockpt.HTTPTransprot  # type: ignore[attr-defined]


assert_type(aiockpt.__version__, str)
assert_type(aiockpt.Limits().max_depth, int)


async def in_the_background() -> None:
    """A save gives a handle, and its end says what became of it."""
    config = aiockpt.CheckpointerConfig(busy_policy="skip")
    async with aiockpt.make_async_checkpointer(config) as checkpointer:
        assert_type(checkpointer, aiockpt.AsyncCheckpointer)
        handle = await checkpointer.save({"a": 1}, "step-1", timeout=3, step=1)
        assert_type(handle, SaveHandle)
        assert_type(await handle.written(), bool)
        assert_type(handle.error, BaseException | None)
        assert_type(checkpointer.statistics().written, int)
        aiockpt.HTTPTransport[Any](server=aiockpt.Server(process=True, keep_last=60))
        aiockpt.HTTPTransport[Any](server=checkpointer)  # type: ignore[arg-type]
        assert_type(await checkpointer.close(), tuple[BaseException, ...])
    with aiockpt.make_background_checkpointer(config) as background:
        assert_type(background, aiockpt.BackgroundCheckpointer)
        assert_type(background.save({"a": 1}, "step-2"), SaveHandle)
        assert_type(background.statistics().written, int)
        assert_type(background.close(), tuple[BaseException, ...])
        assert_type(handle.result(timeout=timedelta(seconds=1)), bool)
    found = await aiockpt.recover("checkpoints", timeout=timedelta(seconds=1))
    assert_type(found.step, int)
    aiockpt.CheckpointerConfig(busy_policy="hope")  # type: ignore[arg-type]


async def keywords(own: dict[str, Any]) -> None:
    """A typo is seen; keywords for a hook or a reader of one's own travel in a dict."""
    aiockpt.load("step-1", into={"a": 1}, select=["a"], verify="none", rank=1)
    aiockpt.load("step-1", full=True, rank_values="keep")
    aiockpt.load("step-1", rank_values=0)
    aiockpt.load("step-1", rank_values="first")  # type: ignore[arg-type]
    aiockpt.load("step-1", selekt=["a"])  # type: ignore[arg-type]
    aiockpt.load("step-1", verify="all")  # type: ignore[arg-type]
    with aiockpt.make_sync_checkpointer() as sync:
        sync.save({"a": 1}, "step-1", step=1, progress=print, **own)
        sync.save({"a": 1}, "step-1", stp=1)  # type: ignore[arg-type]
        sync.load("step-1", into={"a": 1}, strict=True, mmap=True, **own)
        sync.load("step-1", full=True, rank_values=0)
        sync.load("step-1", template={"a": 1})  # type: ignore[arg-type]
    with aiockpt.make_background_checkpointer() as background:
        background.save({"a": 1}, "step-1", timeout=3, **own)
        background.save({"a": 1}, "step-1", keep_last=1)  # type: ignore[arg-type]
        background.load("step-1", into={"a": 1}, on_bytes=print, **own)
        background.load("step-1", map_location="cpu")  # type: ignore[arg-type]
    async with aiockpt.make_async_checkpointer() as checkpointer:
        await checkpointer.save({"a": 1}, "step-1", **own)
        await checkpointer.save({"a": 1}, "step-1", tmeout=1)  # type: ignore[arg-type]
        await checkpointer.load("step-1", into={"a": 1}, **own)
        await checkpointer.load("step-1", inot={"a": 1})  # type: ignore[arg-type]
    aiockpt.HTTPTransport[Any](port=1)  # type: ignore[arg-type]
    async with aiockpt.HTTPTransport[Any]() as transport:
        await transport.send_checkpoint(step=1, state_dict={}, timout=1)  # type: ignore[arg-type]
        await transport.recv_checkpoint(metadata="", template={})  # type: ignore[arg-type]
        transport.follow("", prepared=True)  # type: ignore[call-overload]
