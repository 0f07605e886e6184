"""PGTransport passes those parts of the public suite that hold for any transport.

Two ranks in one process do, on the host and on a device.

`Offers` and some of `Endings` do not: nothing stays offered after a send, and a call
that times out breaks the group. `behaviour/test_group_transport.py` has what holds
instead.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch._dynamo  # noqa: F401 - an optimizer imports it: early, so that leak checks skip it

from aiockpt.errors import PeerFailedError
from aiockpt.testing import assert_same
from aiockpt.testing.conformance import Endings, RoundTrips, Templates
from aiockpt.testing.conformance.transports import Conformance
from aiockpt.testing.leaves import LEAVES
from tests.support import groups
from tests.support.accelerators import FakeAccelerator, FakeBoard, device_transports
from tests.support.groups import Transport
from tests.support.proofs import proves

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiockpt.transport import Timeout

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("no_blocking", "only_waits_left"),
]


class Rendezvous(Conformance[Transport]):
    """Both ends call at the same time: a send goes out with each receive."""

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make a group for every test, over gloo in one process."""
        async with groups.transports(count) as made:
            yield made

    def setup_method(self) -> None:
        """Start with nothing to send."""
        self._offers: dict[int, tuple[object, int]] = {}

    async def send(self, sender: Transport, state: object, *, step: int = 1) -> None:
        """Remember what the next receive is going to meet."""
        sender.metadata()  # raises once it is closed
        self._offers[id(sender)] = state, step

    async def receive(
        self,
        sender: Transport,
        receiver: Transport,
        *,
        step: int = 1,
        timeout: Timeout | None = None,
        **options: Any,
    ) -> Any:
        """Send and receive; a receiver's own error counts, not what its peer says."""
        limit = self.timeout if timeout is None else timeout
        receive: Any = receiver.recv_checkpoint
        receiving = receive(0, sender.metadata(), step, limit, **options)
        if id(sender) not in self._offers:
            return await receiving
        state, offered = self._offers[id(sender)]
        sending = asyncio.create_task(
            sender.send_checkpoint([1], offered, state, self.timeout)
        )
        try:
            return await receiving
        finally:
            with suppress(PeerFailedError):
                await sending


class Leaves(Rendezvous):
    """Every leaf, in one state dict: here each send needs several threads."""

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    async def test_a_leaf_arrives_as_it_was_sent(self) -> None:
        """Types, bits, strides, flags and shared memory survive."""
        state = {kind: make() for kind, make in LEAVES.items()}
        async with self.transports(2) as (sender, receiver):
            assert_same(await self.move(sender, receiver, state), state)

    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on odd tensors
    async def test_a_leaf_arrives_in_a_template(self) -> None:
        """A template made like the state fits it."""
        state = {kind: make() for kind, make in LEAVES.items()}
        async with self.transports(2) as (sender, receiver):
            for direct in (False, True):
                into = {kind: make() for kind, make in LEAVES.items()}
                got = await self.move(sender, receiver, state, into=into, direct=direct)
                assert_same(got, state)
                assert_same(into, state)


@proves(
    "cell PGTransport.send_checkpoint: success",
    "cell PGTransport.recv_checkpoint: success",
    by="test_what_arrives_is_independent",
)
@proves(
    "cell PGTransport.recv_checkpoint, into=: error",
    by="test_a_template_that_does_not_fit_is_untouched",
)
@proves(
    "cell PGTransport.recv_checkpoint, into=: success",
    "cell PGTransport.recv_checkpoint, into=, direct=True: success",
    by="test_a_template_is_filled",
)
class TestPGTransport(Leaves, RoundTrips[Transport], Templates[Transport]):
    """Everything that is about what arrives, and where."""

    @pytest.mark.allow_leaks("fds")  # pytest keeps the log, whose frames keep the group
    async def test_a_progress_that_raises_disturbs_nothing(self) -> None:
        """The caller's own error is logged."""
        await super().test_a_progress_that_raises_disturbs_nothing()


@pytest.mark.every_loop
class TestEveryLoop(Rendezvous):
    """What waits for the loop; leaves and templates do not know it."""

    test_what_arrives_is_independent = RoundTrips.test_what_arrives_is_independent
    test_a_template_is_filled = Templates.test_a_template_is_filled
    test_progress_grows_up_to_the_totals = (
        Templates.test_progress_grows_up_to_the_totals
    )
    test_a_senseless_timeout_is_refused = Endings.test_a_senseless_timeout_is_refused
    test_a_send_times_out_promptly = Endings.test_a_send_times_out_promptly
    test_shutdown_is_idempotent = Endings.test_shutdown_is_idempotent
    test_a_cancelled_shutdown_can_be_repeated = (
        Endings.test_a_cancelled_shutdown_can_be_repeated
    )


class TestDevice(Leaves):
    """What moves tensors, with every one on a device whose memory the group moves."""

    test_a_template_is_filled = Templates.test_a_template_is_filled
    test_a_template_that_lies_otherwise_is_filled = (
        Templates.test_a_template_that_lies_otherwise_is_filled
    )
    test_memory_beside_the_template_is_untouched = (
        Templates.test_memory_beside_the_template_is_untouched
    )
    test_training_goes_on_from_what_arrived = (
        RoundTrips.test_training_goes_on_from_what_arrived
    )

    @pytest.fixture(autouse=True)
    def _patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    @asynccontextmanager
    async def transports(self, count: int) -> AsyncIterator[Sequence[Transport]]:
        """Make a group for every test."""
        fakes = [FakeAccelerator(held=False) for _ in range(count)]
        boards = [FakeBoard(fake, all_its_own=True) for fake in fakes]
        async with device_transports(self._patch, *boards) as made:
            yield made
