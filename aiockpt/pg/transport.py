"""PGTransport: send a checkpoint over a process group, from rank to rank."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Final, Never, cast

import torch

from aiockpt.errors import AiockptError, LocalProtocolError, ProcessGroupError
from aiockpt.events import Progress, TransferEvent, emit
from aiockpt.format.limits import Limits
from aiockpt.memory.device import Accelerator, numbered, port_for
from aiockpt.pg.conversation import GroupRanks, Kind, telling
from aiockpt.pg.device import Device, DeviceMedium
from aiockpt.pg.messages import GroupLike, HostMedium, Medium, Parcel, rank_in
from aiockpt.pg.source import GroupSource
from aiockpt.runtime.bridge import Bridge
from aiockpt.runtime.lifetime import Deadline, Lifetime
from aiockpt.runtime.system import failing_here
from aiockpt.runtime.tasks import run_all
from aiockpt.state.selection import Select
from aiockpt.transfer.options import ReceiveOptions
from aiockpt.transfer.receive import receive
from aiockpt.transport import (
    REQUIRED,
    CheckpointTransport,
    T,
    Timeout,
    exact_step,
    names_its_options,
    refuse_unknown,
    require_given,
    seconds,
    whole_number,
)

_METADATA: Final = "aiockpt-process-group"
_THREADS: Final = 2
_CLOSING_S: Final = 5.0  # for running calls to end, and then for the threads
_HOST: Final = torch.device("cpu")


class PGTransport(CheckpointTransport[T]):
    """Sends a checkpoint to ranks of a process group, and receives from other ranks.

    A send ends when its receivers have the checkpoint. Both ends call at about the same
    time, and the earlier one waits. The transport belongs to the event loop that uses
    it first.

    Pass a separate group, not the one that trains. A cancelled call, a timeout or a
    dead peer leaves messages in the group that cannot be taken back. Then the transport
    is broken: every send and receive raises ``ProcessGroupError``, and you need a new
    group.

    Args:
        pg: The group: gloo for host memory, NCCL for CUDA; a
            ``torch.distributed.ProcessGroup``, or torchft's. The transport does not
            destroy it.
        timeout: The default deadline of a send or a receive, in seconds or as a
            ``timedelta``.
        device: The device on which the group's backend needs its tensors. Tensors on
            such a device are sent, received and verified there, without a copy to the
            host; this has not been measured. Calls then run one after the other, and
            both ends must make them in the same order.
        state_dict: Returns a template; called on the loop at each receive without
            ``into``. A tensor of the template with the same path, dtype, shape and
            strides is filled in place. All others get new memory; for example, an
            optimizer has no state before its first step. If it raises, the sender is
            told.
        chunk_bytes: The bytes that one digest covers; a multiple of 64.
        limits: The largest sizes that a receive accepts.
        allow_pickle: Send and accept leaves as pickles if no other encoding fits them.
            A pickle runs code in the receiver. Both ends need this option.
    """

    @names_its_options
    def __init__(
        self,
        pg: GroupLike,
        timeout: Timeout = 60.0,
        device: torch.device = _HOST,
        state_dict: Callable[[], T] | None = None,
        *,
        chunk_bytes: int = 16 << 20,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        allow_pickle: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown(PGTransport, unknown)
        self._group = pg
        self._timeout = seconds(timeout)
        self._state_dict = state_dict
        self._limits = limits
        self._allow_pickle = allow_pickle
        self._lifetime = Lifetime("the transport")
        self._staging = asyncio.Lock()
        self._sends: set[asyncio.Future[None]] = set()
        self._bridge = Bridge(threads=_THREADS, name="aiockpt-pg")
        self._medium = _medium_of(
            device,
            self._bridge,
            chunk_bytes=chunk_bytes,
            allow_pickle=allow_pickle,
            limits=limits,
        )
        self._ranks = GroupRanks(pg, self._medium, self._bridge)

    def __repr__(self) -> str:
        broken = " broken" if self._ranks.broken else ""
        try:
            return f"<PGTransport ranks={self._size()}{broken}>"
        except ProcessGroupError:
            return f"<PGTransport without a group{broken}>"

    def metadata(self) -> str:
        """Return a constant; the ranks of the group know each other.

        Raises:
            ClosedError: after :meth:`shutdown`.
        """
        self._lifetime.check()
        return _METADATA

    @names_its_options
    async def send_checkpoint(
        self,
        dst_ranks: Sequence[int] | None = None,
        step: int = REQUIRED,
        state_dict: T = REQUIRED,
        timeout: Timeout | None = None,
        **unknown: Never,
    ) -> None:
        """Send ``state_dict`` as ``step`` to all ``dst_ranks`` in parallel.

        The send waits for the device work that the current streams have when this call
        begins to run, and for no later work.
        The call returns when every receiver has verified the checkpoint or has failed.
        If it cannot be sent, waiting receivers are told at once, and the others when
        they receive this step or an earlier one. If cancelled before anything was sent,
        the receivers continue to wait. If cancelled later, the transport is broken.

        Args:
            dst_ranks: The receivers. None: every other rank of the group.
            step: The number of the checkpoint.
            state_dict: The state to send. Do not change it during the call.
            timeout: The deadline of the whole call, in seconds or as a ``timedelta``.

        Raises:
            UnsupportedLeafError: a leaf has a type that no checkpoint can hold. The
                group still works.
            StagingError: a copy failed, or the host lacks memory. The group still
                works.
            ValueError: ``dst_ranks`` has this rank, a rank twice, or a rank that is not
                in the group; or it is None, and the group does not know this rank.
            PeerFailedError: a receiver refused the checkpoint; the message says why.
                The group still works.
            ProcessGroupError: the group is broken; ``rank`` is the peer that broke it.
            TransferTimeoutError: a receiver did not call, or did not finish, in time.
            ClosedError: after, or because of, :meth:`shutdown`.
        """
        refuse_unknown(PGTransport.send_checkpoint, unknown)
        require_given("send_checkpoint", step=step, state_dict=state_dict)
        marks = self._medium.mark(port_for)
        step = exact_step(step)
        if dst_ranks is None:
            dst_ranks = self._other_ranks()
        ranks = [self._peer(rank) for rank in dst_ranks]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"dst_ranks has a rank twice: {dst_ranks}")
        limit = self._timeout if timeout is None else seconds(timeout)
        deadline = Deadline(limit, phase="stage", what=f"step {step}")
        started = time.monotonic()
        here = failing_here(f"sending step {step}")
        with self._lifetime.call(), self._under_way(), here:
            self._ranks.check()
            async with deadline:
                try:
                    async with self._staging:  # so that two sends keep their order
                        parcel = await self._medium.stage(
                            state_dict, step=step, marks=marks
                        )
                except Exception as error:
                    await self._tell(ranks, step, error, deadline)
                    raise
                try:
                    deadline.phase = "serve"
                    deliver = partial(self._deliver, parcel=parcel, deadline=deadline)
                    errors = await _with_each(ranks, deliver)
                finally:
                    parcel.release()
                if errors:
                    first, *others = errors
                    for other in others:
                        first.add_note(f"also failed: {other}")
                    raise first
        emit(
            TransferEvent(
                stop="serve",
                step=step,
                peer=f"ranks {', '.join(map(str, ranks))}",
                nbytes=parcel.manifest.segment_bytes,
                seconds=time.monotonic() - started,
                level=logging.INFO,
            )
        )

    async def disallow_checkpoint(self) -> None:
        """Wait until no send is running; a finished send leaves nothing published.

        To cancel a send would break the group, so the call waits for it, at most until
        the deadline of the send. If cancelled, the send continues.
        """
        self._lifetime.bind()
        if self._sends:
            await asyncio.wait(self._sends)

    @names_its_options
    async def recv_checkpoint(
        self,
        src_rank: int = 0,
        metadata: str = _METADATA,
        step: int = REQUIRED,
        timeout: Timeout | None = None,
        *,
        into: T | None = None,
        direct: bool = False,
        select: Select | None = None,
        progress: Callable[[Progress], None] | None = None,
        **unknown: Never,
    ) -> T:
        """Receive ``step`` from ``src_rank``; wait until it is sent.

        If cancelled while it waits for the sender or later, the transport is broken.

        Args:
            src_rank: The sender's rank in the group.
            metadata: The string of a ``PGTransport``'s :meth:`metadata`; the default.
            step: The step to receive.
            timeout: The deadline of the whole call, in seconds or as a ``timedelta``.
            into: A template: a state dict to fill and return. Its tensors are filled
                in place, its dicts and lists get the other values. It is checked
                before its tensors move, and changed only after all bytes are verified.
            direct: With ``into``: receive straight into the memory of the template. If
                such a receive fails, a note of the error says whether the template was
                changed. Nothing may resize its storages meanwhile: no thread, task or
                progress callback. After a cancelled receive, gloo may write to them
                until the group is destroyed.
            select: Refused, because a sender sends the same bytes to all ranks. Use an
                ``HTTPTransport`` to receive parts.
            progress: Called with :class:`.Progress` as bytes arrive.

        Raises:
            LocalProtocolError: ``select`` was given. The group still works, and the
                send still waits for a receive.
            StepNotFoundError: the sender sends another step. The sender is told.
            PeerFailedError: the sender cannot send; the message says why. The group
                still works.
            ProcessGroupError: the group is broken.
            TransferTimeoutError: the deadline passed.
            TemplateMismatchError: ``into`` does not fit the checkpoint. The sender is
                told; the call waits for it until the deadline.
            ProtocolError: see the error tree.
        """
        refuse_unknown(PGTransport.recv_checkpoint, unknown)
        require_given("recv_checkpoint", step=step)
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
        deadline = Deadline(limit, phase="fetch_manifest", what=what)
        options = ReceiveOptions(
            limits=self._limits,
            allow_pickle=self._allow_pickle,
            into=into,
            template=self._state_dict,
            direct=direct,
            progress=progress,
            ports=port_for,
            marks=self._medium.mark(port_for),
            ahead=True,  # gloo has one thread, for the wire and for the pages
        )
        source = GroupSource(step, rank, self._ranks, self._limits, deadline)
        with self._lifetime.call():
            self._ranks.check()
            async with deadline:
                found = await receive(source, step, options, self._bridge, deadline)
                return cast("T", found.state_dict)

    async def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """Close everything but the group. Idempotent.

        Calls that still run fail at once, whatever ``wait`` says. A thread that waits
        for the group ends when that wait ends. If cancelled, the shutdown continues in
        the background.
        """
        self._lifetime.bind()
        self._bridge.refuse()
        self._medium.close()
        await self._lifetime.end(
            partial(self._lifetime.calls_ended, timeout=_CLOSING_S),
            partial(self._bridge.aclose, timeout=_CLOSING_S),
        )

    def _peer(self, rank: int) -> int:
        rank, size = whole_number(rank, "rank"), self._size()
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in the group, which has {size} ranks")
        if rank == rank_in(self._group):
            raise ValueError(f"rank {rank} is this process: pass another rank")
        return rank

    def _other_ranks(self) -> list[int]:
        own = rank_in(self._group)
        if own is None:
            raise ValueError(
                "this group does not know the rank of this process: pass dst_ranks="
            )
        return [rank for rank in range(self._size()) if rank != own]

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

    async def _deliver(self, rank: int, parcel: Parcel, deadline: Deadline) -> None:
        turn = self._ranks.turn(rank, sending=True, deadline=deadline)
        async with turn as peer, peer.opened():
            await peer.say(Kind.OFFER, parcel.manifest.step, len(parcel.offer))
            await peer.hear(Kind.ACCEPT)
            await peer.send(parcel.offer)
            await peer.hear(Kind.ACCEPT)
            await peer.send_segment(parcel.memory, parcel.messages, parcel.digests)
            await peer.hear(Kind.DONE)

    async def _tell(
        self, ranks: Sequence[int], step: int, error: Exception, deadline: Deadline
    ) -> None:
        """Tell receivers why the send failed; add a note for those not reached."""

        async def refuse(rank: int) -> None:
            turn = self._ranks.turn(rank, sending=True, deadline=deadline)
            async with turn as peer:
                await peer.post_refusal(step, error)

        async with telling(error, "the receivers", deadline):
            for lost in await _with_each(ranks, refuse):
                error.add_note(f"a receiver could not be told: {lost}")


async def _with_each(
    ranks: Sequence[int], talk: Callable[[int], Awaitable[None]]
) -> list[AiockptError]:
    """Talk to all ranks in parallel; return the errors in the order of the ranks.

    The error of one rank does not stop the others.
    """

    async def attempt(rank: int) -> AiockptError | None:
        try:
            await talk(rank)
        except AiockptError as error:
            return error
        return None

    errors = await run_all([partial(attempt, rank) for rank in ranks])
    ordered = sorted(zip(ranks, errors, strict=True), key=itemgetter(0))
    return [error for _, error in ordered if error is not None]


def _medium_of(
    device: torch.device,
    bridge: Bridge,
    *,
    chunk_bytes: int,
    allow_pickle: bool,
    limits: Limits,
) -> Medium:
    """Return the medium of a transport whose group needs tensors on ``device``."""
    device = numbered(device)
    made: Callable[..., Medium] = HostMedium
    if device.type != "cpu" and (port := port_for(device)) is not None:
        made = partial(DeviceMedium, Device(device, port, line=Accelerator(device)))
    return made(
        bridge, chunk_bytes=chunk_bytes, allow_pickle=allow_pickle, limits=limits
    )
