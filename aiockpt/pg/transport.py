"""PGTransport: a checkpoint sent over a process group, rank to rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, cast

import torch

from aiockpt.errors import AiockptError, LocalProtocolError, ProcessGroupError
from aiockpt.events import Progress
from aiockpt.format.limits import Limits
from aiockpt.memory.device import port_for
from aiockpt.pg.group import Group, Health, rank_in
from aiockpt.pg.line import Line
from aiockpt.pg.medium import medium_of
from aiockpt.pg.receiving import Receive, ReceiveOptions
from aiockpt.pg.sending import Send
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.runtime.system import failing_here
from aiockpt.state.selection import Select
from aiockpt.transfer.destination import Terms
from aiockpt.transport import CheckpointTransport, T, Timeout, exact_step, seconds

__all__ = ["PGTransport"]

_METADATA: Final = "aiockpt-process-group"
_THREADS: Final = 2
_CLOSING: Final = 5.0  # for what is under way, and then for the threads
_HOST: Final = torch.device("cpu")


class PGTransport(CheckpointTransport[T]):
    """Sends a checkpoint to ranks of a process group, and receives from its like.

    A send ends when its receivers have the checkpoint: both ends call at about the
    same time, and whoever is early waits. It belongs to the loop that first used it.

    Give it a group of its own, not the one that trains: a call that is cancelled or
    times out, and a peer that dies, leave messages under way that nothing can call
    back. From then on the transport is broken, every call raises
    ``ProcessGroupError``, and the remedy is a new group.

    Args:
        pg: The group: gloo for host memory, NCCL for CUDA; a
            ``torch.distributed.ProcessGroup``, or torchft's. It stays the caller's.
        timeout: Default deadline of a send or a receive.
        device: Where the group's backend wants its tensors. What is on such a device
            is sent from there, received there and verified there, and never comes to
            the host; this has not been measured. Calls then take turns, and both ends
            must make them in the same order.
        state_dict: Called on the loop at every receive without ``into``. A tensor that
            has the same path, dtype, shape and strides in what it returns is filled in
            place. Every other tensor gets new memory: an optimizer has no state before
            its first step, for instance. What it raises is told to the sender.
        chunk_bytes: Bytes that one digest is for, a multiple of 64.
        limits: What a receive accepts.
        allow_pickle: Let leaves that nothing else carries travel as pickles, which
            run code when they are received. Both ends must say so.
    """

    def __init__(
        self,
        pg: Group,
        timeout: Timeout = 60.0,
        device: torch.device = _HOST,
        state_dict: Callable[[], T] | None = None,
        *,
        chunk_bytes: int = 16 << 20,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        allow_pickle: bool = False,
    ) -> None:
        self._group = pg
        self._timeout = seconds(timeout)
        self._state_dict = state_dict
        self._limits = limits
        self._allow_pickle = allow_pickle
        self._health = Health()
        self._lifetime = Lifetime("the transport")
        self._staging = asyncio.Lock()
        self._sends: set[asyncio.Future[None]] = set()
        self._turns: dict[tuple[bool, int], asyncio.Lock] = {}
        self._bridge = Bridge(threads=_THREADS, name="aiockpt-pg")
        self._medium = medium_of(
            device,
            self._bridge,
            chunk_bytes=chunk_bytes,
            allow_pickle=allow_pickle,
            limits=limits,
        )

    def __repr__(self) -> str:
        broken = " broken" if self._health.broken else ""
        try:
            return f"<PGTransport ranks={self._size()}{broken}>"
        except ProcessGroupError:
            return f"<PGTransport without a group{broken}>"

    def metadata(self) -> str:
        """Return a constant: a rank finds another one by the group.

        Raises:
            ClosedError: after :meth:`shutdown`.
        """
        self._lifetime.check()
        return _METADATA

    async def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: Timeout | None = None,
    ) -> None:
        """Send ``state_dict`` as ``step`` to ``dst_ranks``, all of them at once.

        Returns when every one of them has verified it, or failed: none waits for
        another. What cannot be sent is told to them: at once to those who wait, and to
        the others when they receive this step or an earlier one.

        Raises:
            UnsupportedLeafError, StagingError: it cannot be sent. The group is well,
                also if a receiver is not there.
            ValueError: ``dst_ranks`` has this rank, a rank twice, or no rank of the
                group.
            PeerFailedError: a receiver refused it, and says why; the group is well.
            ProcessGroupError: the group is broken; ``rank`` says which peer broke it.
            TransferTimeoutError: a receiver did not come or did not finish in time.
            ClosedError: after, or because of, :meth:`shutdown`.

        If cancelled before anything was sent, receivers go on waiting; later, the
        transport is broken.
        """
        step = exact_step(step)
        ranks = [self._peer(rank) for rank in dst_ranks]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"dst_ranks has a rank twice: {dst_ranks}")
        limit = self._timeout if timeout is None else seconds(timeout)
        here = failing_here(f"sending step {step}")
        with self._lifetime.call(), self._under_way(), here:
            self._health.check()
            deadline = Deadline(limit, stop="stage", what=f"step {step}")
            async with deadline:
                line = partial(self._line, sending=True, deadline=deadline)
                send = Send(self._medium, self._staging, self._bridge, deadline, line)
                await send.run(ranks, step, state_dict)

    async def disallow_checkpoint(self) -> None:
        """Return when no send is under way: nothing stays offered after a send.

        A send cannot be called off without breaking the group, so it is waited for,
        until its deadline at most.
        """
        self._lifetime.bind()
        if self._sends:
            await asyncio.wait(self._sends)

    async def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: Timeout | None = None,
        *,
        into: T | None = None,
        direct: bool = False,
        select: Select | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> T:
        """Receive ``step`` from ``src_rank``; it may be called before the send.

        Args:
            src_rank: The sender's rank in the group.
            metadata: What a ``PGTransport``'s :meth:`metadata` returned.
            step: The step that the sender was given.
            timeout: Deadline of the whole call, in seconds or as a ``timedelta``.
            into: A state dict to fill: its tensors in place, its dicts and lists with
                the other values. It is checked before a byte moves, touched only
                when everything has been verified, and returned.
            direct: With ``into``: receive straight into its memory. A receive that
                fails then says in a note whether the template was modified. One that
                is cut short may still be written to until the group is destroyed.
            select: Refused: a sender sends the same bytes to all ranks at once. An
                ``HTTPTransport`` receives parts.
            progress: Called with :class:`.Progress` as bytes arrive.

        Raises:
            LocalProtocolError: ``select`` was given; the group is well, and the send
                still waits to be received.
            StepNotFoundError: the sender sends another step, which it is told.
            PeerFailedError: the sender cannot send, and says why; the group is well.
            ProcessGroupError: the group is broken.
            TransferTimeoutError: the deadline passed.
            TemplateMismatchError: ``into`` does not fit.
            ProtocolError: see the error tree.

        If cancelled once it waits for the sender, the transport is broken.
        """
        step, rank = exact_step(step), self._peer(src_rank)
        if select is not None:
            raise LocalProtocolError(
                "a process group moves whole checkpoints only: receive without select, "
                "or from an HTTPTransport"
            )
        if metadata.startswith("http"):
            raise LocalProtocolError("the sender is an HTTPTransport; use one here too")
        limit = self._timeout if timeout is None else seconds(timeout)
        what = f"step {step} from rank {src_rank}"
        deadline = Deadline(limit, stop="fetch_manifest", what=what)
        terms = Terms(
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            direct=direct,
            ports=port_for,
            ahead=True,  # gloo has one thread, for the wire and for the pages
        )
        options = ReceiveOptions(
            into=into, template=self._state_dict, progress=progress, terms=terms
        )
        receive = Receive(step, self._bridge, self._medium, options, deadline)
        with self._lifetime.call():
            self._health.check()
            try:
                with failing_here(f"receiving step {step}"):
                    async with (
                        deadline,
                        self._line(rank, sending=False, deadline=deadline) as line,
                    ):
                        return cast("T", await receive.run(line))
            except AiockptError as error:
                receive.annotate(error)
                raise

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Close everything but the group, which is the caller's.

        Calls that are under way fail at once, whatever ``wait`` says; a thread that
        waits for the group ends by itself, with the wait. If cancelled, the closing
        goes on by itself.
        """
        self._lifetime.bind()
        self._bridge.refuse()
        self._medium.close()
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING),
            partial(self._bridge.aclose, timeout=_CLOSING),
        )

    def _peer(self, rank: int) -> int:
        size = self._size()
        if not 0 <= rank < size:
            raise ValueError(f"{rank} is no rank of a group of {size}")
        if rank == rank_in(self._group):
            raise ValueError(f"{rank} is this process's own rank; name another rank")
        return rank

    def _size(self) -> int:
        try:
            return self._group.size()
        except Exception as error:  # torchft's has none until it is configured
            raise ProcessGroupError(str(error)) from error

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        ended = asyncio.get_running_loop().create_future()
        self._sends.add(ended)
        try:
            yield
        finally:
            self._sends.discard(ended)
            ended.set_result(None)

    @asynccontextmanager
    async def _line(
        self, rank: int, *, sending: bool, deadline: Deadline
    ) -> AsyncIterator[Line]:
        """Wait for the turn, then hold one conversation with ``rank``."""
        async with self._turn(rank, sending=sending):
            self._health.check()
            mover = self._medium.mover(self._group, rank, sending=sending)
            yield Line(mover, self._health, self._bridge, deadline)

    def _turn(self, rank: int, *, sending: bool) -> asyncio.Lock:
        # Messages of host memory have tags. A communicator of a device has an order
        # only, which both ends must keep: one thing at a time.
        key = (sending, rank) if self._medium.tagged else (True, -1)
        return self._turns.setdefault(key, asyncio.Lock())
