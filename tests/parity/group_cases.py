"""Cases that run inside the ranks: networks on groups of ranks, several at a time."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import ConfigError, InputError, PeerError, RunError, ShoalError
from shoal.transport import Transport
from shoal.transport.agreement import agree

SHAPE = (3, 10, 8)


def network(seed: int) -> nn.Module:
    """Two networks of one architecture have the same tags and the same sizes: the worst case for a mix-up."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(160, 6)).double()


class Trained:
    """A parallel network on some ranks, and the same on one device beside it."""

    def __init__(self, seed: int, plan: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.here, self.count = list(ranks).index(dist.get_rank()), len(ranks)
        self.reference, self.draw = network(seed), torch.Generator().manual_seed(100 + seed)
        self.model = shoal.parallelize(network(seed), (2 * len(ranks), *SHAPE), plan, group=group)
        self.steps = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (self.model, self.reference)]

    def forward(self) -> Tensor:
        """This rank's loss; the reference's backward is done at once."""
        x = torch.randn(2 * self.count, *SHAPE, dtype=torch.float64, generator=self.draw)
        y = torch.randint(0, 6, (2 * self.count,), generator=self.draw)
        expected = self.reference(x)
        torch.autograd.backward(F.cross_entropy(expected, y))
        mine = slice(2 * self.here, 2 * self.here + 2)
        out = self.model(x[mine])
        torch.testing.assert_close(out, expected.detach()[mine], rtol=1e-9, atol=1e-11)
        return F.cross_entropy(out, y[mine])

    def step(self) -> None:
        """One step of both, after which both have the same weights."""
        for optimizer in self.steps:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(
            shoal.full_state_dict(self.model), dict(self.reference.state_dict()), rtol=1e-9, atol=1e-11
        )

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            torch.autograd.backward(self.forward())
            self.step()


def new_group(ranks: Sequence[int], seconds: float = 60) -> dist.ProcessGroup:
    """As a script makes it: called by all ranks."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=timedelta(seconds=seconds)))


def together(one: Trained, other: Trained) -> None:
    """Interleaved in every order that autograd allows."""
    for _ in range(2):
        first, second = one.forward(), other.forward()
        torch.autograd.backward(second)
        torch.autograd.backward(first)
        other.step()
        one.step()
    torch.autograd.backward(one.forward() + other.forward())
    one.step()
    other.step()
    first, second = one.forward(), other.forward()
    torch.autograd.backward(first)
    one.step()
    torch.autograd.backward(second)
    other.step()


def halves(plan: str) -> None:
    """Each half of the world trains a network of its own."""
    groups = [new_group([0, 1]), new_group([2, 3])]
    half, known = dist.get_rank() // 2, len(dist.distributed_c10d._world.pg_names)
    Trained(7 + half, plan, [2 * half, 2 * half + 1], groups[half]).train()
    assert len(dist.distributed_c10d._world.pg_names) == known  # by which torch names a script's own groups


def half_only(plan: str) -> None:
    """Two ranks train, the other two know nothing of it."""
    group = new_group([1, 3])
    if dist.get_rank() in (1, 3):
        Trained(7, plan, [1, 3], group).train()
    dist.barrier()


def on_one_group(plan: str) -> None:
    together(Trained(1, plan, range(4), None), Trained(2, plan, range(4), None))


def on_two_groups(plan: str) -> None:
    """One network on all ranks, one on each half; and two groups of the same ranks."""
    groups = [new_group([0, 1]), new_group([2, 3]), new_group(range(4))]
    half = dist.get_rank() // 2
    all_ranks, pair = Trained(1, plan, range(4), None), Trained(2, plan, [2 * half, 2 * half + 1], groups[half])
    together(all_ranks, pair)
    together(pair, Trained(3, plan, range(4), groups[2]))
    together(all_ranks, pair)


def overlapping(plan: str) -> None:
    """0-1, 1-2, 2-3: ranks know different numbers of groups, so torch's own names would not meet."""
    rank, pairs = dist.get_rank(), [(0, 1), (1, 2), (2, 3)]
    groups = [new_group(pair) for pair in pairs]
    nets = [
        Trained(index, plan, pair, group)
        for index, (pair, group) in enumerate(zip(pairs, groups, strict=True))
        if rank in pair
    ]
    if len(nets) == 2:
        together(*nets)
    else:
        nets[0].train(4)


def messages_of_the_script(plan: str) -> None:
    """The script's own messages and sums on the given group, under way across our calls, stay its own."""
    rank, group = dist.get_rank(), new_group(range(4))
    net, other = Trained(5, plan, range(4), group), rank ^ 1
    sent, got = [torch.full((7,), 10.0 * tag + rank) for tag in range(6)], [torch.empty(7) for _ in range(6)]
    works = [dist.isend(tensor, other, group, tag) for tag, tensor in enumerate(sent)]
    total = torch.ones(3)
    works.append(cast(Any, dist.all_reduce(total, group=group, async_op=True)))
    net.train()
    works += [dist.irecv(tensor, other, group, tag) for tag, tensor in enumerate(got)]
    for work in works:
        assert work is not None
        work.wait()
    assert [float(tensor[0]) for tensor in got] == [10.0 * tag + other for tag in range(6)]
    assert total.tolist() == [4.0] * 3


def refused_groups() -> list[str]:
    """What is said to a rank that is not in its group, and of a group that was destroyed."""
    rank, found = dist.get_rank(), []
    group = new_group([0, 1])
    try:
        shoal.parallelize(network(1), (4, *SHAPE), group=group).train()
    except ConfigError as error:
        found.append(str(error))
    dist.barrier()
    if rank < 2:
        dist.destroy_process_group(group)
        try:
            shoal.parallelize(network(1), (4, *SHAPE), group=group)
        except ConfigError as error:
            found.append(str(error))
    Trained(7, "data", range(4), None).train(1)
    return found


def late_rank() -> tuple[str, str] | None:
    """A rank that comes after the given group's time-out, which is shorter than the world's."""
    group = new_group([0, 3], seconds=1.5)
    if dist.get_rank() not in (0, 3):
        return None
    transport = Transport(group)
    transport.header("forward", [])
    if dist.get_rank() == 3:
        time.sleep(4)
    try:
        transport.header("forward", [])
    except PeerError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nobody noticed")


def headers() -> list[str]:
    """Different calls, and one call of different networks, are refused on all ranks; then all goes on."""
    rank, found = dist.get_rank(), []
    group = new_group([3, 1, 2])  # counted from 0 in the order of the world
    one, other = Transport(), Transport()
    assert one.header("forward", [rank, 0.5]) == [[float(one), 0.5] for one in range(4)]
    other.header("forward", [])

    def refused(call: Any) -> None:
        try:
            call()
        except RunError as error:
            found.append(error.problem)
        else:
            raise AssertionError("not refused")

    refused(lambda: one.header("state_dict" if rank == 0 else "forward", [1.0]))
    refused(lambda: (one if rank % 2 else other).header("forward", []))
    refused(lambda: one.gather_objects({"a": "much" * 1000}) if rank == 3 else one.header("forward", [1, 2]))
    refused(lambda: one.gather_numbers([1.0] * 50) if rank == 3 else one.gather_objects("little"))
    if rank:
        inner = Transport(group)
        refused(lambda: inner.header("state_dict" if rank == 1 else "forward", []))
    else:
        found.append("")
    assert one.gather_numbers([float(rank)] * (5 * rank)) == [[float(one)] * (5 * one) for one in range(4)]
    assert one.gather_objects("x" * rank) == ["", "x", "xx", "xxx"]
    return found


def disagreements() -> list[tuple[str, str]]:
    """What each rank raises when an attempt fails on some of them."""
    rank, transport, found = dist.get_rank(), Transport(), []

    def attempt(errors: dict[int, Exception]) -> None:
        if rank in errors:
            raise errors[rank]

    cases: list[dict[int, Exception]] = [
        {1: InputError("bad lr.", "Lower it.")},
        dict.fromkeys(range(4), InputError("bad lr.", "Lower it.")),
        {2: ZeroDivisionError("division\nby zero")},
        {2: ZeroDivisionError("division"), 3: ConfigError("bad.", "Do.")},
        {0: RunError("broken.", "Mend."), 3: KeyError("x")},
    ]
    for errors in cases:
        try:
            agree(transport, lambda errors=errors: attempt(errors))  # type: ignore[misc]
        except Exception as error:
            found.append((type(error).__name__, error.problem if isinstance(error, ShoalError) else str(error)))
    assert agree(transport, lambda: rank) == rank
    return found
