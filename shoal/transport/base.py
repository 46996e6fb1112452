"""One seam to the network, over c10d: point-to-point moves and sums within groups of ranks.

Everything that a step sends goes through here and is counted as payload: a message by its bytes, a sum over P
ranks of B bytes as the 2 (P-1) B that a ring sends, shared evenly by its ranks. What is counted is therefore
comparable with what the pure moves predict, whichever algorithm the backend uses.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.traffic import Sent, ring_bytes, total

BUCKET_LIMITS = (256 << 10, 25 << 20)
"""Smallest and largest bucket of gradients, in bytes."""
PAIR_BYTES = 64 << 10
"""Largest tensor that two ranks sum by sending it to each other."""
PAIR_TAG = 1 << 30
"""The tag of such messages; moves have the tags of their instructions."""


@dataclass
class _Made:
    """Groups that exist in this process, and the world they belong to."""

    world: object = None
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)


_made_in = _Made()


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done."""
        ...


class Transport:
    """The ranks of one replica; without a process group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        there = dist.is_available() and dist.is_initialized() and not alone
        self.group = group
        self.rank = dist.get_rank(group) if there else 0
        self.world = dist.get_world_size(group) if there else 1
        self.label = ""
        """What the next messages are for: a layer's name."""
        self.counted: dict[str, Sent] = {}
        """Payload that this rank sent, by label."""
        on_gpu = there and "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda") if on_gpu else torch.device("cpu")
        """Where small tensors of our own must lie to be sent."""

    @property
    def sent(self) -> Sent:
        """All payload that this rank sent."""
        return total(self.counted)

    def make_groups(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Create the groups of ranks that sums will use; a collective, with the same list on every rank.

        A purpose has groups of its own, so that sums of gradients in the background do not delay others.
        """
        for purpose, ranks in sorted(set(wanted)):
            if len(ranks) > 1:  # ranks that are not in it take part too: torch names groups by counting them
                self._group(purpose, ranks)

    def _group(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of these ranks, made once per process: a group has threads and sockets, networks come and go."""
        members = tuple(self._global(rank) for rank in ranks)
        if _made_in.world is not dist.group.WORLD:  # the processes were initialised anew
            _made_in.world, _made_in.groups = dist.group.WORLD, {}
        if (purpose, members) not in _made_in.groups:
            # torch's own default is half an hour, whatever was chosen for the world
            patience = dist.group.WORLD._get_backend(self._device).options._timeout  # type: ignore[union-attr]
            _made_in.groups[purpose, members] = dist.new_group(list(members), timeout=patience)
        return _made_in.groups[purpose, members]

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _count(self, size: int, messages: int, label: str) -> None:
        self.counted[label] = self.counted.get(label, Sent()) + Sent(size, messages)

    def _count_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: str) -> None:
        self._count(ring_bytes(tensor.nbytes, len(ranks), ranks.index(self.rank)), 1, label)

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> Sequence[Waitable]:
        """Start to send and receive whole contiguous tensors, which must stay as they are until all is waited for."""
        works = [dist.irecv(buffer, self._global(src), self.group, tag) for src, buffer in receives]
        works += [dist.isend(tensor, self._global(dst), self.group, tag) for dst, tensor in sends]
        if sends:
            self._count(sum(tensor.nbytes for _, tensor in sends), len(sends), self.label)
        return [work for work in works if work is not None]

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """Add up a tensor over ranks, in place on each."""
        if len(ranks) == 2 and tensor.nbytes <= PAIR_BYTES and self._device.type == "cpu":
            self._sum_pair(tensor, ranks)
            return
        work = self.sum_later(tensor, ranks, purpose, label=self.label)
        if work is not None:
            work.wait()

    def _sum_pair(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Two ranks send each other a small tensor, in half of an all-reduce's time. a + b = b + a, also in floats."""
        other = ranks[1 - ranks.index(self.rank)]
        theirs = torch.empty_like(tensor)
        works = [
            dist.irecv(theirs, self._global(other), self.group, PAIR_TAG),
            dist.isend(tensor, self._global(other), self.group, PAIR_TAG),
        ]
        self._count_sum(tensor, ranks, self.label)
        for work in works:
            if work is not None:
                work.wait()
        tensor.add_(theirs)

    def sum_later(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str, *, label: str) -> Waitable | None:
        """Start such a sum; the tensor is ready when the work is waited for."""
        if len(ranks) == 1:
            return None
        self._count_sum(tensor, ranks, label)
        work: Waitable = dist.all_reduce(tensor, group=self._group(purpose, ranks), async_op=True)
        return work

    def tell(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The first rank's tensor, in place on all of `ranks`."""
        if len(ranks) > 1:
            if self.rank == ranks[0]:
                self._count((len(ranks) - 1) * tensor.nbytes, len(ranks) - 1, self.label)
            dist.broadcast(tensor, self._global(ranks[0]), group=self._group(purpose, ranks))

    def max(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The largest over ranks, in place on each."""
        if len(ranks) > 1:
            self._count_sum(tensor, ranks, self.label)
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group(purpose, ranks))

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """A few numbers from every rank to every rank: control, not counted as payload."""
        if self.world == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        table = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(table, mine, group=self.group)
        return [row.tolist() for row in table]

    def gather_objects(self, value: Any) -> list[Any]:
        """Something that pickles, from every rank to every rank: control, not counted as payload."""
        if self.world == 1:
            return [value]
        table: list[Any] = [None] * self.world
        dist.all_gather_object(table, value, group=self.group)
        return table

    def good_bucket_bytes(self) -> int:
        """A size of gradient buckets for this link: large enough that latency is a tenth of a bucket's time.

        Measured on six small sums, some ten milliseconds; the ranks agree on the slowest's.
        """
        if self.world == 1:
            return BUCKET_LIMITS[1]
        everyone = tuple(range(self.world))
        self.make_groups([("measure", everyone)])
        seconds = []
        for size in (1 << 10, 1 << 20):
            tensor, times = torch.zeros(size, device=self._device), []
            for _ in range(3):
                start = time.perf_counter()
                dist.all_reduce(tensor, group=self._group("measure", everyone))
                times.append(time.perf_counter() - start)
            seconds.append(min(times))
        latency, per_byte = seconds[0], max(seconds[1] - seconds[0], 1e-9) / (4 << 20)
        wanted = max(row[0] for row in self.gather_numbers([10 * latency / per_byte]))
        return int(min(max(wanted, BUCKET_LIMITS[0]), BUCKET_LIMITS[1]))
