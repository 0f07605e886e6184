"""The engines of a vLLM worker and of a trainer, for vLLM's four phases.

The interface is that of vLLM 0.32 (``vllm.distributed.weight_transfer.base``). The
trainer publishes a step over HTTP, and each worker pulls it: there is no process group
between them and no pickle, and engines may come and go.

By default every rank of a trainer takes part in a gather of each tensor, and rank 0
publishes the full tensors. With ``shards=True`` each rank publishes what it holds. The
ranks meet in their own process group, so that a rank that fails keeps no other one
waiting. Rank 0 alone drives the client in both cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import base

from aiockpt.checkpointers.ranks import gathered
from aiockpt.errors import LocalProtocolError, PeerFailedError, TemplateMismatchError
from aiockpt.format.chunks import Algorithm
from aiockpt.http.options import Auth, Server
from aiockpt.http.protocol import join_metadata
from aiockpt.http_transport import HTTPTransport
from aiockpt.runtime.secrets import discreet
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.state.distributed import has_version
from aiockpt.state.flatten import ready_for_threads
from aiockpt.vllm.mirror import HostMirror

_SHUTDOWN_S = 10.0


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    """Where a worker gets the weights, as plain JSON.

    Attributes:
        metadata: The string that the trainer's transport returned, or that of
            `aiockpt.join_metadata` for the ranks of a trainer.
        timeout: Seconds that an update waits for its step.
        token: The trainer's token, if the metadata does not contain it.
        swarm: Whether the hosts of engines serve each other. There is no swarm of
            several senders.
    """

    metadata: str
    timeout: float = 300.0
    token: str | None = None
    swarm: bool = False


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    """The step of one update, as plain JSON."""

    step: int


class ReceivingEngine(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    """Prefetches each step while vLLM serves, and loads the step that is asked for.

    The model is not touched before all of the step is in host memory, and verified. So
    the old weights serve on after any failure before that, and the next update works.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: Any
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._facade: SyncFacade | None = None
        self._mirror: HostMirror | None = None
        self._timeout = 0.0
        # A model that is gone leaves nothing that another one at its address could get.
        self._layouts: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._is_loading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin to follow a trainer, in place of an earlier one. Returns at once.

        Raises:
            LocalProtocolError: the metadata is malformed.
        """
        mirror = HostMirror(
            init_info.metadata, token=init_info.token, swarm=init_info.swarm
        )
        self.shutdown()
        self._mirror = mirror
        self._timeout = init_info.timeout
        self._facade = SyncFacade("the weight transfer engine", at_exit=_nothing)
        follow = partial(_begin, self._mirror)
        self._task = self._facade.call(follow, timeout=_SHUTDOWN_S, phase="start")

    def start_weight_update(self) -> None:
        """Do nothing: a model that waits for a step must be able to serve on."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Wait until the step is in host memory, and load it into the model.

        Raises:
            LocalProtocolError: `init_transfer_engine` was not called.
            StepNotFoundError: the trainer has published a later step already.
            TransferTimeoutError: the step has not arrived in time.
            TemplateMismatchError: the step has other parameters than the step before.
            AiockptError: the trainer cannot be followed any more.
        """
        from vllm.model_executor.model_loader.mtp_validation import (
            disable_mtp_completeness_check,
        )
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._facade is None or self._mirror is None:
            raise LocalProtocolError(
                "the weight transfer engine follows no trainer: call "
                "init_weight_transfer_engine first"
            )
        wait = partial(self._mirror.wait_for, update_info.step, self._timeout)
        state = self._facade.call(wait, timeout=self._timeout, phase="recv")
        layout = {name: (each.dtype, each.shape) for name, each in state.items()}
        known = self._layouts.get(self.model)
        if known is not None and known != layout:
            _refuse(known, layout)
        self._is_loading = True
        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            self.model.load_weights(iter(state.items()))
        self._layouts[self.model] = layout

    def finish_weight_update(self) -> None:
        """Complete the layers that vLLM processes last."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._is_loading:
            self._is_loading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Stop following the trainer, and free the host memory. Idempotent."""
        facade, self._facade, self._mirror = self._facade, None, None
        if facade is not None:
            facade.close(_nothing, wait=_SHUTDOWN_S)


class ShardSource(base.WeightSource):
    """The parameters of a module as this rank holds them, for ``shards=True``.

    vLLM's ``ModuleSource`` gathers each tensor. This source gathers nothing. A source
    of your own must yield DTensors in the same way. It may leave to other ranks what
    its ``held_names()`` does not have.

    Args:
        module: The module. Its sharded parameters are DTensors.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[base.ParamMeta]:
        """Return the name, the dtype and the global shape of each parameter."""
        return [
            base.ParamMeta(name, each.dtype, tuple(each.shape))
            for name, each in self._module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._module.named_parameters())


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):
    """How a trainer publishes its weights.

    Attributes:
        server: Where to serve. ``keep_base=True`` sends only the changed elements.
        auth: Who may read.
        timeout: Seconds for staging a step, and for an update of a worker.
        step: The step of the training so far; `TrainerEngine.send_weights` counts on.
        swarm: Whether the hosts of engines serve each other what they have verified.
        digest: Of the chunks, as `HTTPTransport` has it.
        shards: Whether every rank publishes its own shards, without a gather. The
            source must yield them, as `ShardSource` does.
        group: With ``shards``, the process group of the trainer's ranks. ``rank`` is
            this process's rank in it. None: the default group.
    """

    backend: ClassVar[str] = "aiockpt"

    server: Server = Server()  # noqa: RUF009 - frozen
    auth: Auth = Auth()  # noqa: RUF009 - frozen
    timeout: float = 300.0
    step: int = 0
    swarm: bool = False
    digest: Algorithm = "xxh3-128"
    shards: bool = False
    group: Any = None


class TrainerEngine(base.TrainerWeightTransferEngine[TrainerInitInfo]):
    """Publishes the weights of a source, and drives the engines' update.

    Attributes:
        version: The last step that all engines have loaded; None: none yet. Of a rank
            that does not publish, it is always None.
        metadata: The string that engines follow. Empty on ranks that do not publish.
    """

    init_info_cls = TrainerInitInfo

    def __init__(
        self, init_info: TrainerInitInfo, *, client: Any, source: base.WeightSource
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        if init_info.shards:
            _check_shards(init_info, source)
        self.version: int | None = None
        self.metadata = self._own = ""
        self._step, self._timeout = init_info.step, init_info.timeout
        self._shards, self._group = init_info.shards, init_info.group
        self._staged: dict[str, torch.Tensor] = {}
        self._facade: SyncFacade | None = None
        if self.is_sender or self._shards:
            self._transport: HTTPTransport[Any] = HTTPTransport(
                timeout=init_info.timeout,
                server=init_info.server,
                auth=init_info.auth,
                digest=init_info.digest,
            )
            self._swarm = init_info.swarm
            abrupt = partial(self._transport.shutdown, wait=False)
            self._facade = SyncFacade("the trainer's engine", at_exit=abrupt)

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: base.VLLMWeightSyncClient,
        source: base.WeightSource | None = None,
    ) -> Self:
        """Serve, and let the engines follow; for every rank of the trainer.

        Raises:
            ValueError: there is no source; or ``shards`` does not fit the rank, the
                source or ``swarm``.
            PeerFailedError: another rank has failed.
            OSError, AiockptError: the transport cannot serve.
        """
        if source is None:
            raise ValueError("the backend aiockpt needs a WeightSource")
        engine = cls(init_info, client=client, source=source)
        try:
            engine.announce()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def announce(self) -> None:
        """Let the engines of the client follow this trainer; also a new engine.

        With ``shards``, every rank calls this at the same time. While a rank that has
        restarted makes its engine, all others call this, in the new process group. All
        ranks then go on from the highest of their steps.
        """
        if self._facade is None:
            return
        said = self._meet(self._serve)
        self.metadata = join_metadata([each.metadata for each in said])
        self._meet(self._introduce)

    def send_weights(self, step: int | None = None) -> None:
        """Publish the source's weights, and have all engines load them.

        Every rank of the trainer calls this. A publication is whole or not at all. If
        this raises, `version` stays, and the next call sends a later step. Engines that
        did not fail may serve the new step already, most often under its predecessor's
        ``weight_version``.

        With ``shards``, this returns on each rank when all engines have loaded the
        step. If it raises on one rank, it raises on all.

        Args:
            step: The step of the training. None: one more than the last one.

        Raises:
            ValueError: the step is not later than the last one; or the source yields
                other tensors than its ``metadata()`` says; or the ranks send different
                steps.
            PeerFailedError: another rank has failed.
            AiockptError: the weights cannot be published.
            Exception: what the client raises.
        """
        said = self._meet(partial(self._publish, step))
        if len(steps := {each.step for each in said}) > 1:
            raise ValueError(f"the ranks send different steps: {sorted(steps)}")
        self._meet(self._update)
        if self._facade is not None:
            self.version = self._step

    def shutdown(self) -> None:
        """Stop serving. Idempotent."""
        if self._facade is not None:
            self._facade.close(self._transport.shutdown, wait=_SHUTDOWN_S)

    def _meet(self, work: Callable[[], None]) -> Sequence[_Said]:
        """Do the work of this rank; with shards, wait until all ranks have done theirs.

        Returns:
            What the ranks say, in their order.

        Raises:
            PeerFailedError: another rank has failed.
            Exception: what the work of this rank raises, after the others know of it.
        """
        try:
            work()
        except Exception as error:
            with suppress(Exception):  # a rank is lost, too: the first error counts
                self._tell(str(error) or type(error).__name__)
            raise
        said = self._tell()
        for rank, each in enumerate(said):
            if each.failure:
                raise PeerFailedError(rank, each.failure)
        return said

    def _tell(self, failure: str = "") -> Sequence[_Said]:
        """Tell the other ranks of this one, and take over the highest of the steps."""
        own = _Said(self._step, self._own, failure)
        if not self._shards:
            return [own]
        said = _exchanged(own, self._group)
        self._step = max(each.step for each in said)
        return said

    def _serve(self) -> None:
        assert self._facade is not None
        self._own = self._facade.call(self._start, timeout=self._timeout, phase="start")

    def _introduce(self) -> None:
        """Let the engines of the client follow the trainer."""
        if self.is_sender:
            info = {
                "metadata": self.metadata,
                "timeout": self._timeout,
                "swarm": self._swarm,
            }
            self.client.init_weight_transfer_engine(info)

    def _publish(self, step: int | None) -> None:
        """Publish what this rank has to, or take part in the gather."""
        assert self.source is not None
        if step is not None and step <= self._step:
            raise ValueError(f"step {step} is not later than step {self._step}")
        # Both are collectives for some sources, so every rank asks for both.
        declared = self.source.metadata()
        if self._facade is None:
            for _ in self.source:
                pass
            return
        state = self._collect(self.source)
        names: Collection[str] = [meta.name for meta in declared]
        if self._shards:
            held = self.source.held_names()
            names = names if held is None else held
            _check_shapes(declared, state)
        _check_names(names, state)
        self._step = self._step + 1 if step is None else step
        ready = ready_for_threads(state)
        send = partial(
            self._transport.send_checkpoint, step=self._step, state_dict=ready
        )
        self._facade.call(send, timeout=self._timeout, phase="stage")

    def _update(self) -> None:
        """Have all engines load the step."""
        if not self.is_sender:
            return
        try:
            self.client.start_weight_update()
            self.client.update_weights({"step": self._step})
            self.client.finish_weight_update(weight_version=str(self._step))
        except BaseException:
            # Engines that have not failed wait for the end of this update.
            with suppress(Exception):
                self.client.finish_weight_update()
            raise

    async def _start(self) -> str:
        await self._transport.start()
        return self._transport.metadata()

    def _collect(self, source: base.WeightSource) -> dict[str, torch.Tensor]:
        """Return all weights; full ones of a device in host memory, one at a time.

        A source may gather each tensor on the device, which has no memory for all.
        """
        found: dict[str, torch.Tensor] = {}
        is_alone = self._shards and dist.get_world_size(self._group) == 1
        for name, tensor in source:
            if self._shards and tensor is None:  # another rank holds it
                continue
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"the source does not hold {name}: aiockpt needs a source that "
                    "yields every full tensor on rank 0, or shards=True"
                )
            weights: Any = tensor.detach()
            if is_alone and has_version(weights):
                weights = weights.full_tensor()
            if not self._shards and weights.device.type != "cpu":
                weights = self._to_host(name, weights)
            found[name] = weights
        return found

    def _to_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        staged = self._staged.get(name)
        if staged is None or (staged.shape, staged.dtype) != (
            tensor.shape,
            tensor.dtype,
        ):
            staged = self._staged[name] = torch.empty_like(tensor, device="cpu")
        return staged.copy_(tensor)


class _Said(msgspec.Struct, frozen=True):
    """What a rank tells the others of its trainer, as JSON.

    Attributes:
        step: The last step that it has published.
        metadata: The string of its own transport.
        failure: Why it has failed; empty: it has not.
    """

    step: int
    metadata: str
    failure: str

    def __repr__(self) -> str:  # the metadata has a token
        return f"<step {self.step}{f': {self.failure}' if self.failure else ''}>"


@discreet
def _exchanged(own: _Said, group: Any) -> Sequence[_Said]:
    """Return what all ranks of a group say; each rank calls this."""
    found = gathered(msgspec.json.encode(own), group)
    return [msgspec.json.decode(each, type=_Said) for each in found]


def _check_shards(info: TrainerInitInfo, source: base.WeightSource) -> None:
    """Refuse what does not fit the shards of several ranks."""
    if info.swarm:
        raise ValueError("shards=True and swarm=True do not work together yet")
    if isinstance(source, base.ModuleSource):
        raise ValueError(
            "ModuleSource gathers every tensor: with shards=True pass "
            "aiockpt.vllm.ShardSource(module)"
        )
    if not dist.is_initialized():
        raise ValueError("shards=True needs torch.distributed: initialize it first")
    if (rank := dist.get_rank(info.group)) != info.rank:
        raise ValueError(
            f"this process is rank {rank} of its group: with shards=True pass that, "
            f"not rank={info.rank}"
        )


async def _begin(mirror: HostMirror) -> asyncio.Task[None]:
    """Run a mirror until its loop closes; the caller keeps the task."""
    return asyncio.create_task(mirror.run())


async def _nothing() -> None:
    """Do nothing: the facade cancels the mirror's task."""


def _refuse(known: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise the first difference of two layouts."""
    for name in sorted({*known, *layout}):
        if (old := known.get(name)) != (new := layout.get(name)):
            raise TemplateMismatchError(name, expected=str(new), actual=str(old))


def _check_shapes(
    expected: Sequence[base.ParamMeta], found: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a source that yields bare local tensors, which have no place in full."""
    for meta in expected:
        shape = found[meta.name].shape if meta.name in found else meta.shape
        if tuple(shape) != tuple(meta.shape):
            raise ValueError(
                f"the source has yielded {meta.name} of shape {tuple(shape)}, and has "
                f"declared {tuple(meta.shape)}: with shards=True it yields DTensors"
            )


def _check_names(expected: Collection[str], found: Mapping[str, Any]) -> None:
    if missing := {*expected} - {*found}:
        raise ValueError(f"the source has not yielded {min(missing)}")
    if more := {*found} - {*expected}:
        raise ValueError(f"the source has yielded {min(more)}, which is not declared")
