"""The test suite for transports: subclass it, create yours, and run pytest.

::

    @pytest.mark.asyncio
    class TestMyTransport(TransportConformance[MyTransport]):
        @asynccontextmanager
        async def transports(self, count):
            async with AsyncExitStack() as stack:
                made = [MyTransport() for _ in range(count)]
                yield [await stack.enter_async_context(each) for each in made]

The tests are coroutines; which plugin runs them is the subclass's choice. A transport
that lacks an option inherits from the parts that it can pass.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Final, Generic, TypeVar

import pytest
import torch

from aiockpt.errors import (
    AiockptError,
    ClosedError,
    MissingKeysError,
    StepNotFoundError,
    TemplateMismatchError,
    TransferTimeoutError,
    UnsupportedLeafError,
)
from aiockpt.events import Progress
from aiockpt.runtime.tasks import run_all
from aiockpt.state.equality import assert_same
from aiockpt.testing.leaves import LEAVES
from aiockpt.transport import CheckpointTransport, Timeout

T = TypeVar("T", bound=CheckpointTransport[Any])

TURNS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)
"""The numbers of loop turns after which a call is cancelled."""

PROMPT_S: Final = 0.5
"""Seconds within which a call ends after its deadline."""

TRIES: Final = 5
"""How often a call may be late, because the host is busy."""

SHUTDOWN_S: Final = 5.0
"""Seconds within which a shutdown ends, with a process that it ends on a busy host."""


class Conformance(ABC, Generic[T]):
    """The base of the suites: creates transports and moves checkpoints."""

    timeout: ClassVar[float] = 20.0
    """Seconds that a call which should succeed may take."""

    @abstractmethod
    def transports(self, count: int) -> AbstractAsyncContextManager[Sequence[T]]:
        """Yield ``count`` started, connected transports; shut them down at the end.

        The transport of rank k is at index k.
        """

    async def send(self, sender: T, state: object, *, step: int = 1) -> None:
        """Send to all other ranks."""
        await sender.send_checkpoint([1], step, state, self.timeout)

    async def receive(
        self,
        sender: T,
        receiver: T,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Receive from ``sender``; ``options`` are those beyond the base class."""
        limit = self.timeout if timeout is None else timeout
        receive: Any = receiver.recv_checkpoint
        return await receive(0, sender.metadata(), step, limit, **options)

    async def move(
        self, sender: T, receiver: T, state: object, *, step: int = 1, **options: Any
    ) -> Any:
        """Send and receive at the same time; return what arrived."""
        arrived: list[Any] = []

        async def receive() -> None:
            arrived.append(await self.receive(sender, receiver, step=step, **options))

        await run_all([partial(self.send, sender, state, step=step), receive])
        return arrived[0]


def sample(seed: int = 0) -> dict[str, Any]:
    """Return a state dict of 360 kB, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 300, generator=generator)
    return {
        "seed": seed,
        "weight": weight,
        "tied": weight.t(),
        "bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "sparse view": torch.randn(64, generator=generator)[::4],
        "nested": [{"scale": torch.tensor(seed)}, (None, "text")],
    }


async def cancelled_after(turns: int, call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call after some turns of the loop, and wait for its end.

    The call may end before that. If it fails, this raises its error.
    """
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            break
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def turn(count: int = 20) -> None:
    """Let the event loop run all ready callbacks."""
    for _ in range(count):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------ what arrives


class RoundTrips(Conformance[T]):
    """What is received equals what was sent, bit by bit."""

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", LEAVES)
    async def test_a_leaf_arrives_as_it_was_sent(self, kind: str) -> None:
        """Types, bits, strides, flags and shared memory survive."""
        state = {"leaf": LEAVES[kind](), "beside": torch.arange(3)}
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    @pytest.mark.parametrize(
        "state", [None, [], b"bytes", torch.arange(5), {"only": "text"}], ids=repr
    )
    async def test_any_value_may_be_the_whole_state(self, state: object) -> None:
        """A state dict need not be a dict, nor hold a tensor."""
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    async def test_many_small_tensors_arrive(self) -> None:
        """Tensors that share chunks do not get mixed up."""
        state = {f"layer.{n}": torch.full((n % 7,), n) for n in range(2000)}
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    async def test_what_arrives_is_independent(self) -> None:
        """Writing to a received state dict changes no other rank's."""
        state = sample()
        before = copy.deepcopy(state)
        async with self.transports(2) as (sender, receiver):
            first = await self.move(sender, receiver, state)
            first["weight"].zero_()
            second = await self.move(sender, receiver, state)
        assert_same(second, before)
        assert_same(state, before)

    async def test_training_goes_on_from_what_arrived(self) -> None:
        """Model, optimizer, scheduler and random state resume exactly."""
        ours, theirs = _Training(seed=1), _Training(seed=2)
        ours.step()
        async with self.transports(2) as (sender, receiver):
            theirs.load(await self.move(sender, receiver, ours.state_dict()))
        ours.step()
        theirs.step()
        assert_same(theirs.state_dict(), ours.state_dict())


class _Training:
    """A training loop with a model, optimizer, scheduler and random state."""

    def __init__(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])

    def step(self) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(0)
        self.model(torch.randn(2, 4, generator=generator)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": [torch.get_rng_state(), random.getstate()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"][0])
        random.setstate(state["random"][1])


# --------------------------------------------------------------------- what is offered


class Offers(Conformance[T]):
    """For a transport whose checkpoint stays offered until it is disallowed."""

    async def test_metadata_is_short_and_stays_the_same(self) -> None:
        """It exists before the first send, and stays valid."""
        async with self.transports(2) as (sender, receiver):
            early = sender.metadata()
            await self.send(sender, sample())
            assert sender.metadata() == early
            assert 0 < len(early) < 1024
            await receiver.recv_checkpoint(0, early, 1, self.timeout)

    async def test_a_receive_that_comes_first_waits(self) -> None:
        """It gets the checkpoint as soon as that is sent."""
        state = sample()
        async with self.transports(2) as (sender, receiver):
            early = asyncio.create_task(self.receive(sender, receiver))
            await turn()
            await self.send(sender, state)
            assert_same(await early, state)

    async def test_a_receive_waits_for_its_step(self) -> None:
        """An older step that is offered meanwhile does not satisfy it."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1), step=1)
            early = asyncio.create_task(self.receive(sender, receiver, step=2))
            await turn()
            await self.send(sender, sample(2), step=2)
            assert_same(await early, sample(2))

    async def test_nobody_needs_to_be_named(self) -> None:
        """The list of receivers may be empty."""
        async with self.transports(2) as (sender, receiver):
            await sender.send_checkpoint([], 1, sample(), self.timeout)
            assert_same(await self.receive(sender, receiver), sample())

    async def test_a_new_step_takes_the_place_of_the_old(self) -> None:
        """The old step is refused at once, and the error names the served step."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1), step=1)
            await self.send(sender, sample(2), step=2)
            assert_same(await self.receive(sender, receiver, step=2), sample(2))
            with pytest.raises(StepNotFoundError) as caught:
                await self.receive(sender, receiver, step=1)
            assert (caught.value.step, caught.value.serving) == (1, 2)

    async def test_the_same_step_may_be_sent_again(self) -> None:
        """Its new content takes the place of the old."""
        async with self.transports(2) as (sender, receiver):
            for seed in (1, 2, 2):
                await self.send(sender, sample(seed), step=7)
                assert_same(await self.receive(sender, receiver, step=7), sample(seed))

    async def test_steps_may_go_back(self) -> None:
        """A job that rolled back offers an older step again."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(9), step=9)
            await self.send(sender, sample(3), step=3)
            assert_same(await self.receive(sender, receiver, step=3), sample(3))

    async def test_several_receivers_get_it_at_once(self) -> None:
        """They do not disturb each other, or a second call of the same transport."""
        async with self.transports(4) as (sender, *receivers):
            calls = [self.receive(sender, receiver) for receiver in receivers * 2]
            tasks = [asyncio.create_task(call) for call in calls]
            await self.send(sender, sample())
            for task in tasks:
                assert_same(await task, sample())

    async def test_a_receiver_that_leaves_disturbs_nobody(self) -> None:
        """The other receivers get the checkpoint."""
        async with self.transports(3) as (sender, leaver, stayer):
            await self.send(sender, sample())
            leaving = asyncio.create_task(self.receive(sender, leaver))
            staying = asyncio.create_task(self.receive(sender, stayer))
            await turn()
            leaving.cancel()
            assert_same(await staying, sample())
            await asyncio.wait({leaving})

    async def test_the_state_may_change_after_the_send(self) -> None:
        """Receivers get the values of the time of the send."""
        state = sample()
        sent = copy.deepcopy(state)
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            for value in (state["weight"], state["bias"], state["sparse view"]):
                value.zero_()
            state["nested"].append("late")
            assert_same(await self.receive(sender, receiver), sent)

    async def test_an_unsupported_leaf_is_named(self) -> None:
        """The send fails with its path, and the earlier offer stays."""
        bad = {"model": {"layers": [torch.ones(2), object()]}}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(), step=1)
            with pytest.raises(UnsupportedLeafError) as caught:
                await self.send(sender, bad, step=2)
            assert caught.value.path == "model.layers[1]"
            assert "object" in str(caught.value)
            assert_same(await self.receive(sender, receiver, step=1), sample())

    async def test_nothing_is_served_after_disallow(self) -> None:
        """A receive waits for the next send, and gets that."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            await sender.disallow_checkpoint()
            with pytest.raises(TransferTimeoutError):
                await self.receive(sender, receiver, timeout=0.2)
            await self.send(sender, sample(2))
            assert_same(await self.receive(sender, receiver), sample(2))

    async def test_disallow_is_idempotent_and_cheap(self) -> None:
        """It may be called at every step, even if nothing was ever sent."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            await self.receive(sender, receiver)
            started = time.monotonic()
            for transport in (sender, receiver) * 50:
                await transport.disallow_checkpoint()
            assert time.monotonic() - started < SHUTDOWN_S


# ----------------------------------------------------------------------- how calls end


class Endings(Conformance[T]):
    """No call outlives its deadline, and no cancel breaks a transport."""

    @pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)], ids=str)
    async def test_a_receive_times_out_promptly(self, timeout: Any) -> None:
        """The message says so in the words that torchft looks for."""
        async with self.transports(2) as (sender, receiver):
            receive = partial(self.receive, sender, receiver, timeout=timeout)
            await _times_out_promptly(receive)
            assert_same(await self.move(sender, receiver, sample()), sample())

    async def test_a_receive_without_time_does_not_look(self) -> None:
        """A timeout of 0 fails even if the checkpoint is available."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            receive = partial(self.receive, sender, receiver, timeout=0)
            await _times_out_promptly(receive)

    async def test_a_send_times_out_promptly(self) -> None:
        """Nothing is offered, and the transport stays usable."""
        async with self.transports(2) as (sender, receiver):
            send = partial(sender.send_checkpoint, [1], 1, sample(1), 0)
            await _times_out_promptly(send)
            assert_same(await self.move(sender, receiver, sample(2)), sample(2))

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    async def test_a_senseless_timeout_is_refused(self, timeout: float) -> None:
        """The call raises, and nothing else happens."""
        async with self.transports(2) as (sender, receiver):
            with pytest.raises(ValueError, match="timeout"):
                await self.receive(sender, receiver, timeout=timeout)
            with pytest.raises(ValueError, match="timeout"):
                await sender.send_checkpoint([1], 1, sample(), timeout)

    async def test_a_cancelled_receive_leaves_the_transport_usable(self) -> None:
        """This holds for a cancel at any point."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            for turns in TURNS:
                await cancelled_after(turns, self.receive(sender, receiver))
            assert_same(await self.receive(sender, receiver), sample())

    async def test_a_cancelled_wait_leaves_the_transport_usable(self) -> None:
        """Nothing was sent yet when the receive was cancelled."""
        async with self.transports(2) as (sender, receiver):
            for turns in TURNS:
                await cancelled_after(turns, self.receive(sender, receiver))
            assert_same(await self.move(sender, receiver, sample()), sample())

    async def test_a_cancelled_send_leaves_something_whole(self) -> None:
        """The old checkpoint or the new one is offered, never a mixture."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(0), step=0)
            serving = 0
            for step, turns in enumerate(TURNS, 1):
                send = self.send(sender, sample(step), step=step)
                await cancelled_after(turns, send)
                serving = await self._serving(sender, receiver, serving, step)
                assert_same(
                    await self.receive(sender, receiver, step=serving), sample(serving)
                )

    async def test_a_cancelled_disallow_can_be_repeated(self) -> None:
        """Nothing is offered after the second call."""
        async with self.transports(2) as (sender, receiver):
            for turns in TURNS[:6]:
                await self.send(sender, sample())
                await cancelled_after(turns, sender.disallow_checkpoint())
                await sender.disallow_checkpoint()
                with pytest.raises(TransferTimeoutError):
                    await self.receive(sender, receiver, timeout=0.05)

    @pytest.mark.parametrize("wait", [True, False])
    async def test_shutdown_is_idempotent(self, wait: bool) -> None:  # noqa: FBT001
        """The second call does nothing, and any later use is an error."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            metadata = sender.metadata()
            for transport in (sender, receiver) * 2:
                with _soon():
                    await transport.shutdown(wait=wait)
            with pytest.raises(ClosedError):
                await self.send(sender, sample())
            with pytest.raises(ClosedError):
                await receiver.recv_checkpoint(0, metadata, 1, self.timeout)

    async def test_a_cancelled_shutdown_can_be_repeated(self) -> None:
        """The second call completes the shutdown."""
        for turns in TURNS[:8]:
            async with self.transports(2) as (sender, receiver):
                await self.move(sender, receiver, sample())
                await cancelled_after(turns, sender.shutdown())
                await sender.shutdown()

    async def test_a_receive_ends_with_its_transport(self) -> None:
        """The receive does not wait for its deadline."""
        async with self.transports(2) as (sender, receiver):
            waiting = asyncio.create_task(self.receive(sender, receiver))
            await turn()
            with _soon():
                await receiver.shutdown(wait=False)
                await asyncio.wait({waiting})
            assert isinstance(waiting.exception(), AiockptError)

    async def _serving(self, sender: T, receiver: T, old: int, new: int) -> int:
        """Return which of two steps is offered."""
        try:
            await self.receive(sender, receiver, step=old)
        except StepNotFoundError:
            return new
        return old


async def _times_out_promptly(call: Callable[[], Awaitable[object]]) -> None:
    for _ in range(TRIES):
        started = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="timed out"):
            await call()
        if time.monotonic() - started < PROMPT_S:
            return
    pytest.fail(f"{TRIES} calls ended more than {PROMPT_S} s after their deadlines")


@contextmanager
def _soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SHUTDOWN_S


# --------------------------------------------------------------------- into a template

Change = Callable[[dict[str, Any]], object]


def _untie(state: dict[str, Any]) -> None:
    state["tied"] = state["tied"].clone(memory_format=torch.preserve_format)


def _tie(state: dict[str, Any]) -> None:
    state["other"] = state["weight"]


def _rename_below(state: dict[str, Any]) -> None:
    state["nested"][0]["factor"] = state["nested"][0].pop("scale")


def _conjugated() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex64).conj()


MISMATCHES: Final[dict[str, tuple[str, Change]]] = {
    "dtype": ("bias", lambda state: state.update(bias=state["bias"].half())),
    "shape": ("weight", lambda state: state.update(weight=torch.ones(299, 300))),
    "rank": ("bias", lambda state: state.update(bias=state["bias"][None])),
    "missing": ("bias", lambda state: state.pop("bias")),
    "missing below": ("nested[0].scale", _rename_below),
    "empty below": ("nested[0]", lambda state: state["nested"][0].clear()),
    "left over": ("more", lambda state: state.update(more=torch.ones(1))),
    "no tensor": ("bias", lambda state: state.update(bias="text")),
    "tied": ("other", _tie),
    "offset": ("window", lambda state: state.update(window=state["weight"][1:3])),
}
"""Maps a defect of a template to its path and a function that makes it."""

FILLED: Final = (
    "every dtype",
    "every dtype, transposed",
    "every dtype, sparse view",
    "every dtype, 0 bytes",
    "mixed sizes",
    "half of the memory",
    "channels_last",
    "expanded",
    "windows",
    "same sparse view twice",
    "conjugated and negated",
    "conjugated sparse view",
    "tied",
    "overlapping views",
    "module state",
    "named tuple",
)
"""Kinds of leaves that are received into a template's own memory."""

COPIED: Final[dict[str, Change]] = {
    "stride": lambda state: state.update(other=state["other"].t()),
    "not tied": _untie,
    "conjugated": lambda state: state.update(complex=_conjugated()),
}
"""Templates that are filled, though their tensors lie otherwise in memory."""

MADE: Final = ("dataclass",)
"""Kinds of leaves that are made of tensors, and so are made anew."""

RETURNED: Final = tuple(
    kind for kind in ("numpy arrays", "bytes", "keys", "sets", *MADE) if kind in LEAVES
)
"""Kinds of leaves that are returned as new values in a template."""


def rich(seed: int = 0) -> dict[str, Any]:
    """Return the sample and some error-prone tensors."""
    state = sample(seed)
    generator = torch.Generator().manual_seed(seed)
    return {
        **state,
        "other": torch.randn(300, 300, generator=generator),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
        "window": state["weight"][2:4],
        "parameter": torch.nn.Parameter(torch.randn(5, generator=generator)),
    }


def _addresses(state: object) -> list[int]:
    found: list[int] = []
    match state:
        case torch.Tensor():
            found.append(state.data_ptr())
        case dict():
            found += _addresses(list(state.values()))
        case list() | tuple():
            for each in state:
                found += _addresses(each)
    return found


class Templates(Conformance[T]):
    """For a transport whose ``recv_checkpoint`` takes these options."""

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled(self, direct: bool) -> None:  # noqa: FBT001
        """Its own memory holds the checkpoint, and its own tensors are returned."""
        template = rich(seed=2)
        addresses = _addresses(template)
        async with self.transports(2) as (sender, receiver):
            got = await self.move(
                sender, receiver, rich(seed=1), into=template, direct=direct
            )
        assert_same(got, rich(seed=1))
        template["seed"] = 1  # not a tensor: only the returned state has the new value
        assert_same(template, rich(seed=1))
        assert _addresses(template) == _addresses(got) == addresses
        assert got["parameter"] is template["parameter"]

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("kind", [*FILLED, *RETURNED])
    async def test_a_leaf_arrives_in_a_template(self, kind: str) -> None:
        """A template made like the state fits it."""
        state = {"leaf": LEAVES[kind]()}
        async with self.transports(2) as (sender, receiver):
            for direct in (False, True):
                into = {"leaf": LEAVES[kind]()}
                got = await self.move(sender, receiver, state, into=into, direct=direct)
                assert_same(got, state)
                if kind in FILLED:
                    assert_same(into, state)

    @pytest.mark.parametrize("kind", COPIED)
    async def test_a_template_that_lies_otherwise_is_filled(self, kind: str) -> None:
        """Its tensors get the elements, and stay what they are."""
        state = rich(seed=1)
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            for direct in (False, True):
                template = rich(seed=2)
                COPIED[kind](template)
                before = {**template}
                got = await self.receive(sender, receiver, into=template, direct=direct)
                assert got is template
                tensors = [k for k, v in state.items() if isinstance(v, torch.Tensor)]
                assert all(template[name] is before[name] for name in tensors)
                assert all(torch.equal(template[n], state[n]) for n in tensors)

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("kind", MADE)
    async def test_such_a_leaf_is_returned_where_the_template_has_none(
        self,
        kind: str,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """The receiver makes a new value from the received bytes."""
        state = {"leaf": LEAVES[kind](), "weight": torch.ones(3)}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, state)
            into = {"leaf": None, "weight": torch.zeros(3)}
            got = await self.receive(sender, receiver, into=into, direct=direct)
        assert_same(got, state)
        assert got["weight"] is into["weight"]

    @pytest.mark.parametrize("kind", MISMATCHES)
    async def test_a_template_that_does_not_fit_is_untouched(self, kind: str) -> None:
        """The error names the tensor, and no byte is transferred."""
        path, change = MISMATCHES[kind]
        template, before = rich(seed=2), rich(seed=2)
        change(template)
        change(before)
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, rich(seed=1))
            for direct in (False, True):
                with pytest.raises(TemplateMismatchError) as caught:
                    await self.receive(sender, receiver, into=template, direct=direct)
                assert caught.value.path == path
                assert_same(template, before)

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("step", [2, 3, 8])
    async def test_memory_beside_the_template_is_untouched(
        self,
        step: int,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """Only the elements of its tensors are written, not the bytes between them."""
        theirs, ours = torch.ones(40, 16), torch.zeros(40, 16)
        async with self.transports(2) as (sender, receiver):
            await self.move(
                sender,
                receiver,
                {"columns": theirs[:, ::step]},
                into={"columns": ours[:, ::step]},
                direct=direct,
            )
        expected = torch.zeros(40, 16)
        expected[:, ::step] = 1
        assert torch.equal(ours, expected)

    async def test_autograd_notices_a_filled_template(self) -> None:
        """A tensor saved for a backward pass must not change silently."""
        template = {"weight": torch.nn.Parameter(torch.ones(3))}
        loss = (template["weight"] ** 2).sum()
        async with self.transports(2) as (sender, receiver):
            state = {"weight": torch.nn.Parameter(torch.zeros(3))}
            await self.move(sender, receiver, state, into=template)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)

    async def test_an_inference_tensor_can_be_filled(self) -> None:
        """Serving engines keep their weights in inference mode."""
        with torch.inference_mode():
            template = {"weight": torch.zeros(3)}
        async with self.transports(2) as (sender, receiver):
            state = {"weight": torch.ones(3)}
            await self.move(sender, receiver, state, into=template)
        assert template["weight"].tolist() == [1, 1, 1]

    async def test_progress_grows_up_to_the_totals(self) -> None:
        """Numbers never fall, and the last ones are the totals."""
        seen: list[Progress] = []
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, sample(), progress=seen.append)
        for before, after in pairwise(seen):
            assert before.bytes_done <= after.bytes_done
            assert before.chunks_done <= after.chunks_done
        last = seen[-1]
        assert 0 < last.bytes_done == last.bytes_total
        assert 0 < last.chunks_done == last.chunks_total

    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """The callback's error is logged."""

        def fail(_: Progress) -> None:
            raise ValueError("on purpose")

        async with self.transports(2) as (sender, receiver):
            got = await self.move(sender, receiver, sample(), progress=fail)
        assert_same(got, sample())


# ------------------------------------------------------------------------ a part of it

SELECTIONS: Final[dict[str, tuple[Any, list[str]]]] = {
    "a tensor": (["bias"], ["bias"]),
    "a value": (["seed"], ["seed"]),
    "tied tensors": (["weight", "tied"], ["weight", "tied"]),
    "one of two that are tied": (["tied"], ["tied"]),
    "everything below": (["nested"], ["nested"]),
    "everything": ([""], [*sample()]),
    "nothing": ([], []),
    "a function": (lambda path: path in ("bias", "seed"), ["seed", "bias"]),
    "no path": (lambda path: False, []),
}
"""Maps a kind of selection to its value and the keys of the sample that it selects."""


class Selections(Conformance[T]):
    """For a transport whose ``recv_checkpoint`` takes ``select``, and ``into``."""

    @pytest.mark.parametrize("kind", SELECTIONS)
    async def test_what_is_selected_arrives(self, kind: str) -> None:
        """Nothing else is returned."""
        select, keys = SELECTIONS[kind]
        async with self.transports(2) as (sender, receiver):
            got = await self.move(sender, receiver, sample(1), select=select)
        state = sample(1)
        assert_same(got, {key: state[key] for key in state if key in keys})

    async def test_a_part_of_a_list_keeps_its_places(self) -> None:
        """None stands where nothing is selected."""
        async with self.transports(2) as (sender, receiver):
            state = {"layers": [torch.zeros(1), torch.ones(1), {"w": torch.ones(2)}]}
            got = await self.move(
                sender, receiver, state, select=["layers[1]", "layers[2].w"]
            )
        assert_same(got, {"layers": [None, *state["layers"][1:]]})

    async def test_a_single_path_is_no_list_of_paths(self) -> None:
        """Otherwise its characters would be taken for paths."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            with pytest.raises(TypeError, match="list of paths"):
                await self.receive(sender, receiver, select="bias")

    async def test_a_path_that_is_not_there_is_an_error(self) -> None:
        """The error names all missing paths."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample())
            with pytest.raises(MissingKeysError) as caught:
                await self.receive(sender, receiver, select=["bias", "bia", "nested.x"])
        assert caught.value.keys == ["bia", "nested.x"]

    @pytest.mark.parametrize("direct", [False, True])
    async def test_a_template_is_filled_where_selected(
        self,
        direct: bool,  # noqa: FBT001
    ) -> None:
        """Its own tensors and dicts are changed there, and returned."""
        template = {**sample(2), "more": torch.zeros(3)}
        bias, weight = template["bias"], template["weight"]
        async with self.transports(2) as (sender, receiver):
            got = await self.move(
                sender,
                receiver,
                sample(1),
                into=template,
                select=["bias", "seed", "nested"],
                direct=direct,
            )
        assert got is template
        assert template["bias"] is bias
        assert template["weight"] is weight
        new = sample(1)
        expected = {**sample(2), "more": torch.zeros(3)}
        expected |= {key: new[key] for key in ("bias", "seed", "nested")}
        assert_same(template, expected)

    async def test_a_template_may_have_only_what_is_selected(self) -> None:
        """Other keys of the checkpoint are ignored."""
        template = {"bias": torch.zeros(3, dtype=torch.bfloat16)}
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, sample(1), into=template, select=["bias"])
        assert_same(template, {"bias": sample(1)["bias"]})

    async def test_a_template_that_does_not_fit_there_is_untouched(self) -> None:
        """Nothing is written, even to the parts that fit."""
        template = {**sample(2), "weight": torch.zeros(3, 3)}
        before = {**sample(2), "weight": torch.zeros(3, 3)}
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            for select, path in ((["bias", "weight"], "weight"), (["seed", "x"], "x")):
                with pytest.raises((TemplateMismatchError, MissingKeysError)) as caught:
                    await self.receive(sender, receiver, into=template, select=select)
                assert path in str(caught.value)
                assert caught.value.__notes__ == ["the template was not modified"]
            assert_same(template, before)

    async def test_a_path_that_the_template_lacks_is_an_error(self) -> None:
        """Otherwise the caller would not notice that the value is missing."""
        async with self.transports(2) as (sender, receiver):
            await self.send(sender, sample(1))
            with pytest.raises(AiockptError, match="bias"):
                await self.receive(
                    sender, receiver, into={"seed": 0}, select=["seed", "bias"]
                )

    async def test_progress_counts_what_is_selected(self) -> None:
        """The totals count the chunks that contain the selection."""
        seen: list[Progress] = []
        state = {"small": torch.ones(3), "big": torch.ones(5 << 20)}
        async with self.transports(2) as (sender, receiver):
            await self.move(sender, receiver, state, progress=seen.append)
            whole = seen[-1]
            await self.move(
                sender, receiver, state, select=["small"], progress=seen.append
            )
        last = seen[-1]
        assert 12 <= last.bytes_done == last.bytes_total <= whole.bytes_total
        assert 0 < last.chunks_done == last.chunks_total
        # Its sender may have chunks of any length, and so only one.
        assert last.chunks_total < whole.chunks_total or whole.chunks_total == 1


class TransportConformance(
    RoundTrips[T], Offers[T], Endings[T], Templates[T], Selections[T]
):
    """All parts of the suite."""
