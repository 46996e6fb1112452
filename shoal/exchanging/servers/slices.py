"""Which server keeps which elements of a network's weights. Integers only: no tensors, no processes.

Note: cuts fall on grains.
    torch's fused optimizers compute whole vectors first and a tensor's last few elements one by one, and the two may
    round differently. A cut at a multiple of 64 elements from a tensor's start leaves every element on the side it
    was on (the longest vector has 32), so that a server's update of a shard has the same bits as the update of the
    whole tensor. Nor do two servers on one host then write to the same line of a processor's cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` up to, not including, `stop` of the flattened tensor `name`. `cut_over` makes no empty ones."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start


def cut_over(sizes: Mapping[str, int], servers: int, grain: int = 64) -> list[list[Slice]]:
    """Deal tensors of these sizes (elements), in their order, to servers: every element once, one list per server.

    A server is filled until it has its even share and then up to the next grain or the tensor's end, so its load is
    less than a grain from the even share; where all sizes are multiples of `grain`, loads differ by one grain at
    most. There are at most `servers - 1` cuts. The last servers get nothing when there is too little.

    >>> cut_over({"weight": 200, "bias": 10}, servers=2)  # doctest: +NORMALIZE_WHITESPACE
    [[Slice(name='weight', start=0, stop=128)],
     [Slice(name='weight', start=128, stop=200), Slice(name='bias', start=0, stop=10)]]
    """
    if servers < 1 or grain < 1:
        raise ValueError(f"cannot cut tensors over {servers} servers in grains of {grain}: both must be at least 1")
    total = sum(sizes.values())
    held: list[list[Slice]] = [[] for _ in range(servers)]
    server = 0
    walked = 0  # elements of the tensors before this one
    for name, size in sizes.items():
        start = 0
        while start < size:
            share = _divide_up(total * (server + 1), servers) - walked  # where this server's share ends, in this tensor
            stop = min(size, _divide_up(share, grain) * grain)
            if stop > start:
                held[server].append(Slice(name, start, stop))
                start = stop
            else:  # it has its share already; the last server never has, while anything is left
                server += 1
        walked += size
    return held


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)
