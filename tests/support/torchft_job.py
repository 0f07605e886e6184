"""A job of several replica groups under torchft, whose ranks can be killed.

``python torchft_job.py OPTIONS`` is one rank: it takes a JSON object (`Options`) and
prints what happens as JSON, line by line. ``lighthouse N`` runs torchft's lighthouse.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import aiockpt
import aiockpt.torchft
from aiockpt.runtime.sync_facade import SyncFacade
from aiockpt.testing import FaultProxy, faults
from tests.support.ports import free_port

SECONDS = 120

Event = dict[str, Any]


@dataclass
class Life:
    """One process of one rank, from its start to its end."""

    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    def events(self, kind: str = "") -> list[Event]:
        """Return what it has told, or that of a kind."""
        lines = self.output.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if kind in ("", each["event"])]

    @property
    def digest(self) -> str:
        """What it ended with."""
        (done,) = self.events("done")
        return str(done["digest"])

    def has_trained(self) -> bool:
        """Wait until it has trained to the end, or has ended otherwise."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and '"done"' not in self.output.read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def account(self) -> str:
        """Return what it told, what it logged last, and where its threads are."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # it writes where its threads are
        told, log = self.output.read_text()[-2000:], self.log.read_text()[-6000:]
        return f"{self.output.name}, {self.process.returncode}:\n{told}\n{log}"

    def let_go(self) -> None:
        """Allow it to end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        """Return its exit code."""
        return self.process.wait(SECONDS)


class Job:
    """Starts ranks with common options; kills what is left at the end.

    Args:
        path: Where the ranks' output goes.
        options: What all ranks are told; see `Options`.
    """

    def __init__(self, path: Path, *, replicas: int, **options: Any) -> None:
        self.lives: dict[tuple[int, int], list[Life]] = {}
        self._path = path
        self._options = {"until": 8, **options, "replicas": replicas}
        self._ranks = int(options.get("ranks", 1))
        self._count = 0
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        wanted = str(self._options.get("min_replicas", 1))
        self._lighthouse = self._run(
            "lighthouse", wanted, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._lighthouse.stdout is not None
        told = json.loads(self._lighthouse.stdout.readline())
        self._options["lighthouse"] = told["address"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for life in self.all():
            life.process.kill()
            life.let_go()
            life.process.wait()
        assert self._lighthouse is not None
        self._lighthouse.kill()
        self._lighthouse.communicate()

    def all(self) -> list[Life]:
        """Return every life of every rank."""
        return [life for lives in self.lives.values() for life in lives]

    def start(self, replica: int, **options: Any) -> list[Life]:
        """Start the ranks of a replica, which may have lived before."""
        port = free_port() if self._ranks > 1 else 0
        common = {**self._options, **options, "replica": replica, "store_port": port}
        per_rank = {key: common.pop(key) for key in [*common] if key.endswith("_of")}
        started = []
        for rank in range(self._ranks):
            own = {key[:-3]: value[rank] for key, value in per_rank.items()}
            started.append(self._start({**common, **own, "rank": rank}))
            self.lives.setdefault((replica, rank), []).append(started[-1])
        return started

    def _start(self, options: dict[str, Any]) -> Life:
        name = f"{options['replica']}-{options['rank']}-{self._count}"
        self._count += 1
        output, log = self._path / f"{name}.out", self._path / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            process = self._run(
                json.dumps(options), stdin=subprocess.PIPE, stdout=out, stderr=err
            )
        return Life(process, output, log)

    def _run(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment["TORCHFT_LOG_LEVEL"] = "warn"
        options.setdefault("stderr", subprocess.DEVNULL)
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        return subprocess.Popen(command, env=environment, **options)

    def finish(self) -> list[Life]:
        """Wait for the last life of every rank; all must end well and alike.

        None ends before all have trained to the end: their groups need each other.
        Returns those lives, in the order of replicas and ranks.
        """
        last = [lives[-1] for _, lives in sorted(self.lives.items())]
        for life in last:
            assert life.has_trained(), "\n".join(each.account() for each in self.all())
        for life in last:
            life.let_go()
        for life in last:
            assert life.wait() == 0, f"{life.log.read_text()[-3000:]}"
        for rank in range(self._ranks):
            digests = {life.digest for life in last[rank :: self._ranks]}
            assert len(digests) == 1, digests
        return last


def killed(life: Life) -> bool:
    """Wait for the end of a rank that kills itself; tell whether it did."""
    return life.wait() == -signal.SIGKILL


State = dict[str, Any]

LONG = f"http://127.0.0.1/{'a' * (5 << 20)}/"  # the Manager's messages have 4 MiB


@dataclass(frozen=True)
class Options:
    """What a rank is told.

    Attributes:
        fail: What goes wrong once, by name; see `Failing`.
        faults: What goes wrong with connections to this rank's server, one after the
            other, from the step ``faults_at`` on.
        die_at: The step after which the rank kills itself.
        wrapper: Average gradients in torchft's DistributedDataParallel; it ends the
            training when an error was reported before the backward pass, whoever did.
        until: The rank ends at this step or later, when all replicas take part.
    """

    lighthouse: str
    replica: int
    replicas: int
    until: int
    rank: int = 0
    ranks: int = 1
    store_port: int = 0
    min_replicas: int = 1
    async_quorum: bool = True
    transport: str = "http"
    timeout: float = 20.0
    group_timeout: float = 20.0
    die_at: int = -1
    fail: str = ""
    faults: list[str] = field(default_factory=list)
    faults_at: int = 0
    wrapper: bool = False
    width: int = 64


def tell(event: str, **facts: object) -> None:
    """Print one line."""
    print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)


async def nothing() -> None:
    """Close nothing: the process ends."""


class Failing:
    """Fails once in the way that is named, at the first call that it concerns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def once(self, name: str) -> bool:
        """Whether to fail now."""
        hit, self._name = self._name == name, "" if self._name == name else self._name
        if hit:
            tell("injected", name=name)
        return hit


class Watched:
    """A transport that tells what it is asked, and how long that took."""

    failing: Failing
    metadata: Callable[[], str]

    def send_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Send."""
        with timed("send", step=kwargs["step"], ranks=kwargs["dst_ranks"]):
            if self.failing.once("send"):
                kwargs["state_dict"]["user"]["default"]["odd"] = object()
            super().send_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self.failing.once("stuck reader"):
            self.stuck = stuck_reader(self.metadata(), kwargs["step"])
            tell("stuck", head=self.stuck.recv(12).decode())

    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Receive."""
        with timed("recv", step=kwargs["step"]):
            if self.failing.once("recv"):
                raise ConnectionError("injected")
            return super().recv_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def disallow_checkpoint(self) -> None:
        """Retract."""
        with timed("disallow"):
            super().disallow_checkpoint()  # type: ignore[misc]


def stuck_reader(metadata: str, step: int) -> socket.socket:
    """Ask for a checkpoint, and never read the answer."""
    told = urlsplit(metadata)
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect((told.hostname, told.port))
    lines = (
        f"GET {told.path}{step}/full HTTP/1.1",
        f"Host: {told.netloc}",
        f"Authorization: Bearer {told.fragment}",
    )
    stuck.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    return stuck


@contextmanager
def timed(event: str, **facts: object) -> Iterator[None]:
    """Tell how a call ended, and when."""
    started = time.monotonic()
    error = ""
    try:
        yield
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        tell(event, **facts, error=error, seconds=time.monotonic() - started)


class HTTP(Watched, aiockpt.torchft.HTTPTransport[State]):
    """Over HTTP, through a proxy where connections are to go wrong."""

    def __init__(self, options: Options, failing: Failing) -> None:
        told = LONG if failing.once("long metadata") else None
        timeout = timedelta(seconds=options.timeout)
        super().__init__(timeout, stall_timeout=1.0, advertise=told)
        self.failing = failing
        self._told = super().metadata()
        self._faults = [eval(each, vars(faults)) for each in options.faults]
        if self._faults:
            self._facade_of_proxy = SyncFacade("the proxy", at_exit=nothing)
            self._told = self._facade_of_proxy.call(
                self._proxied, timeout=5, phase="proxy"
            )

    async def _proxied(self) -> str:
        told = urlsplit(self._told)
        assert told.hostname is not None
        assert told.port is not None
        self._proxy = FaultProxy(told.hostname, told.port)
        await self._proxy.listen()
        return told._replace(netloc=f"127.0.0.1:{self._proxy.port}").geturl()

    def arm(self) -> None:
        """Let the next connections go wrong."""
        if self._faults:
            before = self._proxy.statistics().connections
            self._proxy.faults = [faults.Fault()] * before + self._faults
            tell("armed", before=before)
            self._faults = []

    def connections(self) -> int:
        """Return how many connections there were, if they were counted."""
        return self._proxy.statistics().connections

    def metadata(self) -> str:
        """Tell the proxy's address."""
        return self._told


class Group(Watched, aiockpt.torchft.PGTransport[State]):
    """Over the manager's own group, perhaps into what a callable returns."""

    def __init__(
        self,
        options: Options,
        failing: Failing,
        group: Any,
        template: Callable[[], State] | None,
    ) -> None:
        self.failing = failing
        limit = timedelta(seconds=options.timeout)
        super().__init__(group, limit, torch.device("cpu"), template)


def transport_of(options: Options, group: Any, template: Callable[[], State]) -> Any:
    """Make the transport that is asked for."""
    failing = Failing(options.fail)
    if options.transport in {"pg", "pg in place"}:
        in_place = template if "in place" in options.transport else None
        return Group(options, failing, group, in_place)
    return HTTP(options, failing)


def model_of(options: Options) -> nn.Module:
    """Make a model that differs from replica to replica until it is healed."""
    torch.manual_seed(options.replica * 10 + os.getpid() % 7)
    width = options.width
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    if options.ranks > 1:
        mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("shard",))
        fully_shard(model, mesh=mesh)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(state: object) -> str:
    """Return what two ranks with the same state agree on."""
    found = hashlib.sha256()
    leaves, _ = torch.utils._pytree.tree_flatten(state)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.update(local(leaf).detach().contiguous().numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


class Rank:
    """Trains under a manager."""

    def __init__(self, options: Options, store: Any) -> None:
        self.options = options
        group = ProcessGroupGloo(timedelta(seconds=options.group_timeout))
        self.transport = transport_of(options, group, self.template)
        self.manager = Manager(
            pg=group,
            min_replica_size=options.min_replicas,
            load_state_dict=self.load,
            state_dict=self.state,
            replica_id=f"replica{options.replica}_{options.replica}",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=options.rank,
            world_size=options.ranks,
            lighthouse_addr=options.lighthouse,
            # state_dict() of FSDP2 shards the parameters anew: never beside a forward
            # pass, which is where an asynchronous quorum calls it.
            use_async_quorum=options.async_quorum and options.ranks == 1,
            timeout=timedelta(seconds=options.timeout),
            quorum_timeout=timedelta(seconds=40),
            checkpoint_transport=self.transport,
            hostname="127.0.0.1",
        )
        self.model = model_of(options)
        self.wrapped = self.model
        if options.wrapper:
            self.wrapped = DistributedDataParallel(self.manager, self.model)
        self.optimizer = Optimizer(
            self.manager, torch.optim.Adam(self.model.parameters(), lr=1e-2)
        )

    def state(self) -> State:
        """Return what a healing replica needs."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def template(self) -> State:
        """Return what a manager sends, as far as this replica has it already."""
        return {"user": {"default": self.state()}}

    def load(self, state: State) -> None:
        """Take it."""
        own = self.model.state_dict()
        in_place = [
            local(own[name]).data_ptr() == local(tensor).data_ptr()
            for name, tensor in state["model"].items()
        ]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        tell("healed", step=self.manager.current_step(), in_place=all(in_place))

    def step(self) -> None:
        """Take one step over data of this replica's own."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.wrapped(torch.randn(8, 16)).square().mean()
        loss.backward()
        if not self.options.wrapper:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                self.manager.allreduce(local(parameter.grad)).wait()
        before = self.manager.current_step()
        self.optimizer.step()
        now = self.manager.current_step()
        with_all = self.manager.num_participants()
        tell("step", step=now, committed=now > before, participants=with_all)
        if now == self.options.die_at:
            if self.options.ranks > 1:
                dist.barrier()  # the ranks of a replica die together
            os.kill(os.getpid(), signal.SIGKILL)

    def train(self) -> None:
        """Train until everybody takes part, and has for long enough."""
        options, manager = self.options, self.manager
        tell("ready", metadata=len(self.transport.metadata()))
        while True:
            if options.faults and manager.current_step() >= options.faults_at:
                self.transport.arm()
            self.step()
            everybody = manager.num_participants() == options.replicas
            if manager.current_step() >= options.until and everybody:
                break
            # The first rank joins each quorum last: what it reports is then what the
            # manager takes for the state of the whole group.
            time.sleep(0.3 if options.ranks > 1 and options.rank == 0 else 0.02)
        if options.faults:
            tell("proxy", connections=self.transport.connections())
        tell("done", step=manager.current_step(), digest=digest(self.state()))
        sys.stdin.readline()  # the others' last step ends too, before the groups go
        manager.shutdown(wait=False)


def store_of(options: Options) -> Any:
    """Make, or find, the store of a replica group."""
    tcp_store: Callable[..., Any] = dist.TCPStore  # type: ignore[attr-defined]
    first = options.rank == 0
    store = tcp_store(
        "127.0.0.1", options.store_port, is_master=first, wait_for_workers=False
    )
    if options.ranks > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("default", store),  # type: ignore[attr-defined]
            rank=options.rank,
            world_size=options.ranks,
        )
    return store


def lighthouse(replicas: int) -> None:
    """Run a lighthouse that notices soon who is gone."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=replicas,
        join_timeout_ms=20000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1500,
    )
    tell("lighthouse", address=server.address())
    sys.stdin.readline()
    server.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "lighthouse":
        lighthouse(int(sys.argv[2]))
    else:
        faulthandler.register(signal.SIGUSR1)  # tells where all threads are
        asked = Options(**json.loads(sys.argv[1]))
        made = store_of(asked)
        Rank(asked, made).train()
        os._exit(0)  # torchft leaves threads of other languages behind
