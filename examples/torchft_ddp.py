"""torchft's DDP training with our transport: a replica is killed, and healed."""

import logging
import os
import subprocess
import sys

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from aiockpt.torchft import HTTPTransport


def train(replica: str, lighthouse: str, die_at: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(store.port), TORCHFT_LIGHTHOUSE=lighthouse)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=2,
        load_state_dict=None,
        state_dict=None,
        replica_id=f"replica_{replica}",
        checkpoint_transport=HTTPTransport(timeout=60),  # all that differs
    )
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 8))
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=1e-5))
    for name, part in (("model", model), ("optimizer", optimizer)):
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    while manager.current_step() < 8:
        optimizer.zero_grad()
        parallel(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        if manager.current_step() == die_at:
            os.abort()
    print(f"replica {replica} ends with {next(model.parameters())[0, 0].item():.6f}")
    manager.shutdown()


def start(replica: int, lighthouse: str, die_at: int = -1) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-u", __file__, str(replica), lighthouse, str(die_at))
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603 - itself


if __name__ == "__main__":
    if sys.argv[1:]:
        # A recovery is one line: where from, bytes, seconds, GB/s.
        logging.getLogger("aiockpt").setLevel(logging.INFO)
        logging.getLogger("aiockpt").addHandler(logging.StreamHandler(sys.stdout))
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        os._exit(0)  # torchft leaves threads behind
    server = LighthouseServer("127.0.0.1:0", 2, heartbeat_timeout_ms=1000)
    first = start(0, server.address())
    assert start(1, server.address(), die_at=4).wait() != 0
    print("replica 1 died at step 4; another one takes its place", flush=True)
    assert start(1, server.address()).wait() == first.wait() == 0
