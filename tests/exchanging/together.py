"""Replicas as threads, or one after the other, of one process: real links and shards, no launcher."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.exchanges import parse_exchange
from shoal.exchanging import Exchange, Meeting, Replica, Seat, join
from shoal.exchanging.membership.coordinator import Coordinator
from shoal.exchanging.servers.process import serve
from shoal.exchanging.servers.server import Server
from shoal.exchanging.servers.shared_memory import SharedFolder
from shoal.transport.table import OwnTable

T = TypeVar("T")
_drawing = threading.Lock()


class Side:
    """One replica: a network, its optimizer and its exchange."""

    def __init__(
        self, number: int, model: nn.Module, optimizer: torch.optim.SGD, exchange: Exchange, seat: Seat
    ) -> None:
        self.number, self.model, self.optimizer, self.exchange, self.seat = number, model, optimizer, exchange, seat

    def step(self, x: Tensor, y: Tensor, rate: float = 0.1) -> bool | None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(F.cross_entropy(self.model(x), y))
        return self.exchange.step(rate)

    def push(self, gradient: float, rate: float = 1.0) -> bool | None:
        """A step with every gradient element set to a number."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        return self.exchange.step(rate)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


def network(kind: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    """Convolution, odd sizes, a tensor that is large enough to be cut and to be sent sparsely."""
    with _drawing:  # torch has one generator for all threads
        torch.manual_seed(seed)
        return _network().to(kind)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 16, 33), nn.ReLU(), nn.Linear(33, 5)
    )


def sgd(model: nn.Module, momentum: float = 0.9, weight_decay: float = 0.01) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True)


def batch(number: int, samples: int = 8, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100 + number)
    return torch.randn(samples, 1, 6, 6, generator=draws, dtype=kind), torch.randint(5, (samples,), generator=draws)


@contextmanager
def meeting(
    name: str, replicas: int, *, servers: int = 0, **options: Any
) -> Iterator[tuple[Callable[..., Side], Coordinator]]:
    """A function that makes side `number`.

    With `servers` behind links, else in shared memory where the exchange has any.
    """
    parsed = parse_exchange(name, options)
    wanted = parsed.gradients_per_update(replicas)
    with ExitStack() as stack:
        kept = [Server() for _ in range(servers)]
        shared = (
            SharedFolder.create()
            if parsed.holding(replicas, one_host=True, weight_bytes=0).place == "direct" and not servers
            else None
        )
        if shared is not None:
            stack.callback(shared.remove)
        coordinator = Coordinator(
            heartbeat=parsed.heartbeat,
            replicas=replicas,
            servers=servers,
            shared=shared,
            registers=parsed.registers,
            wanted=wanted,
        )
        stack.callback(coordinator.close)
        for number, server in enumerate(kept):
            stack.callback(server.close)
            where_to = (server, coordinator.address, coordinator.token, number)
            threading.Thread(target=serve, args=where_to, daemon=True).start()
        table = OwnTable()
        stack.callback(table.close)
        where = Meeting(
            coordinator.address,
            coordinator.token,
            replicas,
            60.0,
            None if shared is None else shared.path,
            table.url,
        )

        def side(
            number: int,
            *,
            kind: torch.dtype = torch.float32,
            momentum: float = 0.9,
            weight_decay: float = 0.01,
            seed: int = 1,
            loaded: Mapping[str, Any] | None = None,
        ) -> Side:
            model = network(kind, seed)
            optimizer = sgd(model, momentum, weight_decay)
            if loaded is not None:
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
            seat = Seat(where, rank=0, replica=number, pids=[], heartbeat=parsed.heartbeat)
            seat.live(number)
            exchange = join(parsed, Replica(dict(model.named_parameters()), optimizer), seat, number)
            exchange.begin(first=number == 0)
            joined = Side(number, model, optimizer, exchange, seat)
            stack.callback(seat.leave)
            stack.callback(exchange.close)
            return joined

        try:
            yield side, coordinator
        finally:
            failures = [] if coordinator.failure is None else [coordinator.failure]
            errors = [*failures, *(error for server in kept for error in server.errors)]
            for error in errors:
                raise error


def at_once(works: Sequence[Callable[[], T]], seconds: float = 60.0) -> list[T]:
    """Run all in threads of their own; the first error is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int, work: Callable[[], T]) -> None:
        try:
            results[number] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return [results[number] for number in range(len(works))]
