"""One replica of the job under torchft's surviving allreduce, and the lighthouse that all of them need.

    PYTHON -m benchmarks.surviving_allreduce.with_torchft lighthouse            # prints its address, until it is killed
    PYTHON -m benchmarks.surviving_allreduce.with_torchft replica N ADDRESS     # prints a line for each step

PYTHON is that of an environment with torchft. It is no dependency of Shoal, and nothing else of Shoal imports it.
"""

import json
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.surviving_allreduce.bench import BATCH, LEAST, RATE, SEED, WORKERS, network


def lighthouse() -> None:
    """It says who takes part in a step."""
    made: Any = import_module("torchft.coordination").LighthouseServer
    server = made(bind="127.0.0.1:0", min_replicas=LEAST, join_timeout_ms=1000, quorum_tick_ms=100)
    print(server.address(), flush=True)
    threading.Event().wait()


def replica(number: int, address: str) -> None:
    """Train until killed; a line for each step that counts: how many took part, which step, when."""
    torchft: Any = import_module("torchft")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    store: Any = import_module("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=LEAST,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica{number}",
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, sgd)
    draws = torch.Generator().manual_seed(number)
    while True:
        x = torch.randn(BATCH // WORKERS, 1, 32, 32, generator=draws)
        y = torch.randint(10, (BATCH // WORKERS,), generator=draws)
        before = manager.current_step()
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        # Not by its DistributedDataParallel: with torch 2.13 that fails by an AssertionError (`assert fut._fut`)
        # when a replica is lost within an allreduce.
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        mean = torch.cat([gradient.view(-1) for gradient in gradients])
        manager.allreduce(mean).wait()
        for gradient, part in zip(gradients, torch.split(mean, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        if manager.current_step() > before:
            said = {"step": manager.current_step(), "together": manager.num_participants(), "when": time.time()}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse()
    else:
        replica(int(sys.argv[2]), sys.argv[3])
