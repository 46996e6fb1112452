"""Parameters of which this rank keeps some rows and its layers read more: rows come before a pass, gradients go back.

Where the optimizer's state is cut (`lowering/owners.py`), a parameter of the network is the rows that this rank keeps,
with their gradient and what the optimizer remembers of them. What layers read is its copy: memory for the whole use, of
which the parameter is a view, so that a step on it is a step on the copy, and nothing is held twice.

Promise   a pass sees what the owners have when it begins, whoever changed it and however; a gradient is the sum over
          the ranks, in one order, taken once, by the rank that keeps the rows.
Cost      a copy's bytes but for the own rows, once in every forward and once in every backward pass: together those of
          one sum over all ranks in a ring. Both travel while the rank computes: a copy is waited for when the first
          layer reads it. Of the gradients no more are under way than the largest one takes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.execution.factors import Own
from shoal.execution.gradients import Collector
from shoal.execution.states import ShardedStates
from shoal.lowering.factors import Factors
from shoal.lowering.owners import FROM_OWNERS, TO_OWNERS
from shoal.partition import Box, slices
from shoal.transport import Transport, Waitable
from shoal.transport.base import BACKGROUND


@dataclass(frozen=True)
class _Copy:
    """One parameter that this rank has a copy of."""

    number: int
    """Among all states; the tag of its messages."""
    use: Box
    owners: Mapping[int, Box]
    """By rank, ascending, this one among them, the rows that it keeps of the use."""

    def rows(self, tensor: Tensor, owner: int) -> Tensor:
        """What a rank keeps of a tensor that is laid out as the use is."""
        return tensor[slices(self.owners[owner], self.use)]


class Gathered(dict[str, Tensor]):
    """States by name, of which some are still on their way: each is waited for when it is first asked for."""

    def __init__(self, states: Mapping[str, Tensor], arriving: Mapping[str, Iterable[Waitable]]) -> None:
        super().__init__(states)
        self._arriving = dict(arriving)

    def __getitem__(self, name: str) -> Tensor:
        for work in self._arriving.pop(name, ()):
            work.wait()
        return super().__getitem__(name)

    def wait(self) -> None:
        """Until everything has arrived, here and where it was sent."""
        for name in list(self._arriving):
            self[name]


class Copies:
    """The copies of one rank: of every parameter of which its layers read more than it keeps."""

    def __init__(self, states: ShardedStates, transport: Transport) -> None:
        self._states, self._transport, rank, uses = states, transport, transport.rank, states.uses
        self._copies: dict[str, _Copy] = {}
        self._memory: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        for number, (name, use) in enumerate(uses.items()):
            homes, mine = states.layouts[name], use[rank]
            if mine is not None and homes[rank] != mine:
                sharing = [(other, home) for other, home in enumerate(homes) if use[other] == mine and home is not None]
                self._copies[name] = _Copy(number, mine, dict(sharing))
                self._own_memory(name, self._copies[name])  # now: what people take of a parameter later is a view too
        if any(states.layouts[name] != use for name, use in uses.items()):
            transport.make_groups([(BACKGROUND, tuple(range(transport.world)))])

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def gather(self, states: Mapping[str, Tensor]) -> Gathered:
        """`states` as layers read them: copies, some still on their way, in the place of rows. A collective."""
        self.note_changes()
        arriving = {name: self._begin(name, copy) for name, copy in self._copies.items()}
        read = {name: self._memory[name].detach().requires_grad_(states[name].requires_grad) for name in arriving}
        return Gathered({**states, **read}, arriving)

    def _begin(self, name: str, copy: _Copy) -> Iterable[Waitable]:
        rank = self._transport.rank
        with torch.inference_mode(False):
            memory = self._own_memory(name, copy)
        self._versions[name] = self._states[name]._version
        peers = [peer for peer in copy.owners if peer != rank]
        self._transport.label = FROM_OWNERS
        mine = copy.rows(memory, rank)
        sends, receives = [(peer, mine) for peer in peers], [(peer, copy.rows(memory, peer)) for peer in peers]
        return self._transport.begin_moves(sends, receives, 2 * copy.number, purpose=BACKGROUND)

    def _own_memory(self, name: str, copy: _Copy) -> Tensor:
        """The memory of a copy, of which the parameter is a view: also after somebody gave it other memory."""
        parameter, shard, memory = self._states[name], self._states.bare(name), self._memory.get(name)
        if memory is None or (memory.dtype, memory.device) != (shard.dtype, shard.device):
            memory = self._memory[name] = shard.new_empty([len(span) for span in copy.use])
        mine = copy.rows(memory, self._transport.rank)
        if shard.data_ptr() != mine.data_ptr() or shard.stride() != mine.stride():
            mine.copy_(shard)
            parameter.data = mine
        return memory

    def note_changes(self) -> None:
        """Let copies count the changes of this rank's rows, so that what autograd kept of a copy counts as changed."""
        for name in self._copies:
            version = self._states[name]._version
            if name in self._memory and version != self._versions.get(name):
                torch.autograd.graph.increment_version(self._memory[name])
            self._versions[name] = version

    def sums(self, rest: Collector) -> "OwnerSums":
        """Sums the gradients of copies where their rows are kept; `rest` has those of all other parameters."""
        return OwnerSums(self._copies, rest, self._transport)


@dataclass
class _Sum:
    """The rows of this rank of one gradient, as all ranks that share its use have them."""

    mine: Tensor
    received: list[Tensor]
    """By the other owners' numbers, ascending."""
    works: Iterable[Waitable]
    bytes: int
    """Of the whole gradient, which is held until it has left."""

    def wait(self) -> Tensor:
        """Their sum, in memory of its own."""
        for work in self.works:
            work.wait()
        first, *others = self.received
        first.add_(self.mine)
        for other in others:
            first.add_(other)
        return first


class OwnerSums:
    """A `Collector` of one backward pass; see `Copies.sums`."""

    def __init__(self, copies: Mapping[str, _Copy], rest: Collector, transport: Transport) -> None:
        self._copies, self._rest, self._transport = copies, rest, transport
        self._under_way: dict[str, _Sum] = {}
        self._done: dict[str, Tensor] = {}
        self._most = 0

    def ready(self, name: str, grad: Tensor) -> None:
        """Send the gradient's rows to those that keep them."""
        if name not in self._copies:
            self._rest.ready(name, grad)
            return
        copy, rank, grad = self._copies[name], self._transport.rank, grad.contiguous()
        self._make_room(grad.nbytes)
        peers = [peer for peer in copy.owners if peer != rank]
        mine = copy.rows(grad, rank)
        received = [torch.empty_like(mine) for _ in peers]
        sends = [(peer, copy.rows(grad, peer)) for peer in peers]
        label, self._transport.label = self._transport.label, TO_OWNERS
        tag = 2 * copy.number + 1
        receives = list(zip(peers, received, strict=True))
        works = self._transport.begin_moves(sends, receives, tag, purpose=BACKGROUND)
        self._transport.label = label
        self._under_way[name] = _Sum(mine, received, works, grad.nbytes)

    def ready_factors(self, factors: Factors, own: Own | None, shard: Tensor) -> None:
        """Of a weight that has no copy: its rows are not divided."""
        self._rest.ready_factors(factors, own, shard)

    def _make_room(self, size: int) -> None:
        """Wait for the first sums until this one is under way with no more than the largest gradient takes."""
        self._most = max(self._most, size)
        while self._under_way and size + sum(one.bytes for one in self._under_way.values()) > self._most:
            self._end(next(iter(self._under_way)))

    def _end(self, name: str) -> None:
        self._done[name] = self._under_way.pop(name).wait()

    def finish(self) -> Mapping[str, Tensor]:
        """Wait for all sums."""
        for name in list(self._under_way):
            self._end(name)
        return {**self._rest.finish(), **self._done}
