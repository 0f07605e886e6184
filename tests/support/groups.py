"""Gloo groups whose ranks are all in this process, and transports over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from aiockpt import PGTransport
from aiockpt.pg.messages import RankChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

Transport = PGTransport[Any]
Watch = Callable[[torch.Tensor], torch.Tensor | None]

TIMEOUT = timedelta(seconds=60)


async def gloo_groups(count: int) -> list[Any]:
    """Make a group and return what each of its ranks has of it."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    return await asyncio.gather(*(joined(store, rank, count) for rank in range(count)))


def store_at() -> Any:
    """Return the server of a store on this machine, at a free port."""
    tcp_store = distributed.TCPStore  # type: ignore[attr-defined]
    return tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_in(path: str, count: int) -> Any:
    """Return what ranks in other processes find one another by."""
    return distributed.FileStore(path, count)  # type: ignore[attr-defined]


async def joined(store: Any, rank: int, count: int) -> Any:
    """Join a group, which waits for the others."""
    group = partial(distributed.ProcessGroupGloo, store, rank, count, TIMEOUT)
    return await in_a_thread(group)


async def summed(group: Any, number: float) -> float:
    """Add up the numbers of all ranks, as training does with gradients."""
    total = torch.tensor([number])
    await in_a_thread(lambda: group.allreduce([total]).wait())
    return float(total)


async def in_a_thread(call: Callable[[], Any]) -> Any:
    """Call what blocks; nothing of it is left when this returns."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(call()))
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - joining it would block the loop
        await asyncio.sleep(0.001)
    return made[0]


@asynccontextmanager
async def transports(
    count: int = 2,
    *,
    groups: list[Any] | None = None,
    receiver: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[list[Transport]]:
    """Make the transports of all ranks; ``receiver`` has options of all but rank 0."""
    options = {"timeout": 30, "chunk_bytes": 64 << 10, **options}
    async with AsyncExitStack() as stack:
        made = []
        for rank, group in enumerate(groups or await gloo_groups(count)):
            more = (receiver or {}) if rank else {}
            transport = Transport(group, **{**options, **more})
            made.append(await stack.enter_async_context(transport))
        yield made


async def moved(
    sender: Transport, receiver: Transport, state: object, step: int = 1, **options: Any
) -> Any:
    """Move a state from rank 0 to rank 1; return what arrived."""
    sent, got = await both(sender, receiver, state, step, **options)
    assert sent is None, sent
    assert not isinstance(got, BaseException), got
    return got


async def both(
    sender: Transport, receiver: Transport, state: object, step: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Do the same, and return what came of either call, be it an error."""
    return await asyncio.gather(
        sender.send_checkpoint([1], step, state),
        receiver.recv_checkpoint(0, "", options.pop("wanted", step), **options),
        return_exceptions=True,
    )


def flip_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last bit of every message of a data segment change on its way."""
    segment, post = RankChannel.send_segment, RankChannel._post_send
    flipping: set[RankChannel] = set()

    def send_segment(channel: RankChannel, *arguments: Any) -> None:
        flipping.add(channel)
        segment(channel, *arguments)
        flipping.discard(channel)

    def post_send(channel: RankChannel, tensor: torch.Tensor, tag: int = 0) -> Any:
        if channel in flipping:
            tensor = tensor.clone()
            tensor[-1] ^= 128
        return post(channel, tensor, tag)

    monkeypatch.setattr(RankChannel, "send_segment", send_segment)
    monkeypatch.setattr(RankChannel, "_post_send", post_send)


def watch_leaving(
    monkeypatch: pytest.MonkeyPatch,
    watch: Callable[[RankChannel, torch.Tensor], object],
    kind: type[RankChannel] = RankChannel,
) -> None:
    """Call ``watch`` with every message of a data segment before it is sent."""
    take = kind._take

    def watched(
        channel: RankChannel, memory: Any, start: int, stop: int
    ) -> tuple[torch.Tensor, int]:
        data, copied = take(channel, memory, start, stop)
        watch(channel, data)
        return data, copied

    monkeypatch.setattr(kind, "_take", watched)


class Watched:
    """A group that counts the bytes of each message that it sends.

    Attributes:
        watch: It is called with each message before it is sent, and may return what is
            sent instead.
        messages: The sizes.
        posted: How many sends and receives have begun.
    """

    def __init__(self, group: Any, watch: Watch | None = None) -> None:
        self.messages: list[int] = []
        self.posted = 0
        self.watch = watch
        self.size = group.size
        self._group = group
        self._kept: list[torch.Tensor] = []  # gloo keeps nothing

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Count, and pass on."""
        (message,) = tensors
        self.posted += 1
        self.messages.append(message.nbytes)
        if self.watch is not None and (other := self.watch(message)) is not None:
            self._kept.append(message := other)
        return self._group.send([message], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Count, and pass on."""
        self.posted += 1
        return self._group.recv(tensors, rank, tag)


def of_data(watch: Watch) -> Watch:
    """Have only messages of a data segment watched, which are larger than others."""
    return lambda message: watch(message) if message.nbytes > 16 << 10 else None


@of_data
def flipped(message: torch.Tensor) -> torch.Tensor:
    """Return a message of a data segment whose last bit has changed on its way."""
    copy = message.clone()
    copy[-1] ^= 128
    return copy


class WrappedWork(distributed.Work):
    """Passes a wait on; it is a Work, but not one of the backend."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended."""
        return bool(self._work.wait(timeout or timedelta(seconds=60)))


class Wrapped(distributed.ProcessGroup):
    """Says that it is rank 0, whichever rank it is, and can be configured anew.

    Until it is, and after an abort, it has no group, and everything but its rank is an
    ``AssertionError``.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch has a second one
        self._parent: Any = None

    async def configure(self, store: Any, rank: int, count: int) -> None:
        """Take part in another group than before."""
        self.abort()
        self._parent = await joined(store, rank, count)

    def abort(self) -> None:
        """Drop the group."""
        self._parent = None

    @property
    def parent(self) -> Any:
        """The group."""
        assert self._parent is not None, "process group not initialized"
        return self._parent

    def size(self) -> int:
        """Pass on."""
        return int(self.parent.size())

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Pass on, and wrap."""
        return WrappedWork(self.parent.send(tensors, dst_rank, tag))

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Pass on, and wrap."""
        return WrappedWork(self.parent.recv(tensors, src_rank, tag))
