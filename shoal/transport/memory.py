"""Ranks as threads of one process: the same seam without a network. For tests, and for looking at a plan.

    run_ranks(4, lambda transport: ...)     # what each rank returned, by rank

The first rank that fails ends the others: whoever waits for it stops waiting.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from shoal.timeline import Kind
from shoal.transport.base import EVERYONE, Transport, Waitable

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for another before it gives up."""


class Hub:
    """What the ranks share: a mailbox for every (sender, receiver, tag)."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, object], Queue[Tensor]] = defaultdict(Queue)
        self.lock = threading.Lock()
        self.failed = threading.Event()

    def box(self, src: int, dst: int, tag: object) -> "Queue[Tensor]":
        """The mailbox; made once, whoever asks first."""
        with self.lock:
            return self.boxes[src, dst, tag]


class _Done:
    """The handle of a sum that is finished already."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


@dataclass
class _Collect:
    """The handle of messages that are taken out of their mailboxes when they are waited for."""

    collect: Callable[[], None]

    def wait(self) -> None:
        """Take them."""
        self.collect()


class MemoryTransport(Transport):
    """One rank of `world` threads."""

    def __init__(self, hub: Hub, rank: int, world: int) -> None:
        super().__init__(alone=True)
        self._hub = hub
        self.rank, self.world, self._members = rank, world, tuple(range(world))

    def make_groups(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Threads need no groups."""

    def _send(self, tensor: Tensor, dst: int, tag: object) -> None:
        self._hub.box(self.rank, dst, tag).put(tensor.detach().clone())

    def _receive(self, src: int, tag: object) -> Tensor:
        box = self._hub.box(src, self.rank, tag)
        for _ in range(int(PATIENCE * 20)):
            if self._hub.failed.is_set():
                raise self._gone([src], self.label)
            try:
                return box.get(timeout=0.05)
            except Empty:
                continue
        raise self._silent([src], self.label, PATIENCE)

    def begin_moves(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        purpose: str = EVERYONE,
        kind: Kind = "move",
    ) -> Sequence[Waitable]:
        """Leave copies in mailboxes; what others left is collected at the wait."""
        self.read_header()
        for dst, tensor in sends:
            self._send(tensor, dst, (purpose, tag))
        if sends:
            self._count(sum(tensor.nbytes for _, tensor in sends), len(sends), self.label)

        def collect() -> None:
            for src, buffer in receives:
                buffer.copy_(self._receive(src, (purpose, tag)))

        return [_Collect(collect)]

    def _reduce(
        self, tensor: Tensor, ranks: tuple[int, ...], label: str, join: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Every rank hears every other and joins them in the order of ranks, so all get the same bits."""
        self.read_header()
        self._count_sum(tensor, ranks, label)
        for dst in ranks:
            if dst != self.rank:
                self._send(tensor, dst, "sum")
        pieces = [tensor.clone() if src == self.rank else self._receive(src, "sum") for src in ranks]
        total = pieces[0]
        for piece in pieces[1:]:
            total = join(total, piece)
        tensor.copy_(total)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """Add up a tensor over ranks, in place on each."""
        self.sum_later(tensor, ranks, purpose, label=self.label)

    def sum_later(
        self,
        tensor: Tensor,
        ranks: tuple[int, ...],
        purpose: str,
        *,
        label: str,
        kind: Kind = "sum",
        content: str = "",
    ) -> _Done | None:
        """The sum is taken at once."""
        if len(ranks) == 1:
            return None
        self._reduce(tensor, ranks, label, torch.add)
        return _Done()

    def tell(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The first rank's tensor, in place on all of `ranks`."""
        self.read_header()
        if self.rank != ranks[0]:
            tensor.copy_(self._receive(ranks[0], "tell"))
            return
        for dst in ranks[1:]:
            self._count(tensor.nbytes, 1, self.label)
            self._send(tensor, dst, "tell")

    def max(self, tensor: Tensor, ranks: tuple[int, ...], purpose: str) -> None:
        """The largest over ranks, in place on each."""
        if len(ranks) > 1:
            self._reduce(tensor, ranks, self.label, torch.maximum)

    def _network(self) -> int:
        """All threads of a hub have the network number 0."""
        return 0

    def _begin_gather(self, mine: Tensor, operation: str) -> Callable[[], list[Tensor]]:
        """Tensors of one shape and type from every rank to every rank."""
        self.read_header()
        self.label = operation
        for dst in range(self.world):
            if dst != self.rank:
                self._send(mine, dst, "gather")
        return lambda: [mine if src == self.rank else self._receive(src, "gather") for src in range(self.world)]

    def good_bucket_bytes(self) -> int:
        """There is no link to measure."""
        return 1 << 20

    def measured_sums(self) -> None:
        """Nor here."""
        return


def run_ranks(world: int, work: Callable[[Transport], T]) -> list[T]:
    """Run `work` on every rank and give what each returned; the first failure is raised."""
    hub = Hub()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(MemoryTransport(hub, rank, world))
        except BaseException as error:
            if not hub.failed.is_set():
                errors.append(error)
            hub.failed.set()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]
