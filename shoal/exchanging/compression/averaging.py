"""The compressed mean of a list of tensors over replicas, in buckets: what `allreduce` does with its gradients.

Keeps     every replica has the same mean, bit for bit.
Costs     what `hook.py` says of each bucket, and two copies of the tensors: one in buckets, one of what is left.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.exchanging.compression.codecs import BLOCK, Codec
from shoal.exchanging.compression.hook import FlatBucket, HookState, hook, mean_bytes
from shoal.exchanging.compression.residual import of_one_kind


def bucket_sizes(elements: int, itemsize: int, limit: int) -> list[int]:
    """Elements of each bucket: about `limit` bytes, cut between blocks, so that cutting adds no scale.

    >>> bucket_sizes(2000, itemsize=4, limit=4096)
    [1024, 976]
    """
    most = max(1, limit // itemsize // BLOCK) * BLOCK
    return [min(most, elements - start) for start in range(0, elements, most)]


class Moved(NamedTuple):
    """Payload bytes of one replica."""

    sent: int
    received: int


class Averager:
    """One rank's side. `group`: of c10d, this rank `number` of it. All give tensors of the same sizes in one order."""

    def __init__(self, codec: Codec, group: Any, number: int, bucket_bytes: int) -> None:
        self._state = HookState(codec, group=group)
        self._number, self._limit = number, bucket_bytes
        self._together: list[list[int]] = []
        """Numbers of the tensors of one type, which lie in one of `_flats`."""
        self._sizes: list[list[int]] = []
        """Their elements."""
        self._flats: list[Tensor] = []
        self._buckets: list[FlatBucket] = []

    def average(self, tensors: Sequence[Tensor]) -> Moved:
        """Replace flat tensors by their compressed mean over all replicas. Collective."""
        self._lay_out(tensors)
        for flat, numbers in zip(self._flats, self._together, strict=True):
            torch.cat([tensors[number] for number in numbers], out=flat)
        given: list[Any] = list(self._buckets)  # the hook reads only what a FlatBucket has
        futures = [hook(self._state, bucket) for bucket in given]
        for bucket, future in zip(self._buckets, futures, strict=True):
            bucket.flat.copy_(future.wait())
        for flat, numbers, sizes in zip(self._flats, self._together, self._sizes, strict=True):
            for number, mean in zip(numbers, flat.split_with_sizes(sizes), strict=True):
                tensors[number].copy_(mean)
        return self._moved()

    def state(self) -> list[Tensor]:
        """What was not sent yet of each tensor, flat, to be saved. Nothing before the first mean."""
        left = self._state.state([bucket.flat for bucket in self._buckets])
        whole = self._by_kind(left)
        by_number: dict[int, Tensor] = {}
        for flat, numbers, sizes in zip(whole, self._together, self._sizes, strict=True):
            by_number |= dict(zip(numbers, flat.split_with_sizes(sizes), strict=True))
        return [by_number[number] for number in sorted(by_number)]

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Go on with what `state` gave, of tensors of the same sizes and types; before or after a first mean."""
        if not state:
            return
        self._lay_out(state)
        saved = [torch.cat([state[number].view(-1) for number in numbers]) for numbers in self._together]
        parts = [part for flat in saved for part in flat.split_with_sizes(self._bucket_sizes(flat))]
        self._state.load_state([bucket.flat for bucket in self._buckets], parts)

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        if self._flats or not tensors:
            return
        self._together = of_one_kind([tensor.dtype for tensor in tensors])
        self._sizes = [[tensors[number].numel() for number in numbers] for numbers in self._together]
        for numbers, sizes in zip(self._together, self._sizes, strict=True):
            first = tensors[numbers[0]]
            self._flats.append(torch.empty(sum(sizes), dtype=first.dtype, device=first.device))
        cuts = [part for flat in self._flats for part in flat.split_with_sizes(self._bucket_sizes(flat))]
        self._buckets = [FlatBucket(number, part) for number, part in enumerate(cuts)]

    def _bucket_sizes(self, flat: Tensor) -> list[int]:
        return bucket_sizes(flat.numel(), flat.itemsize, self._limit)

    def _by_kind(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Parts of buckets as one tensor for each type again."""
        rest = list(parts)
        return [torch.cat([rest.pop(0) for _ in self._bucket_sizes(flat)]) for flat in self._flats]

    def _moved(self) -> Moved:
        ranks = self._state.group.size()
        sent, received = (
            sum(
                mean_bytes(self._state.codec, bucket.flat.numel(), bucket.flat.dtype, ranks, rank)
                for bucket in self._buckets
            )
            for rank in (self._number, (self._number - 1) % ranks)
        )
        return Moved(sent, received)
