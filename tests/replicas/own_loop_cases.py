"""What the ranks of a world do with `shoal.exchange`; `test_own_loop.py` says what must come of it."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import ShoalError
from shoal.execution import ParallelModule
from shoal.replicas.own_loop import OwnLoop
from tests.exchanging.together import batch, network, sgd

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PLAIN = {"sparse": "none", "decay": "none"}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "backup": ("backup", {"backups": 1}),
    "backup0": ("backup", {"backups": 0}),
    "direct": ("downpour", {"servers": "direct"}),
    "processes": ("downpour", {"servers": "processes", "shards": 2}),
    "threads": ("downpour", {"servers": "threads"}),
    "n_sync": ("downpour", {"n_sync": 3}),
    "apart": ("downpour", {"n_push": 2, "n_fetch": 3, "servers": "processes"}),
    "stale": ("downpour", {"max_staleness": 1, "n_sync": 2}),
    "dasgd": ("dasgd", {}),
    "dasgd_links": ("dasgd", {"servers": "processes", "n_sync": 2}),
    "dasgd_server": ("dasgd", {"momentum_at": "server", "n_sync": 1}),
    "softsync": ("softsync", {}),
    "hogwild": ("hogwild", {}),
    "easgd": ("easgd", {"period": 2}),
    "admm": ("admm", {"period": 2}),
    "gossip": ("gossip", {"period": 1, "mode": "push"}),
    "pairs": ("gossip", {"period": 2, "mode": "pair"}),
    "pairs_topk": ("gossip", {"period": 1, "mode": "pair", "compress": "topk"}),
    "gossip_int8": ("gossip", {"period": 1, "mode": "push", "compress": "int8"}),
    "local": ("local", {"period": 2}),
    "local_sign": ("local", {"period": 2, "compress": "sign"}),
    "once": ("local", {"average": "once"}),
}
"""Exchanges whose replicas may take different numbers of steps."""
IN_STEP: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "sync": ("sync", {"shards": 2}),
    "sync_threads": ("sync", {"servers": "threads"}),
}
EVERY = {**SERVED, **IN_STEP}

OPTIMIZERS: dict[str, Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups),
    "AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr_decay=0.01),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
}


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases learn at another rate, and have no weight decay."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "lr": 0.01}, {"params": biases, "lr": 0.003, "weight_decay": 0.0}]


def mark(tensors: Mapping[str, Tensor]) -> str:
    """The same for equal tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(F.cross_entropy(model(x), y))


def train(exchange: OwnLoop, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        backward(model, optimizer, *batch(100 * exchange.number + step))
        exchange.step()


def refusal(attempt: Callable[[], object]) -> list[str]:
    """The type and the words of what it raises."""
    try:
        attempt()
    except ShoalError as error:
        return [type(error).__name__, error.problem, error.remedy]
    return []


# Every rank a replica


def unequal(name: str) -> list[str]:
    """Replicas with different numbers of batches, twice; what all have after each, and after the block."""
    kind, options = SERVED[name]
    model = network(seed=RANK)
    optimizer = sgd(model, momentum=0.5)
    marks = []
    with shoal.exchange(model, optimizer, kind, **options) as exchange:
        for epoch in range(2):
            train(exchange, model, optimizer, 3 + (5 * exchange.number if epoch else 4 - 4 * exchange.number))
            exchange.finish()
            marks.append(mark(model.state_dict()))
        train(exchange, model, optimizer, 1 + exchange.number)
    return [*marks, mark(model.state_dict())]


def equal(name: str) -> list[str]:
    """The same for replicas in step, which finish twice."""
    kind, options = IN_STEP[name]
    model = network(seed=RANK)
    optimizer = sgd(model, momentum=0.5)
    marks = []
    with shoal.exchange(model, optimizer, kind, **options) as exchange:
        for _ in range(2):
            train(exchange, model, optimizer, 3)
            exchange.finish()
            exchange.finish()
            marks.append(mark(model.state_dict()))
        train(exchange, model, optimizer, 1)
    return [*marks, mark(model.state_dict())]


def uneven(name: str) -> list[list[str]]:
    """Replicas in step with different numbers of batches: rank 0 has fewer, then rank 1; then one has none."""
    kind, options = IN_STEP[name]
    told = []
    for steps in ((2, 4), (4, 2), (0, 1)):

        def attempt(steps: tuple[int, int] = steps) -> None:
            model = network()
            optimizer = sgd(model)
            with shoal.exchange(model, optimizer, kind, **options) as exchange:
                train(exchange, model, optimizer, steps[exchange.number])

        told.append(refusal(attempt))
    return told


def lost(name: str) -> list[str]:
    """The last replica fails after its last step: the others finish without it."""
    kind, options = EVERY[name]
    model = network()
    optimizer = sgd(model)

    def fails_on_the_last() -> None:
        with shoal.exchange(model, optimizer, kind, heartbeat=2, **options) as exchange:
            train(exchange, model, optimizer, 4)
            if RANK == WORLD - 1:
                raise ZeroDivisionError

    try:
        fails_on_the_last()
    except ZeroDivisionError:
        return []
    return [mark(model.state_dict())]


def dead_server(name: str) -> list[str]:
    """A server ends before it could make itself known."""
    kind, options = EVERY[name]
    model = network()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoal.exchanging.membership.meeting.start_server", start_and_die)
        return refusal(lambda: shoal.exchange(model, sgd(model), kind, **options))


def strangers(name: str) -> dict[str, str]:
    """Whether the table where ranks find each other hears somebody new while they train, and when they are done."""
    kind, options = EVERY[name]
    model = network()
    optimizer = sgd(model)
    with shoal.exchange(model, optimizer, kind, **options) as exchange:
        train(exchange, model, optimizer, 2)
        exchange.finish()
        during = knock()
        exchange.finish()
    return {"during": during, "after": knock()}


def knock() -> str:
    """As a stranger, at the table."""
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=0.5).close()
    except TimeoutError:
        return "not heard"
    return "heard"


def start_and_die(*_: object) -> "subprocess.Popen[bytes]":
    """In the place of a server."""
    return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])


def lost_in_step(name: str) -> list[str]:
    """The last replica fails before the others' last step, which cannot be made without it."""
    kind, options = IN_STEP[name]

    def attempt() -> None:
        model = network()
        optimizer = sgd(model)
        with shoal.exchange(model, optimizer, kind, **options) as exchange:
            train(exchange, model, optimizer, 2)
            if RANK == WORLD - 1:
                raise ZeroDivisionError
            train(exchange, model, optimizer, 1)

    try:
        return refusal(attempt)
    except ZeroDivisionError:
        return []


def killed(name: str) -> list[str]:
    """The last rank is killed after its last step."""
    kind, options = EVERY[name]
    model = network()
    optimizer = sgd(model)
    with shoal.exchange(model, optimizer, kind, **options) as exchange:
        train(exchange, model, optimizer, 3 if kind in ("allreduce", "sync") else 3 + 2 * exchange.number)
        if RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return [mark(model.state_dict())]


def frozen(name: str) -> list[str]:
    """Rank 1 stops after its last step. Rank 0 tells that it has finished, and only then is rank 1 woken."""
    kind, options = EVERY[name]
    model = network()
    optimizer = sgd(model)
    with shoal.exchange(model, optimizer, kind, heartbeat=1, **options) as exchange:
        train(exchange, model, optimizer, 3)
        if RANK == 1:
            say("stops", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        exchange.finish()
        say("finished", mark(model.state_dict()))
    return [mark(model.state_dict())]


def optimizers(_: str) -> dict[str, float]:
    """With allreduce any optimizer with groups is one device's with the whole batch: the largest difference."""
    apart = {}
    for name, make in OPTIMIZERS.items():
        model, alone = network(torch.float64), network(torch.float64)
        optimizer, own = make(in_groups(model)), make(in_groups(alone))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        slower = torch.optim.lr_scheduler.StepLR(own, 2, 0.5)
        with shoal.exchange(model, optimizer, "allreduce") as exchange:
            for step in range(5):
                x, y = batch(step, samples=8, kind=torch.float64)
                own_part = slice(4 * exchange.number, 4 * exchange.number + 4)
                backward(model, optimizer, x[own_part], y[own_part])
                exchange.step()
                schedule.step()
                backward(alone, own, x, y)
                own.step()
                slower.step()
        apart[name] = difference(dict(model.named_parameters()), dict(alone.named_parameters()))
    return apart


def own_steps(_: str) -> list[str]:
    """Replicas that step by Adam, with groups, and push how far they came."""
    marks = []
    for kind, options in (("downpour", {"rule": "add"}), ("downpour", {"n_sync": 2}), ("dasgd", {"n_sync": 2})):
        model = network()
        optimizer = torch.optim.Adam(in_groups(model))
        with shoal.exchange(model, optimizer, kind, **options) as exchange:
            train(exchange, model, optimizer, 3 + exchange.number)
        marks.append(mark(model.state_dict()))
    return marks


def different(_: str) -> list[list[str]]:
    """What only one rank gives, or each otherwise, all ranks refuse in the same words."""
    model = network()

    def exchange(*args: Any, **options: Any) -> list[str]:
        return refusal(lambda: shoal.exchange(*args, **options))

    def of_different_sets() -> torch.optim.Optimizer:
        return torch.optim.SGD(list(model.parameters())[: 4 + 2 * RANK], lr=0.1)

    def rates() -> None:
        mine = network()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1 + 0.1 * RANK)
        with shoal.exchange(mine, optimizer, "allreduce") as exchange:
            train(exchange, mine, optimizer, 1)

    return [
        exchange(model, sgd(model), "downpour", **({"n_sync": 2} if RANK else {})),
        exchange(model, sgd(model), "downpour" if RANK else "dasgd"),
        exchange(model, torch.optim.Adam(model.parameters()) if RANK else sgd(model), "sync"),
        exchange(model, sgd(model), "downpour", **({"n_snyc": 2} if RANK else {})),
        exchange(model, of_different_sets(), "allreduce"),
        refusal(rates),
    ]


# Replicas that are groups


def difference(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest, relative to the largest number."""
    return max(float((own[name] - weight).abs().max() / weight.abs().max()) for name, weight in expected.items())


def halves() -> Any:
    """This rank's group: ranks 0 and 1, or 2 and 3."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2]


def laid(plan: str, group: Any, kind: torch.dtype, samples: int) -> ParallelModule:
    """The first weights differ between groups."""
    model = network(kind, seed=RANK // 2)
    return shoal.parallelize(model, batch(0, samples, kind)[0], plan, group=group)


def exact(name: str) -> dict[str, float]:
    """Two replicas of two ranks each beside one device with the whole batch: the largest difference, by plan."""
    kind, options = IN_STEP[name]
    group, apart = halves(), {}
    for plan in ("data", "model", "owt", "spatial"):
        model = laid(plan, group, torch.float64, 4)
        alone = network(torch.float64, seed=0)
        optimizer, own = sgd(model), sgd(alone)
        with shoal.exchange(model, optimizer, kind, **options) as exchange:
            for step in range(4):
                x, y = batch(step, 8, torch.float64)
                part = slice(2 * RANK, 2 * RANK + 2)  # of rank, since replicas are halves in order
                backward(model, optimizer, x[part], y[part])
                exchange.step()
                backward(alone, own, x, y)
                own.step()
        apart[plan] = difference(model.state_dict(), alone.state_dict())
    return apart


def groups(name: str) -> list[Any]:
    """Groups under a plan with unequal numbers of batches: what each rank has in the end, whole."""
    kind, options = EVERY[name]
    model = laid("model" if name in ("threads", "dasgd") else "owt", halves(), torch.float32, 8)
    optimizer = sgd(model, momentum=0.5)
    first = mark(model.state_dict())
    with shoal.exchange(model, optimizer, kind, **options) as exchange:
        part = slice(4 * (RANK % 2), 4 * (RANK % 2) + 4)
        for step in range(3 if kind in ("allreduce", "sync") else 3 + 4 * exchange.number):
            x, y = batch(100 * exchange.number + step)
            backward(model, optimizer, x[part], y[part])
            exchange.step()
        exchange.settle()
        numbers = [exchange.number, exchange.replicas]
    finite = all(bool(weight.isfinite().all()) for weight in model.state_dict().values())
    return [*numbers, mark(model.state_dict()), mark(model.state_dict()) != first, finite]


def misfits(_: str) -> list[list[str]]:
    """Networks that are no replicas of each other."""
    group = halves()
    otherwise = dist.new_group([0, 1, 2])
    told = []

    def attempt(model: nn.Module) -> None:
        told.append(refusal(lambda: shoal.exchange(model, sgd(model), "downpour")))

    attempt(laid("data" if RANK < 2 else "model", group, torch.float32, 8))
    attempt(laid("data", otherwise, torch.float32, 9) if RANK < 3 else network())
    attempt(laid("data", group, torch.float32, 8) if RANK < 2 else network())
    return told


def say(case: str, what: Any) -> None:
    """Print what came of a case."""
    print(json.dumps({case: what}), flush=True)


def run(cases: Sequence[str]) -> None:
    """Each is the name of a function here, and of an exchange: `lost:allreduce`."""
    torch.set_num_threads(1)
    for case in cases:
        function, _, name = case.partition(":")
        begun = time.perf_counter()
        say(case, globals()[function](name))
        say(f"{case} seconds", round(time.perf_counter() - begun, 2))
    if dist.is_initialized():
        dist.destroy_process_group()
